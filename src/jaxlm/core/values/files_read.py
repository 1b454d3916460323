"""Compares the files that every process of a run reads by itself, such as weights: all copies must be the same.

Each place that reads such a file notes it here. Small files are compared as a whole, larger ones by their size and by blocks
that are spread evenly over them: a process reads only its own parts of large weights, and need not read the others for this.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxlm.core.bounded_read import open_regular
from jaxlm.core.errors import ConfigError
from jaxlm.core.exchange import exchange

_WHOLE_BYTES = 256 << 20
_BLOCK_BYTES, _NUM_BLOCKS = 4096, 4096
_NAME_PARTS = 2
_SNAPSHOTS = "snapshots"  # folder of the Hub's client, with a folder for each commit
_MAX_LINES = 20

_read: defaultdict[str, set[str]] = defaultdict(set)


def note(name: str, content: str | bytes) -> None:
    """Notes something that was read. Args: name: the same on all processes."""
    raw = content.encode() if isinstance(content, str) else content
    _read[name].add(hashlib.sha256(raw).hexdigest()[:16])


def note_files(name: str, paths: Iterable[Path]) -> None:
    """Notes files that are read together. Does nothing in a run of one process."""
    if exchange() is not None:
        note(name, "".join(f"{path.name} {_digest(path)} " for path in sorted(paths)))


def name_of(path: Path) -> str:
    """The end of a path, for messages; the same on machines that keep the file in different folders."""
    parts = path.absolute().parts
    if _SNAPSHOTS in parts[1:]:
        at = len(parts) - 1 - parts[::-1].index(_SNAPSHOTS)
        parts = (parts[at - 1], *parts[at + 2 :])
    return "/".join(parts[-_NAME_PARTS:])


def check_same_files() -> None:
    """Raises `ConfigError` on all processes if one of them has read another content than the others. All must call this.

    What some processes have not read is not compared: process 0 reads more.
    """
    if (others := exchange()) is None:
        return
    known = {name: sorted(digests) for name, digests in _read.items()}
    answer = others.conclude(json.dumps(known).encode(), lambda said: json.dumps(_differences(said)).encode())
    if different := json.loads(answer):
        raise ConfigError(
            "the processes of this run have read different files, so the copy on some machine is outdated or incomplete:\n"
            + "\n".join(f"  {line}" for line in different[:_MAX_LINES])
            + "\nCopy the same files to all machines"
        )


def _differences(said: Sequence[bytes]) -> list[str]:
    of_process = [json.loads(text) for text in said]
    common = set.intersection(*(set(known) for known in of_process))
    lines = []
    for name in sorted(common):
        if not set.intersection(*(set(known[name]) for known in of_process)):
            contents: dict[str, list[str]] = {}
            for process, known in enumerate(of_process):
                contents.setdefault(" and ".join(known[name]), []).append(str(process))
            lines.append(f"{name}: " + "; ".join(f"{c} on process {', '.join(p)}" for c, p in contents.items()))
    return lines


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for number in range(_NUM_BLOCKS):
            place = (size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1)
            digest.update(os.pread(file.fileno(), _BLOCK_BYTES, place))
        return digest.hexdigest()
