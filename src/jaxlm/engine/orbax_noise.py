"""What Orbax and TensorStore print although they raise it too: a failed save is said once, by whoever asked for it."""

import logging
import sys
from typing import Any


def silence_repeated_errors() -> None:
    """Drops the tracebacks of Orbax's threads, and those of writes that end after a failed save has closed its loop."""
    logging.getLogger("absl").addFilter(_is_news)
    if sys.unraisablehook is not _unraisable:
        sys.unraisablehook = _unraisable


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _unraisable(unraisable: Any) -> None:
    if not (isinstance(unraisable.exc_value, RuntimeError) and "Event loop is closed" in str(unraisable.exc_value)):
        sys.__unraisablehook__(unraisable)
