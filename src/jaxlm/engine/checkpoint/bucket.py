"""Checkpoints in a Google Cloud Storage bucket: every process reads and writes its own shards.

Orbax and TensorStore transfer the arrays, fsspec everything else; no shared disk is needed. Buckets have no rename, so a
checkpoint is complete once its last file exists (see `RemoteFolder`).
"""

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first, main_only
from jaxlm.core.stores import inaccessible, probe_name, storage_errors
from jaxlm.engine.checkpoint.lease import Lease, LeaseCheck
from jaxlm.engine.checkpoint.manifest import (
    ABANDONED,
    CHECKSUMS,
    DAMAGED,
    MD5,
    SHA256,
    DamagedError,
    compare,
    read_checksums,
)
from jaxlm.engine.checkpoint.remote import RemoteFolder, find_remote
from jaxlm.engine.checkpoint.store import ARRAYS, Checkpoint, CheckpointFolder, SaveError

SCHEME = "gs://"
_PROBE_RETRIES = 3  # with TensorStore's default of 32, a wrong address takes a quarter of an hour to fail


@dataclass(frozen=True)
class BucketCheckpoint(Checkpoint):
    """A finished checkpoint in a bucket. Attributes: folder: of the run; key: the checkpoint's name in it."""

    folder: RemoteFolder
    key: str

    @property
    def location(self) -> str:
        return f"{self.folder.url}/{self.key}"

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
    """A folder of one run's checkpoints in a bucket."""

    def __init__(self, url: str, *, delete_temporary: bool = True):
        self.location: str = url
        self._delete_temporary = delete_temporary
        self._newest: str | None = None  # the last one that this process has committed

    @functools.cached_property
    def _remote(self) -> RemoteFolder:
        return RemoteFolder(self.location)  # created on first use, because a dry run needs no store

    def open(self, log: Callable[[str], None]) -> None:
        main_first(self._probe)

    def checkpoints(self) -> Sequence[BucketCheckpoint]:
        with _read_errors(self.location):
            return [BucketCheckpoint(self._remote, name) for name in self._remote.names()]

    def names(self) -> list[str]:
        return [checkpoint.name for checkpoint in self.checkpoints()]

    def find(self, name: str) -> BucketCheckpoint:
        return BucketCheckpoint(self._remote, name)

    def set_aside(self, name: str) -> str:
        with storage_errors(
            lambda reason: ConfigError(f"{self.location}/{name} is damaged, but it cannot be set aside ({reason})")
        ):
            return self._remote.set_aside(name, DAMAGED)

    def abandon(self, name: str) -> str:
        with storage_errors(lambda reason: ConfigError(f"{self.location}/{name} cannot be set aside ({reason})")):
            return self._remote.set_aside(name, ABANDONED)

    def prepare(self) -> None:
        main_only(self._prepare)

    def _prepare(self) -> None:
        with storage_errors(self._unusable):
            self._remote.remove_unfinished()

    def check_free(self) -> None:
        return  # whether the holder of a lease is alive takes half a minute to see

    def locked(self, log: Callable[[str], None]) -> AbstractContextManager[LeaseCheck]:
        return Lease(self.location, log).held()

    def begin(self, name: str, files: Mapping[str, bytes]) -> None:
        with storage_errors(SaveError):
            self._remote.clear(name)
            for file, content in files.items():
                self._remote.write(name, file, content)

    def arrays(self, name: str) -> str:
        return f"{self.location}/{name}/{ARRAYS}"

    def commit(self, name: str) -> None:
        """Writes `checksums.json` from the checksums that the store keeps, without reading the files again."""
        with storage_errors(SaveError):
            sums = {
                file: self._remote.digest(name, file, SHA256) if md5 is None else f"{MD5}:{md5}"
                for file, md5 in self._remote.files(name).items()
            }
            self._remote.write(name, CHECKSUMS, json.dumps(sums, indent=1).encode())
        self._newest = name
        with contextlib.suppress(SaveError):  # the next save does it
            self.tidy()

    def tidy(self) -> None:
        with storage_errors(SaveError):
            self._remote.remove_unfinished()
            for old in self._remote.replaced_by(self._newest) if self._newest and self._delete_temporary else []:
                self._remote.delete(old)

    def _probe(self) -> None:
        """Writes and deletes one file with fsspec, as small files are written, and one with TensorStore, as arrays are."""
        with storage_errors(self._unusable):
            self._remote.probe()
            _probe_tensorstore(f"{self.location}/{probe_name()}.arrays")

    def _unusable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"trainer.checkpointer.base_path: cannot use {self.location} ({reason}). Check the network, that the bucket"
            " exists, and that your credentials (GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login` or"
            " the machine's service account) allow writing and deleting objects"
        )


def bucket_checkpoints(url: str, *, of_runs: bool = True) -> list[BucketCheckpoint]:
    """Complete checkpoints at a URL, fewest steps first. See `find_remote`."""
    with _read_errors(url):
        return [BucketCheckpoint(folder, name) for folder, name in find_remote(url, of_runs=of_runs)]


def _read_errors(location: str, passthrough: tuple[type[Exception], ...] = ()) -> AbstractContextManager[None]:
    """Raises `ConfigError` if the store cannot be read. That alone must never count as a damaged checkpoint."""
    return storage_errors(inaccessible(f"cannot read {location}"), passthrough=passthrough)


def _probe_tensorstore(url: str) -> None:
    import tensorstore as ts

    context = ts.Context({"gcs_request_retries": {"max_retries": _PROBE_RETRIES}})
    store = ts.KvStore.open(url, context=context).result()
    for content in (b"jaxlm", None):  # writing None deletes the object
        store.write("", content).result()
