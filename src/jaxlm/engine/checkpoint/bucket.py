"""Checkpoints in a store at a URL. In Google's buckets every process reads and writes its own shards.

Orbax and TensorStore transfer the arrays there, fsspec everything else; no shared disk is needed. Stores have no rename, so a
checkpoint is complete once it contains `checksums.json`. That file is written last and deleted first.
"""

import base64
import contextlib
import functools
import json
import os
import posixpath
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first, main_only
from jaxlm.core.safe_io import read_stored
from jaxlm.core.stores import check_size, inaccessible, names_below, open_store, probe_name, put_folder, storage_errors
from jaxlm.engine.checkpoint.lease import Lease, LeaseCheck
from jaxlm.engine.checkpoint.manifest import (
    ABANDONED,
    CHECKSUMS,
    DAMAGED,
    MD5,
    SHA256,
    UNFINISHED,
    CheckpointName,
    DamagedError,
    compare,
    digest_of,
    in_order,
    read_checksums,
    replaced_by,
    verify,
)
from jaxlm.engine.checkpoint.store import ARRAYS, CURSOR, Checkpoint, CheckpointFolder, SaveError

SCHEME = "gs://"
_PROBE_RETRIES = 3  # with TensorStore's default of 32, a wrong address takes a quarter of an hour to fail
_ASIDE = (f"{CHECKSUMS}{DAMAGED}", f"{CHECKSUMS}{ABANDONED}")


@dataclass(frozen=True)
class BucketCheckpoint(Checkpoint):
    """A finished checkpoint in a store. Attributes: folder: of the run; key: the checkpoint's name in it."""

    folder: "BucketFolder"
    key: str

    @property
    def location(self) -> str:
        return f"{self.folder.location}/{self.key}"

    def read(self, file: str) -> bytes:
        with _read_errors(self.location):
            return self.folder.read(self.key, file)

    def verify(self, below: str = "") -> None:
        """Compares the checksums that the store keeps. Reads only files for which it keeps none."""
        with _read_errors(self.location, passthrough=(DamagedError,)):
            files = self.folder.files(self.key)

            def digest(file: str, kind: str) -> str:
                stored = files[file] if kind == MD5 else None
                return stored or self.folder.digest(self.key, file, kind)

            compare(lambda: self.folder.read(self.key, CHECKSUMS), files, digest, below)

    @contextlib.contextmanager
    def local(self, below: str) -> Iterator[Path]:
        """Downloads the files that `checksums.json` names to a temporary folder, so that a missing one is an error."""
        try:
            files = read_checksums(lambda: self.read(CHECKSUMS))
        except DamagedError as error:
            raise ConfigError(f"{self.location} is damaged: {error}. Use another checkpoint") from error
        with tempfile.TemporaryDirectory() as folder:
            for file in (file for file in files if file.startswith(f"{below}/")):
                path = Path(folder) / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.read(file))
            yield Path(folder) / below


