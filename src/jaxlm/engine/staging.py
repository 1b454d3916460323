"""The local side of checkpoints behind a URL: they are written here and uploaded, or downloaded and read here."""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxlm.core.disk import is_local_failure
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_only
from jaxlm.engine.folder import CheckpointFolder
from jaxlm.engine.integrity import CHECKSUMS, DamagedError
from jaxlm.engine.local_folder import LocalCheckpoint, LocalFolder
from jaxlm.engine.naming import PENDING, find_checkpoints
from jaxlm.engine.remote import RemoteFolder, find_remote

Show = Callable[[str], None]


def staging_folder(staging_dir: Path, url: str) -> Path:
    """Where the checkpoints of a folder behind a URL lie."""
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    return staging_dir / f"{url.rstrip('/').rsplit('/', 1)[-1]}-{digest}"


class Staging:
    """A run's folder behind a URL, and the local folder that stands for it.

    What is over there is the truth; here lies only the newest checkpoint, and what has not been uploaded yet.
    """

    def __init__(self, url: str, folder: Path, *, delete_temporary: bool = True):
        """Args:
        folder: the same for all processes of the run.
        delete_temporary: whether a new checkpoint replaces the temporary ones.
        """
        self._remote = RemoteFolder(url)
        self._folder = folder
        self._delete_temporary = delete_temporary

    def synchronise(self, show: Show) -> None:
        """Uploads what an earlier process had not come to, and fetches the newest checkpoint that is whole.

        Raises:
            ConfigError: the store, or the local folder, cannot be read or written.
        """
        with _reaching(f"trainer.checkpointer.base_path: {self._remote.url}", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remote.make()
            self._remote.probe()
            self._remote.remove_unfinished()
            for pending in self._folder.glob(f"*{PENDING}"):
                self.publish(self._folder / pending.name.removesuffix(PENDING))
            self._fetch(show)

    def publish(self, checkpoint: Path) -> None:
        """Uploads a finished checkpoint, deletes there what it replaces, and here all others.

        Raises whatever the store raises; the checkpoint is then uploaded at the next start.
        """
        pending = checkpoint.with_name(checkpoint.name + PENDING)
        if checkpoint.is_dir():
            pending.touch()
            self._remote.upload(checkpoint)
            for name in self._remote.temporary_names() if self._delete_temporary else []:
                if name != checkpoint.name:
                    self._remote.delete(name)
            self._keep_only(checkpoint.name)
        pending.unlink(missing_ok=True)

    def _fetch(self, show: Show) -> None:
        newest = None
        for name in reversed(self._remote.names()):
            try:
                newest = fetched(self._remote, name, self._folder).name
                break
            except DamagedError as damage:
                show(f"checkpoint {self._remote.url}/{name} is damaged: {damage}. Using the one before")
        self._keep_only(newest)

    def _keep_only(self, name: str | None) -> None:
        for checkpoint in find_checkpoints(self._folder):
            if checkpoint.name != name:
                shutil.rmtree(checkpoint)


class StagedFolder(CheckpointFolder):
    """A folder behind a URL that Orbax cannot write to: one on a disk that all processes see, and uploaded from there."""

    def __init__(self, url: str, staging_dir: Path, *, delete_temporary: bool = True):
        """Args: see `Staging`."""
        self._url = url
        self._here = staging_folder(staging_dir, url)
        self._local = LocalFolder(self._here, delete_temporary=delete_temporary)
        self._delete_temporary = delete_temporary

    @property
    def place(self) -> str:
        """Its URL."""
        return self._url

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Those of the disk."""
        return self._local.failures

    def __str__(self) -> str:
        return f"{self._url} (by {self._here})"

    def open(self, show: Show) -> None:
        """Uploads what an earlier process had not come to, and fetches the newest checkpoint."""
        main_only(lambda: self._staging().synchronise(show))
        self._local.open(show)

    def checkpoints(self) -> Sequence[LocalCheckpoint]:
        """Those that are here."""
        return self._local.checkpoints()

    def set_aside(self, name: str) -> str:
        """Renames the copy."""
        return self._local.set_aside(name)

    def prepare(self) -> None:
        """Prepares the folder here."""
        self._local.prepare()

    def begin(self, name: str, files: Mapping[str, bytes]) -> None:
        """Writes to a hidden folder here."""
        self._local.begin(name, files)

    def arrays(self, name: str) -> str:
        """On the disk."""
        return self._local.arrays(name)

    def commit(self, name: str) -> None:
        """Gives it its name here, and uploads it."""
        self._local.commit(name)
        self._staging().publish(self._here / name)

    def _staging(self) -> Staging:
        return Staging(self._url, self._here, delete_temporary=self._delete_temporary)


def fetched(remote: RemoteFolder, name: str, folder: Path) -> Path:
    """The local copy of a checkpoint, copied now where it is not here.

    Raises:
        DamagedError: its files are not what was saved.
    """
    local = folder / name / CHECKSUMS
    if local.is_file() and local.read_bytes() == remote.read(name, CHECKSUMS):
        return folder / name
    return remote.download(name, folder)


def staged(url: str, staging_dir: Path) -> list[Path]:
    """A local copy of the newest whole checkpoint where a URL points: at it, at a run's folder, or at a folder of runs.

    Raises:
        ConfigError: the store cannot be read, or the local folder not be written.
    """
    with _reaching(url, staging_dir):
        found = find_remote(url)
        if not found:
            return []
        remote, name = found[-1]
        folder = staging_folder(staging_dir, remote.url)
        folder.mkdir(parents=True, exist_ok=True)
        return [fetched(remote, name, folder)]


@contextlib.contextmanager
def _reaching(store: str, folder: Path) -> Iterator[None]:
    """Says which side has failed: the store, or the local folder that stands for it."""
    try:
        yield
    except Exception as error:  # each store raises the kinds of its own client library
        if is_local_failure(error, folder):
            raise ConfigError(
                f"trainer.checkpointer.staging_dir: {folder}, where checkpoints behind URLs are staged, cannot be used"
                f" ({error}). What is in the store is whole. Make room or change permissions, or name another folder"
            ) from error
        raise ConfigError(
            f"{store} cannot be used ({type(error).__name__}: {error}). Check the address, the network and your credentials"
        ) from error
