"""What a person sees: lines, and one line that moves. Everything goes to `train.log` as well."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from jaxlm.core.runtime import is_main_process

_QUIET_S = 10.0  # between two progress lines where there is no terminal


class Console:
    """Prints on process 0; other processes stay silent."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._moving = False
        self._last_progress = -_QUIET_S
        self._log: TextIO | None = None

    def log_to(self, path: Path) -> None:
        """From now on, lines are also appended to this file."""
        if is_main_process():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, text: str = "") -> None:
        """Prints one or more whole lines."""
        if not is_main_process():
            return
        if self._moving:
            print("\r\x1b[2K", end="", file=self._stream)
            self._moving = False
        print(text, file=self._stream, flush=True)
        self._write_log(text)

    def progress(self, text: str, *, last: bool = False) -> None:
        """Replaces the moving line on a terminal; elsewhere prints a line now and then."""
        if not is_main_process():
            return
        if self._live and not last:
            print(f"\r\x1b[2K{text}", end="", file=self._stream, flush=True)
            self._moving = True
        elif last or time.monotonic() - self._last_progress >= _QUIET_S:
            self._last_progress = time.monotonic()
            self.log(text)

    def close(self) -> None:
        """Ends the log file."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            self._log.write(text + "\n")
            self._log.flush()


def table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Two columns under a title, the left one as wide as it must be."""
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([title, *lines])


def duration(seconds: float) -> str:
    """`42s`, `3m10s`, `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
