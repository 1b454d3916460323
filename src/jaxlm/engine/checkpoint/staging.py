"""A run's checkpoints behind a URL that Orbax cannot write to: they are written here, and uploaded from here."""

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_only
from jaxlm.core.storage_errors import storage_errors
from jaxlm.engine.checkpoint.integrity import CHECKSUMS, DamagedError, verify
from jaxlm.engine.checkpoint.local import LocalCheckpoint, LocalFolder
from jaxlm.engine.checkpoint.manifest import PENDING
from jaxlm.engine.checkpoint.remote import RemoteFolder, find_remote
from jaxlm.engine.checkpoint.store import CheckpointFolder

Log = Callable[[str], None]


class StagedFolder(CheckpointFolder):
    """A folder behind a URL, and the one that stands for it on a disk that all processes see.

    What is over there is the truth; here lie only the newest checkpoint, and what has not been uploaded yet.
    """

    def __init__(self, url: str, staging_dir: Path, *, delete_temporary: bool = True):
        """Args: delete_temporary: whether a new checkpoint replaces the temporary ones."""
        self._url = url
        self._here = staging_folder(staging_dir, url)
        self._local = LocalFolder(self._here, delete_temporary=delete_temporary, key="staging_dir")
        self._delete_temporary = delete_temporary

    @property
    def place(self) -> str:
        """Its URL."""
        return self._url

    @property
    def write_errors(self) -> tuple[type[Exception], ...]:
        """Those of the disk."""
        return self._local.write_errors

    def __str__(self) -> str:
        return f"{self._url} (by {self._here})"

    @functools.cached_property
    def _remote(self) -> RemoteFolder:
        return RemoteFolder(self._url)  # not before it is needed: a dry run needs no store

    def open(self, log: Log) -> None:
        """Shows that the store can be written to, and copies the newest checkpoint of it that is whole."""
        main_only(lambda: self._open(log))
        self._local.open(log)

    def checkpoints(self) -> Sequence[LocalCheckpoint]:
        """Those that are here."""
        return self._local.checkpoints()

    def set_aside(self, name: str) -> str:
        """Renames the copy."""
        return self._local.set_aside(name)

    def prepare(self) -> None:
        """Prepares the folder here, and uploads what an earlier process had not come to."""
        self._local.prepare()
        main_only(self._prepare)

    def begin(self, name: str, files: Mapping[str, bytes]) -> None:
        """Writes to a hidden folder here."""
        self._local.begin(name, files)

    def arrays(self, name: str) -> str:
        """On the disk."""
        return self._local.arrays(name)

    def commit(self, name: str) -> None:
        """Gives it its name here, and uploads it. What fails then is made up for by the next start."""
        self._mark(name).touch()
        self._local.commit(name)
        self._publish(name)
        self._keep_only([name])

    def _open(self, log: Log) -> None:
        with copy_errors(self._base_path, self._here):
            self._here.mkdir(parents=True, exist_ok=True)
            self._remote.make()
            self._remote.probe()
            self._keep_only([*self._fetch_newest(log), *self._pending()])

    def _prepare(self) -> None:
        with copy_errors(self._base_path, self._here):
            self._remote.remove_unfinished()
            for name in self._pending():
                self._publish(name)

    def _publish(self, name: str) -> None:
        """Uploads a checkpoint, and deletes there what it replaces."""
        if (self._here / name).is_dir():  # else it was never finished, or set aside
            self._remote.upload(self._here / name)
            for old in self._remote.replaced_by(name) if self._delete_temporary else []:
                self._remote.delete(old)
        self._mark(name).unlink()

    def _pending(self) -> list[str]:
        """What is still to be uploaded."""
        return [mark.name.removesuffix(PENDING) for mark in self._here.glob(f"*{PENDING}")]

    def _fetch_newest(self, log: Log) -> list[str]:
        for name in reversed(self._remote.names()):
            try:
                return [download_checkpoint(self._remote, name, self._here).name]
            except DamagedError as damage:
                log(f"checkpoint {self._url}/{name} is damaged: {damage}. Using the one before")
        return []

    def _keep_only(self, names: Collection[str]) -> None:
        for checkpoint in self.checkpoints():
            if checkpoint.name not in names:
                shutil.rmtree(checkpoint.path)

    def _mark(self, name: str) -> Path:
        return self._here / f"{name}{PENDING}"

    @property
    def _base_path(self) -> str:
        return f"trainer.checkpointer.base_path: {self._url}"


def staging_folder(staging_dir: Path, url: str) -> Path:
    """Where the copies of a folder behind a URL lie."""
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    return staging_dir / f"{url.rstrip('/').rsplit('/', 1)[-1]}-{digest}"


def download_checkpoint(remote: RemoteFolder, name: str, folder: Path) -> Path:
    """The local copy of a checkpoint, copied now where it is not here, is another one's, or is damaged.

    Raises:
        DamagedError: the files over there are not what was saved.
    """
    local = folder / name
    if (local / CHECKSUMS).is_file() and (local / CHECKSUMS).read_bytes() == remote.read(name, CHECKSUMS):
        with contextlib.suppress(DamagedError):
            verify(local)
            return local
    return remote.download(name, folder)


def staged_checkpoints(url: str, staging_dir: Path, *, of_runs: bool = True) -> list[Path]:
    """A local copy of the newest whole checkpoint where a URL points.

    Args:
        of_runs: see `find_remote`.

    Raises:
        ConfigError: the store cannot be read, the local folder not be written, or the checkpoint is damaged.
    """
    with copy_errors(url, staging_dir):
        found = find_remote(url, of_runs=of_runs)
        if not found:
            return []
        remote, name = found[-1]
        folder = staging_folder(staging_dir, remote.url)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return [download_checkpoint(remote, name, folder)]
        except DamagedError as damage:
            raise ConfigError(f"{remote.url}/{name} is damaged: {damage}. Name another one") from damage


@contextlib.contextmanager
def copy_errors(store: str, folder: Path) -> Iterator[None]:
    """Around what copies between a store and the local folder that stands for it.

    Raises:
        ConfigError: one of them has failed; says which.
    """
    advice = "Check the address, the network and your credentials"
    try:
        with storage_errors(lambda reason: ConfigError(f"{store} cannot be used ({reason}). {advice}"), local=folder):
            yield
    except OSError as error:  # of the local side
        raise ConfigError(
            f"trainer.checkpointer.staging_dir: {folder}, where checkpoints behind URLs are staged, cannot be used"
            f" ({error}). What is in the store is whole. Make room or change permissions, or name another folder"
        ) from error
