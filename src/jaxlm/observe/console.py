"""Console output: log lines and a progress line, also appended to `train.log`."""

import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from jaxlm.core.errors import end_of_output
from jaxlm.core.redaction import redacted
from jaxlm.core.runtime import is_main_process
from jaxlm.observe.log_file import LogFile

_ROW = re.compile(r"  \S+(?: \S+)* {2,}")  # the name in a row of a table
_PROGRESS_INTERVAL_S = 10.0  # between progress lines if the output is not a terminal


class Console:
    """Prints on process 0; other processes print nothing.

    If the program that reads the output ends (`| head`), a console with a log file goes on with the file alone. Another one
    raises `BrokenPipeError`.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._showing_progress = False
        self._last_progress = -_PROGRESS_INTERVAL_S
        self._log_file: LogFile | None = None

    @property
    def has_colors(self) -> bool:
        """Tells whether the output is a terminal that may show colors (https://no-color.org)."""
        return self._is_terminal and not os.environ.get("NO_COLOR")

    def log_to(self, path: Path) -> None:
        """Also appends lines to this file from now on. Raises `OSError` if it cannot be opened."""
        if is_main_process():
            self._log_file = LogFile(path, self._print)
            self._log_file.open()

    def log(self, text: str = "") -> None:
        """Prints one or more lines."""
        if not is_main_process():
            return
        text = redacted(text)
        if self._showing_progress:
            self._print("\r\x1b[2K", end="")
            self._showing_progress = False
        self._print(folded(text, shutil.get_terminal_size().columns) if self._is_terminal else text)
        if self._log_file is not None:
            self._log_file.append(f"{text}\n")
            self._log_file.flush(sync=False)

    def _print(self, text: str, end: str = "\n") -> None:
        try:
            print(redacted(text), end=end, file=self._stream, flush=True)
        except BrokenPipeError as error:
            if self._log_file is None:
                raise
            end_of_output(error)
            self._log_file.append("the program that read the output has ended; the run goes on\n")

    def progress(self, text: str, *, last: bool = False) -> None:
        """Replaces the progress line on a terminal; otherwise prints a line every 10 s."""
        if not is_main_process():
            return
        if self._is_terminal and not last:
            self._print(f"\r\x1b[2K{text}", end="")
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


def folded(text: str, width: int) -> str:
    """Folds rows of a `table` that are wider than the terminal, so that they go on below their value."""
    lines = []
    for line in text.split("\n"):
        row = _ROW.match(line)
        if row and len(line) > width > 2 * len(row[0]):
            lines += textwrap.wrap(line, width, subsequent_indent=" " * len(row[0]), break_on_hyphens=False)
        else:
            lines.append(line)
    return "\n".join(lines)


def exact_duration(seconds: float) -> str:
    """Formats seconds with three digits, as `1.23 s`, `12.3 ms` or `123 us`."""
    if seconds >= 1 or not seconds:
        return f"{seconds:.3g} s" if seconds < 1e3 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def duration(seconds: float) -> str:
    """Formats seconds as `42s`, `3m10s` or `2h05m`."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"
