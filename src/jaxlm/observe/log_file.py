"""A text file in the log folder whose failure never stops the run."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from jaxlm.engine.checkpoint.lease import StillHeld

_BUFFER_BYTES = 1 << 13


class LogFile:
    """Appends lines to a file. If the disk is full or the file is gone, lines wait in memory until they can be written.

    `warn` is called when writing begins to fail, when it works again, and if lines are missing at the end. A deleted file
    is created again with all of its lines, as long as this process has it open.

    Another thread may call `flush`. Then the others do not wait for the disk: what they append is written later.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], still_held: StillHeld = lambda: None):
        """Args: still_held: called before lines are written; those of a process that has lost its run are dropped."""
        self.path, self._still_held = path, still_held
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
        self._still_held()
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