class BucketFolder(CheckpointFolder):
    """A folder of one run's checkpoints in a store.

    Methods that `CheckpointFolder` does not have raise whatever the store raises.
    """

    def __init__(self, url: str, *, delete_temporary: bool = True):
        self.location: str = url.rstrip("/")
        self._delete_temporary = delete_temporary
        self._newest: str | None = None  # the last one that this process has committed or uploaded
        self._begun: frozenset[str] = frozenset()  # small files of the checkpoint that is being written

    @functools.cached_property
    def _store(self) -> tuple[Any, str]:
        return open_store(self.location, "checkpoint")  # opened on first use, because a dry run needs no store

    @property
    def _fs(self) -> Any:
        return self._store[0]

    def open(self, log: Callable[[str], None]) -> None:
        main_first(self._probe)

    def checkpoints(self) -> Sequence[BucketCheckpoint]:
        return [BucketCheckpoint(self, name) for name in self.names()]

    def names(self) -> list[str]:
        with _read_errors(self.location):
            return self._complete()

    def find(self, name: str) -> BucketCheckpoint:
        return BucketCheckpoint(self, name)

    def set_aside(self, name: str) -> str:
        return self._hide(name, DAMAGED)

    def abandon(self, name: str) -> str:
        return self._hide(name, ABANDONED)

    def _hide(self, name: str, suffix: str) -> str:
        """Renames `checksums.json`. `begin` deletes it when a checkpoint of this name is saved again."""
        renamed = f"{CHECKSUMS}{suffix}"
        with storage_errors(lambda reason: ConfigError(f"{self.location}/{name} cannot be set aside ({reason})")):
            self._write(name, renamed, self.read(name, CHECKSUMS))
            self._fs.rm_file(self._marker(name))
        return f"{name}/{renamed}"

    def prepare(self) -> None:
        main_only(self._prepare)

    def _prepare(self) -> None:
        with storage_errors(self._unusable):
            self._remove_unfinished()

    def check_free(self) -> None:
        return  # whether the holder of a lease is alive takes half a minute to see

    def locked(self, log: Callable[[str], None]) -> AbstractContextManager[LeaseCheck]:
        return Lease(self.location, log).held()

    def begin(self, name: str, files: Mapping[str, bytes]) -> None:
        with storage_errors(SaveError):
            self._clear(name)
            for file, content in files.items():
                self._write(name, file, content)
        self._begun = frozenset(files)

    def arrays(self, name: str) -> str:
        return f"{self.location}/{name}/{ARRAYS}"

    def commit(self, name: str) -> None:
        """Writes `checksums.json` from the checksums that the store keeps, without reading the files again."""
        with storage_errors(SaveError):
            files = self.files(name)
            if missing := sorted(self._begun - files.keys()):
                raise FileNotFoundError(f"{missing[0]} is gone: another process has deleted it")
            sums = {
                file: self.digest(name, file, SHA256) if md5 is None else f"{MD5}:{md5}" for file, md5 in files.items()
            }
            self._write(name, CHECKSUMS, json.dumps(sums, indent=1).encode())
        self._newest = name
        with contextlib.suppress(SaveError):  # the next save does it
            self.tidy()

    def tidy(self) -> None:
        with storage_errors(SaveError):
            self._remove_unfinished()
            if self._newest is None or not self._delete_temporary:
                return
            for old in replaced_by(self._newest, self._complete(), lambda name: self.read(name, CURSOR)):
                self._delete(old)

    def upload(self, checkpoint: Path) -> None:
        """Uploads a finished local checkpoint. It becomes visible with its last file."""
        name = checkpoint.name
        self._clear(name)
        put_folder(self._fs, checkpoint, self._path(name), CHECKSUMS)
        self._newest = name

    def download(self, name: str, folder: Path) -> Path:
        """Downloads a checkpoint to `folder`. Raises `DamagedError` if its files are not what was saved."""
        unfinished = folder / f"{name}{UNFINISHED}"
        shutil.rmtree(unfinished, ignore_errors=True)
        root = self._path(name)
        files = (posixpath.relpath(path, root) for path in self._fs.find(root))
        for file in (file for file in files if file not in _ASIDE):  # a kill may have come before `_hide` was done
            local = unfinished / file
            local.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(f"{root}/{file}", str(local))
        verify(unfinished)
        final = folder / name
        shutil.rmtree(final, ignore_errors=True)
        os.rename(unfinished, final)
        return final

    def read(self, name: str, file: str) -> bytes:
        return read_stored(self._fs, self._path(name, file))

    def files(self, name: str) -> dict[str, str | None]:
        """Relative path -> MD5 in hexadecimal, for each file of a checkpoint; None if the store keeps no MD5 of a file."""
        self._fs.invalidate_cache()
        root = self._path(name)
        infos: dict[str, Any] = self._fs.find(root, detail=True)
        sums = {posixpath.relpath(path, root): info.get("md5Hash") for path, info in infos.items()}
        sums = {file: md5 for file, md5 in sums.items() if file not in (CHECKSUMS, *_ASIDE)}
        return {file: md5 and base64.b64decode(md5).hex() for file, md5 in sorted(sums.items())}

    def digest(self, name: str, file: str, kind: str) -> str:
        with self._fs.open(self._path(name, file), "rb") as opened:
            return digest_of(opened, kind)

    def runs(self) -> list["BucketFolder"]:
        """The subfolders that are not checkpoints."""
        return [BucketFolder(f"{self.location}/{n}") for n in self._children() if CheckpointName.parse(n) is None]

    def _write(self, name: str, file: str, content: bytes) -> None:
        path = self._path(name, file)
        self._fs.pipe_file(path, content)
        check_size(self._fs, path, len(content))

    def _clear(self, name: str) -> None:
        """Deletes a checkpoint, complete or not, if it exists."""
        if name in self._children():
            self._delete(name)

    def _delete(self, name: str) -> None:
        """Deletes a checkpoint, its marker first, so that it never looks complete while it is being deleted."""
        if self._fs.exists(self._marker(name)):
            self._fs.rm_file(self._marker(name))
        self._fs.rm(self._path(name), recursive=True)

    def _remove_unfinished(self) -> None:
        """Deletes checkpoints that were only partly written or partly deleted."""
        for name in set(self._all()) - set(self._complete()):
            if not any(self._fs.exists(self._path(name, renamed)) for renamed in _ASIDE):
                self._fs.rm(self._path(name), recursive=True)

    def _complete(self) -> list[str]:
        return [name for name in self._all() if self._fs.exists(self._marker(name))]

    def _all(self) -> list[str]:
        """Names of the checkpoints, complete or not, oldest first."""
        return [name.text for name in sorted(filter(None, map(CheckpointName.parse, self._children())))]

    def _children(self) -> list[str]:
        return names_below(self._fs, self._path())

    def _marker(self, name: str) -> str:
        return self._path(name, CHECKSUMS)

    def _path(self, *parts: str) -> str:
        return "/".join((self._store[1], *parts))

    def _probe(self) -> None:
        """Writes and deletes one file with fsspec, as small files are written, and one with TensorStore, as arrays are."""
        with storage_errors(self._unusable):
            path = self._path(f"{probe_name()}{UNFINISHED}")
            self._fs.pipe_file(path, b"jaxlm")
            self._fs.rm_file(path)
            _probe_tensorstore(f"{self.location}/{probe_name()}.arrays")

    def _unusable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"trainer.checkpointer.base_path: cannot use {self.location} ({reason}). Check the network, that the bucket"
            " exists, and that your credentials (GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login` or"
            " the machine's service account) allow writing and deleting objects"
        )


