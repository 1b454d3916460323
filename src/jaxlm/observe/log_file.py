"""Text files in the log folder, whose failure never stops the run, and the copy of the folder at a URL."""

import contextlib
import json
import os
import posixpath
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import write_text
from jaxlm.core.safe_io import atomic_file
from jaxlm.core.stores import check_store_writable, inaccessible, open_store, put_file, storage_errors
from jaxlm.engine.checkpoint.lease import LeaseCheck, locked_file
from jaxlm.observe import environment
from jaxlm.observe.records import CONFIG, ENVIRONMENT

_BUFFER_BYTES = 1 << 13


class LogFile:
    """Appends lines to a file. If the disk is full or the file is gone, lines wait in memory until they can be written.

    `warn` is called when writing begins to fail, when it works again, and if lines are missing at the end. A deleted file
    is created again with all of its lines, as long as this process has it open.

    Another thread may call `flush`. Then the others do not wait for the disk: what they append is written later.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], check_lease: LeaseCheck = lambda: None):
        """Args: check_lease: called before lines are written; those of a process that has lost its run are dropped."""
        self.path, self._check_lease = path, check_lease
        self._warn = warn
        self._file: BinaryIO | None = None
        self._size = 0  # bytes in the file
        self._waiting = bytearray()
        self._problem: OSError | None = None
        self._adding, self._writing = threading.Lock(), threading.Lock()

    def open(self) -> None:
        """Creates the file if it does not exist. Without this, the first line does. Raises `OSError`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        self._size = os.fstat(self._file.fileno()).st_size

    def append(self, text: str) -> None:
        """Adds whole lines as they are: their texts are redacted before. They may wait in memory until `flush`."""
        with self._adding:
            self._waiting += text.encode(errors="surrogatepass")
        if len(self._waiting) >= _BUFFER_BYTES:
            self.flush(sync=False)

    def flush(self, *, sync: bool = True) -> None:
        """Writes all lines. Args: sync: also wait until they are on the disk."""
        if self._file is None and not self._waiting:
            return
        if not self._writing.acquire(blocking=sync):
            return
        try:
            self._write_all(sync=sync)
        finally:
            self._writing.release()

    def close(self) -> None:
        """Writes all lines and closes the file."""
        self.flush()
        if self._waiting:
            self._warn(f"warning: {self._waiting.count(10)} lines are missing in {self.path} ({self._problem})")
        if self._file is not None:
            self._file.close()

    def _write_all(self, *, sync: bool) -> None:
        self._check_lease()
        try:
            file = self._current_file()
            while self._waiting:
                written = os.write(file.fileno(), bytes(self._waiting))
                with self._adding:
                    del self._waiting[:written]
                self._size += written
            if sync:
                os.fsync(file.fileno())
        except OSError as error:
            if self._problem is None:
                self._warn(
                    f"warning: {self.path} cannot be written ({error.strerror or error}). The run goes on; missing lines are"
                    " written when this is possible again"
                )
            self._problem = error
            return
        if self._problem is not None:
            self._warn(f"{self.path} is written again")
        self._problem = None

    def _current_file(self) -> BinaryIO:
        """The open file at the path; a new one if it was deleted or replaced."""
        old = self._file
        if old is None:
            self.open()
        elif not self._is_at_path(old):
            content = self._content(old)
            self.open()
            assert self._file is not None
            if self._size == 0:
                with self._adding:
                    self._waiting[:0] = content
            old.close()
        assert self._file is not None
        return self._file

    def _is_at_path(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def _content(self, file: BinaryIO) -> bytes:
        try:
            return os.pread(file.fileno(), self._size, 0)
        except OSError as error:  # for example a stale handle of a network disk
            self._warn(f"warning: the earlier lines of {self.path} are lost ({error.strerror or error})")
            return b""


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
        self.check_lease: LeaseCheck = lambda: None

    @contextlib.contextmanager
    def locked(self) -> Iterator[LeaseCheck]:
        """Keeps other runs out of the local folder, where both would write the same files. The lock is a file beside it."""
        path = self._folder.with_name(f".{self._folder.name}.logs.lock")
        unwritable = lambda error: ConfigError(  # noqa: E731
            f"{_KEY}: {self._folder} cannot be written: {error.strerror}. Set it to a writable folder"
        )
        with locked_file(path, f"write their logs to {self._folder.absolute()}", unwritable) as self.check_lease:
            yield self.check_lease

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
        with storage_errors(inaccessible(f"{_KEY}: '{self._url}' cannot be read"), local=self._folder):
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
