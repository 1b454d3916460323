"""Checkpoints in a bucket of Google Cloud Storage: every process writes and reads its own part of them there.

The arrays go by Orbax and TensorStore, everything else by fsspec; no disk is shared, or needed. A bucket has no rename: as
everywhere behind URLs (`RemoteFolder`), a checkpoint is whole once its last file is there.
"""

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first, main_only
from jaxlm.core.storage_errors import storage_errors
from jaxlm.engine.checkpoint.integrity import CHECKSUMS, MD5, SHA256, DamagedError, compare
from jaxlm.engine.checkpoint.remote import RemoteFolder, find_remote
from jaxlm.engine.checkpoint.store import ARRAYS, Checkpoint, CheckpointFolder, SaveError

SCHEME = "gs://"
_PROBE_RETRIES = 3  # TensorStore's own count, 32, makes a quarter of an hour of a wrong address


@dataclass(frozen=True)
class BucketCheckpoint(Checkpoint):
    """A finished checkpoint in a bucket.

    Attributes:
        folder: of the run.
        key: its name there.
    """

    folder: RemoteFolder
    key: str

    @property
    def place(self) -> str:
        """Its URL."""
        return f"{self.folder.url}/{self.key}"

    def read(self, file: str) -> bytes:
        """From the bucket."""
        with _reading(self.place):
            return self.folder.read(self.key, file)

    def verify(self, below: str = "") -> None:
        """By the checksums that the store keeps; without them, reads every file."""
        with _reading(self.place, passthrough=(DamagedError,)):
            files = self.folder.files(self.key)

            def digest(file: str, kind: str) -> str:
                kept = files[file] if kind == MD5 else None
                return kept or self.folder.digest(self.key, file, kind)

            compare(lambda: self.folder.read(self.key, CHECKSUMS), files, digest, below)

    @contextlib.contextmanager
    def local(self, below: str) -> Iterator[Path]:
        """A copy, deleted afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            with _reading(self.place):
                files = [file for file in self.folder.files(self.key) if file.startswith(f"{below}/")]
            for file in files:
                path = Path(folder) / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.read(file))
            yield Path(folder) / below


class BucketFolder(CheckpointFolder):
    """A folder of one run's checkpoints in a bucket."""

    def __init__(self, url: str, *, delete_temporary: bool = True):
        """Args: delete_temporary: whether a new checkpoint replaces the temporary ones."""
        self._url = url
        self._delete_temporary = delete_temporary

    @property
    def place(self) -> str:
        """Its URL."""
        return self._url

    @property
    def write_errors(self) -> tuple[type[Exception], ...]:
        """Those of a disk, of gcsfs, and of what that stands on."""
        import aiohttp
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        return (OSError, ValueError, aiohttp.ClientError, HttpError, GoogleAuthError)

    def __str__(self) -> str:
        return self._url

    @functools.cached_property
    def _remote(self) -> RemoteFolder:
        return RemoteFolder(self._url)  # not before it is needed: a dry run needs no store

    def open(self, log: Callable[[str], None]) -> None:
        """Shows that every process can write to the bucket by both libraries, and delete again."""
        main_first(self._probe)

    def checkpoints(self) -> Sequence[BucketCheckpoint]:
        """Those with a last file."""
        with _reading(self._url):
            return [BucketCheckpoint(self._remote, name) for name in self._remote.names()]

    def set_aside(self, name: str) -> str:
        """Renames its last file."""
        with storage_errors(
            lambda reason: ConfigError(f"{self._url}/{name} is damaged, and cannot be set aside ({reason})")
        ):
            return self._remote.set_aside(name)

    def prepare(self) -> None:
        """Removes what was written, or deleted, in part."""
        main_only(self._prepare)

    def _prepare(self) -> None:
        with storage_errors(lambda reason: SaveError(f"{self._url} cannot be written to ({reason})")):
            self._remote.remove_unfinished()

    def begin(self, name: str, files: Mapping[str, bytes]) -> None:
        """Writes to the bucket, under the final name: nobody sees it yet."""
        with storage_errors(lambda reason: SaveError(f"saving a checkpoint to {self._url} failed ({reason})")):
            self._remote.clear(name)
            for file, content in files.items():
                self._remote.write(name, file, content)

    def arrays(self, name: str) -> str:
        """In the bucket."""
        return f"{self._url}/{name}/{ARRAYS}"

    def commit(self, name: str) -> None:
        """Seals it with the checksums that the store keeps: nothing is read again, whoever has written it."""
        sums = {
            file: self._remote.digest(name, file, SHA256) if md5 is None else f"{MD5}:{md5}"
            for file, md5 in self._remote.files(name).items()
        }
        self._remote.write(name, CHECKSUMS, json.dumps(sums, indent=1).encode())
        for old in self._remote.replaced_by(name) if self._delete_temporary else []:
            self._remote.delete(old)

    def _probe(self) -> None:
        """Writes and deletes a small file as the small files are written, and one as the arrays are."""
        name = f"probe-{jax.process_index()}"
        with storage_errors(self._unusable):
            self._remote.probe(name)
            _probe_tensorstore(f"{self._url}/{name}.arrays")

    def _unusable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"trainer.checkpointer.base_path: {self._url} cannot be used ({reason}). Check that the bucket exists, the"
            " network, and that GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login` or the machine's"
            " service account may write to it and delete from it"
        )


def bucket_checkpoints(url: str, *, of_runs: bool = True) -> list[BucketCheckpoint]:
    """Whole checkpoints where a URL points, least steps first.

    Args:
        of_runs: see `find_remote`.

    Raises:
        ConfigError: the bucket cannot be read.
    """
    with _reading(url):
        return [BucketCheckpoint(folder, name) for folder, name in find_remote(url, of_runs=of_runs)]


def _reading(place: str, passthrough: tuple[type[Exception], ...] = ()) -> AbstractContextManager[None]:
    """A store that does not answer says nothing about what is in it: a message, never damage."""
    advice = "Check the network and your credentials"
    return storage_errors(
        lambda reason: ConfigError(f"{place} cannot be read ({reason}). {advice}"), passthrough=passthrough
    )


def _probe_tensorstore(url: str) -> None:
    import tensorstore as ts

    context = ts.Context({"gcs_request_retries": {"max_retries": _PROBE_RETRIES}})
    store = ts.KvStore.open(url, context=context).result()
    for content in (b"jaxlm", None):  # the second one deletes it
        store.write("", content).result()
