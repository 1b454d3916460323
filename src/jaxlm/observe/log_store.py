"""Copies a run's log folder to a URL: logs are appended to, and object stores cannot append to a file."""

import contextlib
import json
import posixpath
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import write_text
from jaxlm.core.safe_io import atomic_file
from jaxlm.core.stores import check_store_writable, open_store, put_file, storage_errors
from jaxlm.engine.checkpoint.lease import StillHeld, locked_file
from jaxlm.observe.records import CONFIG, ENVIRONMENT
from jaxlm.observe.trackers import environment

_KEY = "trainer.log_dir"


class _UploadError(Exception):
    pass


class LogStore:
    """The log folder of a run at a URL, and its copy on the local disk, to which the run writes. Only for process 0."""

    def __init__(self, url: str | None, folder: Path, warn: Callable[[str], None]):
        """Args:
        url: None if there is only the local folder. All methods then do nothing.
        folder: the local copy.
        warn: prints a warning if files cannot be uploaded, and when they can be again.
        """
        self._url = url
        self._folder = folder
        self._warn = warn
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._failing = False
        self.still_held: StillHeld = lambda: None

    @contextlib.contextmanager
    def locked(self) -> Iterator[StillHeld]:
        """Keeps other runs out of the local folder, where both would write the same files. The lock is a file beside it."""
        path = self._folder.with_name(f".{self._folder.name}.logs.lock")
        unwritable = lambda error: ConfigError(  # noqa: E731
            f"{_KEY}: {self._folder} cannot be written: {error.strerror}. Set it to a writable folder"
        )
        with locked_file(path, f"write their logs to {self._folder.absolute()}", unwritable) as self.still_held:
            yield self.still_held

    def fetch(self, *, replace: bool) -> None:
        """Downloads the files of earlier starts.

        Args:
            replace: also those that are smaller here, because the run has continued on another machine. False while another
                process may be writing to them.

        Raises:
            ConfigError: the store cannot be read.
        """
        if self._url is None:
            return
        fs, root = open_store(self._url, _KEY)
        advice = "Check the address, the network and your credentials"
        error = lambda reason: ConfigError(f"{_KEY}: '{self._url}' cannot be read ({reason}). {advice}")  # noqa: E731
        with storage_errors(error, local=self._folder):
            for path, info in fs.find(root, detail=True).items():
                local = self._folder / posixpath.relpath(path, root)
                if not local.exists() or (replace and local.stat().st_size < info["size"]):
                    local.parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(path, str(local))

    def check_writable(self) -> None:
        """Raises `ConfigError` if the store does not allow writing."""
        if self._url is not None:
            check_store_writable(self._url, _KEY)

    def upload(self) -> None:
        """Uploads the files that have changed. What cannot be uploaded is uploaded next time."""
        if self._url is None:
            return
        try:
            with storage_errors(_UploadError, local=self._folder):
                self._upload(self._url)
        except (_UploadError, OSError) as error:
            if not self._failing:
                self._warn(f"warning: logs cannot be copied to {self._url} ({error}). They are in {self._folder}")
            self._failing = True
        else:
            if self._failing:
                self._warn(f"logs are copied to {self._url} again")
            self._failing = False

    def _upload(self, url: str) -> None:
        fs, root = open_store(url, _KEY)
        for path in sorted(self._folder.rglob("*")):
            if not path.is_file() or path.name.endswith(".tmp"):
                continue
            status = path.stat()
            version = (status.st_size, status.st_mtime_ns)
            if self._uploaded.get(path) != version:
                put_file(fs, path, f"{root}/{path.relative_to(self._folder).as_posix()}")
                self._uploaded[path] = version


def describe_start(folder: Path, config: str) -> None:
    """Writes the configuration and the environment to the log folder. Raises `ConfigError` if it cannot."""
    texts = {CONFIG: config, ENVIRONMENT: json.dumps(environment.described(), indent=1)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with atomic_file(folder / name) as unfinished:
                write_text(unfinished, text)
    except OSError as error:
        raise ConfigError(
            f"trainer.log_dir: {folder} cannot be written ({error.strerror}). Free up disk space, or set another folder"
        ) from error
