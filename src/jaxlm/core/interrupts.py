"""Ctrl-C while a command starts or ends, where nothing handles it: the process ends at once, without a traceback.

A shell shows the exit code 130. Nothing changes where Ctrl-C is ignored or has a handler, and outside the main thread.
"""

import signal
import threading
from typing import Any


def end_at_interrupt() -> None:
    """Ctrl-C ends the process."""
    _replace(signal.default_int_handler, signal.SIG_DFL)


def raise_at_interrupt() -> None:
    """Ctrl-C raises `KeyboardInterrupt`, as at the start of Python."""
    _replace(signal.SIG_DFL, signal.default_int_handler)


def _replace(before: Any, after: Any) -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)