def bucket_checkpoints(url: str, *, of_runs: bool = True) -> list[BucketCheckpoint]:
    """Complete checkpoints at a URL, fewest steps first.

    The URL may be that of a checkpoint, a run's folder or, with `of_runs`, a folder of runs.
    """
    with _read_errors(url):
        parent, _, last = url.rstrip("/").rpartition("/")
        if CheckpointName.parse(last) and last in (folder := BucketFolder(parent)).names():
            return [folder.find(last)]
        folder = BucketFolder(url)
        runs = [folder, *(folder.runs() if of_runs else [])]
        return in_order([(found.name, found) for found in run.checkpoints()] for run in runs)


def _read_errors(location: str, passthrough: tuple[type[Exception], ...] = ()) -> AbstractContextManager[None]:
    """Raises `ConfigError` if the store cannot be read. That alone must never count as a damaged checkpoint."""
    return storage_errors(inaccessible(f"cannot read {location}"), passthrough=passthrough)


def _probe_tensorstore(url: str) -> None:
    import tensorstore as ts

    context = ts.Context({"gcs_request_retries": {"max_retries": _PROBE_RETRIES}})
    store = ts.KvStore.open(url, context=context).result()
    for content in (b"jaxlm", None):  # writing None deletes the object
        store.write("", content).result()
