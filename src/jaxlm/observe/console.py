"""Console output: log lines and a progress line, also appended to `train.log`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from jaxlm.core.runtime import is_main_process
from jaxlm.observe.log_file import LogFile

_PROGRESS_INTERVAL_S = 10.0  # between progress lines if the output is not a terminal


class Console:
    """Prints on process 0; other processes print nothing."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._showing_progress = False
        self._last_progress = -_PROGRESS_INTERVAL_S
        self._log_file: LogFile | None = None

    def log_to(self, path: Path) -> None:
        """Also appends lines to this file from now on. Raises `OSError` if it cannot be opened."""
        if is_main_process():
            self._log_file = LogFile(path, self._print)
            self._log_file.open()

    def log(self, text: str = "") -> None:
        """Prints one or more lines."""
        if not is_main_process():
            return
        if self._showing_progress:
            print("\r\x1b[2K", end="", file=self._stream)
            self._showing_progress = False
        self._print(text)
        if self._log_file is not None:
            self._log_file.append(f"{text}\n")
            self._log_file.flush(sync=False)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def progress(self, text: str, *, last: bool = False) -> None:
        """Replaces the progress line on a terminal; otherwise prints a line every 10 s."""
        if not is_main_process():
            return
        if self._is_terminal and not last:
            print(f"\r\x1b[2K{text}", end="", file=self._stream, flush=True)
            self._showing_progress = True
        elif last or time.monotonic() - self._last_progress >= _PROGRESS_INTERVAL_S:
            self._last_progress = time.monotonic()
            self.log(text)

    def close(self) -> None:
        """Closes the log file."""
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None


def table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Formats rows of name and value as two aligned columns under a title."""
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def duration(seconds: float) -> str:
    """Formats seconds as `42s`, `3m10s` or `2h05m`."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"
