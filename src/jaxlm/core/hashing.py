"""Computes digests of arrays and files, by which processes find out whether they have the same.

Files that every process of a run reads by itself, such as weights, must be the same everywhere. Each place that reads such
a file notes it here (`note`, `note_file`). Small files are compared as a whole, larger ones by their size and by blocks
that are spread evenly over them: a process reads only its own parts of large weights, and need not read the others for
this.
"""

import functools
import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.exchange import WORK, exchange
from jaxlm.core.runtime import differences_between_processes
from jaxlm.core.safe_io import open_regular, sha256

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_SALTS = (0x9E3779B9, 0x7F4A7C15)


def array_digest(arrays: Any) -> str:
    """The same for trees with the same paths, shapes, dtypes and bits, however they are sharded; 16 hexadecimal digits.

    Each array is summed modulo 2^32 with two odd weights by place. A change of one element always changes the sums, a change
    of several does not with a probability of about 2^-62. All processes must call it.
    """
    leaves = [(path, tree.raw(leaf)) for path, leaf in tree.leaves(arrays)]
    sums = jax.device_get(jax.jit(lambda values: [_sums(value) for value in values])([value for _, value in leaves]))
    text = [
        f"{path} {value.shape} {value.dtype} {sum_.tolist()}" for (path, value), sum_ in zip(leaves, sums, strict=True)
    ]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _sums(array: jax.Array) -> jax.Array:
    """uint32 [2]."""
    if jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    else:
        bits = jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dimension, size in enumerate(bits.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dimension)
    return jnp.stack([jnp.sum(bits * (_mixed(place + jnp.uint32(salt)) | 1), dtype=jnp.uint32) for salt in _SALTS])


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of 32-bit integers without structure (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


_WHOLE_BYTES = 256 << 20
_BLOCK_BYTES, _NUM_BLOCKS = 4 << 10, 1_024
_SNAPSHOTS = "snapshots"  # folder of the Hub's client, with a folder for each commit
_AND = " and "

# Since the last check: name -> paths and digests, in the order in which they were read.
_read: defaultdict[str, dict[tuple[str, str], None]] = defaultdict(dict)
_evaluated: set[str] = set()


def note(name: str, content: str, *, evaluates: bool = False) -> None:
    """Notes something that was read.

    Args:
        name: the same on all processes.
        evaluates: whether evaluations read it, so that it is compared with the last start too.
    """
    if not WORK.is_alone:
        _read[name][("", hashlib.sha256(content.encode()).hexdigest()[:16])] = None
        _evaluated.update([name] if evaluates else [])


def note_file(path: Path) -> None:
    """Notes a file, or that it is missing. Does nothing in a run of one process."""
    if exchange() is not None and not WORK.is_alone:
        _read[name_of(path)][(str(path.absolute()), _digest(path)[:16] if path.is_file() else "missing")] = None


def name_of(path: Path) -> str:
    """Returns the end of a path, for messages: the same on machines that keep the file in different folders."""
    parts = path.absolute().parts
    if _SNAPSHOTS in parts[1:]:
        at = len(parts) - 1 - parts[::-1].index(_SNAPSHOTS)
        parts = (parts[at - 1], *parts[at + 2 :])
    return "/".join(parts[-2:])


def check_same_files() -> dict[str, str]:
    """Raises `ConfigError` on all processes if one of them has read another content than the others since the last check.
    All must call this. Returns name -> digests of what evaluations read.
    """
    known = {name: _AND.join(digest for _, digest in noted) for name, noted in _read.items()}
    evaluated = {name: known[name] for name in sorted(_evaluated)}
    _read.clear()
    _evaluated.clear()
    if different := differences_between_processes(known, _are_same):
        raise ConfigError(
            "the processes of this run have read different files, so the copy on some machine is outdated or incomplete:\n"
            + "\n".join(f"  {line}" for line in different[:20])
            + "\nCopy the same files to all machines"
        )
    return evaluated


def _are_same(digests: Sequence[str | None]) -> bool:
    """Tells whether processes have read the same, in the same order; what some of them have not read is not compared."""
    lists = [joined.split(_AND) for joined in digests if joined is not None]
    most = max(lists, key=len)
    return len(lists) < len(digests) or all(
        digest in rest for some in lists for rest in [iter(most)] for digest in some
    )


def _digest(path: Path) -> str:
    status = path.stat()
    return sha256(path) if status.st_size <= _WHOLE_BYTES else _of_blocks(path, status.st_size, status.st_mtime_ns)


@functools.cache
def _of_blocks(path: Path, size: int, mtime_ns: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with open_regular(path) as file:
        for number in range(_NUM_BLOCKS):
            place = (size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1)
            digest.update(os.pread(file.fileno(), _BLOCK_BYTES, place))
    return digest.hexdigest()
