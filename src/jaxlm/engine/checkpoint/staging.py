"""Checkpoints at a URL that Orbax cannot write to: they are written to a local staging folder and then uploaded."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import is_main_process, main_only
from jaxlm.core.safe_io import SMALL, read_bytes, remove
from jaxlm.core.stores import check_store_writable, inaccessible, local_copy, storage_errors
from jaxlm.engine.checkpoint.bucket import BucketFolder, bucket_checkpoints
from jaxlm.engine.checkpoint.lease import LeaseCheck, all_held
from jaxlm.engine.checkpoint.local import LocalCheckpoint, LocalFolder
from jaxlm.engine.checkpoint.manifest import CHECKSUMS, PENDING, CheckpointName, DamagedError, verify
from jaxlm.engine.checkpoint.store import CheckpointFolder, SaveError

Log = Callable[[str], None]


class StagedFolder(CheckpointFolder):
    """A folder on a disk that all processes share, whose finished checkpoints are copied to a folder in a store.

    The store is authoritative. The folder on the disk has only the newest checkpoint and those not yet uploaded.
    """

    def __init__(self, url: str, staging_dir: Path, *, delete_temporary: bool = True):
        self.location: str = url
        self._staging = local_copy(staging_dir, url)
        self._local = LocalFolder(self._staging, delete_temporary=delete_temporary, key="staging_dir")
        self._stored = BucketFolder(url, delete_temporary=delete_temporary)

    def __str__(self) -> str:
        return f"{self.location} (staged in {self._staging})"

    def open(self, log: Log) -> None:
        """Checks that the store can be written to, and downloads its newest undamaged checkpoint."""
        main_only(lambda: self._open(log))
        self._local.open(log)

    def checkpoints(self) -> Sequence[LocalCheckpoint]:
        return self._local.checkpoints()

    def names(self) -> list[str]:
        return self._stored.names()

    def find(self, name: str) -> LocalCheckpoint:
        """Process 0 downloads the checkpoint. Saving the next one deletes the local copy again."""
        if is_main_process():
            with copy_errors(self._base_path, self._staging):
                download_checkpoint(self._stored, name, self._staging)
        return self._local.find(name)

    def set_aside(self, name: str) -> str:
        return self._local.set_aside(name)

    def abandon(self, name: str) -> str:
        """Hides the uploaded checkpoint. The next save deletes the local copy."""
        return self._stored.abandon(name)

    def prepare(self) -> None:
        """Prepares the staging folder, and uploads what an earlier process left pending."""
        self._local.prepare()
        main_only(self._prepare)

    def check_free(self) -> None:
        self._local.check_free()

    @contextlib.contextmanager
    def locked(self, log: Log) -> Iterator[LeaseCheck]:
        with self._local.locked(log) as staging_held, self._stored.locked(log) as check_lease:
            self._fetch(log)  # the holder before may have saved since `open`
            yield all_held([staging_held, check_lease])

    def begin(self, name: str, files: Mapping[str, bytes]) -> None:
        self._local.begin(name, files)

    def arrays(self, name: str) -> str:
        return self._local.arrays(name)

    def commit(self, name: str) -> None:
        """Commits the checkpoint to the staging folder, then uploads it, and those whose upload failed before.

        If an upload fails, the next save or start tries it again.
        """
        self._mark(name).touch()
        self._local.commit(name)
        with storage_errors(lambda reason: SaveError(f"the upload failed ({reason})"), local=self._staging):
            for pending in self._pending():
                self._publish(pending)
        with contextlib.suppress(OSError, SaveError):  # the next save does it
            self._keep_only([name])
            self.tidy()

    def tidy(self) -> None:
        self._local.tidy()
        self._stored.tidy()

    def _open(self, log: Log) -> None:
        with copy_errors(self._base_path, self._staging):
            self._staging.mkdir(parents=True, exist_ok=True)
            check_store_writable(self.location, "trainer.checkpointer.base_path")
        # The staging folder of a start that trains is its own.
        with self._local.locked(log):
            self._fetch(log)

    def _fetch(self, log: Log) -> None:
        with copy_errors(self._base_path, self._staging):
            self._keep_only([*self._fetch_newest(log), *self._pending()])

    def _prepare(self) -> None:
        with copy_errors(self._base_path, self._staging):
            for name in self._pending():
                self._publish(name)
            self._stored.tidy()

    def _publish(self, name: str) -> None:
        if (self._staging / name).is_dir():  # otherwise it was never finished, was replaced, or was set aside
            self._stored.upload(self._staging / name)
        self._mark(name).unlink()

    def _pending(self) -> list[str]:
        """Names of the checkpoints that still have to be uploaded, oldest first."""
        names = (CheckpointName.parse(mark.name.removesuffix(PENDING)) for mark in self._staging.glob(f"*{PENDING}"))
        return [name.text for name in sorted(filter(None, names))]

    def _fetch_newest(self, log: Log) -> list[str]:
        for name in reversed(self._stored.names()):
            try:
                return [download_checkpoint(self._stored, name, self._staging).name]
            except DamagedError as damage:
                log(f"checkpoint {self.location}/{name} is damaged: {damage}. Using the previous one")
        return []

    def _keep_only(self, names: Collection[str]) -> None:
        for checkpoint in self.checkpoints():
            if checkpoint.name not in names:
                remove(checkpoint.path)

    def _mark(self, name: str) -> Path:
        return self._staging / f"{name}{PENDING}"

    @property
    def _base_path(self) -> str:
        return f"trainer.checkpointer.base_path: {self.location}"


def download_checkpoint(stored: BucketFolder, name: str, folder: Path) -> Path:
    """The local copy of a checkpoint, downloaded if it is missing, damaged or a copy of another checkpoint.

    Raises `DamagedError` if the files in the store are not what was saved.
    """
    local = folder / name
    if (local / CHECKSUMS).is_file() and read_bytes(local / CHECKSUMS, SMALL) == stored.read(name, CHECKSUMS):
        with contextlib.suppress(DamagedError):
            verify(local)
            return local
    return stored.download(name, folder)


def staged_checkpoints(url: str, staging_dir: Path, *, of_runs: bool = True) -> list[Path]:
    """A local copy of the newest complete checkpoint at a URL (see `bucket_checkpoints`); empty if there is none.

    Raises `ConfigError` if the store cannot be read, the staging folder cannot be written, or the checkpoint is damaged.
    """
    with copy_errors(url, staging_dir):
        if not (checkpoints := bucket_checkpoints(url, of_runs=of_runs)):
            return []
        newest = checkpoints[-1]
        folder = local_copy(staging_dir, newest.folder.location)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return [download_checkpoint(newest.folder, newest.name, folder)]
        except DamagedError as damage:
            raise ConfigError(f"{newest.location} is damaged: {damage}. Choose another checkpoint") from damage


@contextlib.contextmanager
def copy_errors(store: str, folder: Path) -> Iterator[None]:
    """Wraps code that copies between a store and its staging folder. The `ConfigError` says which of the two failed."""
    try:
        with storage_errors(inaccessible(f"{store} is not accessible"), local=folder, passthrough=(DamagedError,)):
            yield
    except OSError as error:  # of the local folder
        raise ConfigError(
            f"trainer.checkpointer.staging_dir: cannot use {folder} to stage checkpoints ({error}). The checkpoints in the"
            " store are intact. Free up space, change permissions, or choose another folder"
        ) from error
