"""Turns errors of remote stores into one exception, and distinguishes them from local disk errors."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.atomic_io import DISK_FULL_ERRNOS
from jaxlm.core.errors import ConfigError


@contextlib.contextmanager
def storage_errors(
    failure: Callable[[str], Exception], *, local: Path | None = None, passthrough: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Wraps calls to a remote store through fsspec, whose implementations raise exceptions of their client libraries.

    Args:
        failure: makes the exception to raise instead, from the type and message of the root cause.
        local: local side of the transfer; errors there are re-raised unchanged.
        passthrough: exception types to re-raise unchanged, as `ConfigError` always is.
    """
    if not (logger := logging.getLogger("gcsfs")).handlers:
        # Without a handler, gcsfs prints a traceback in addition to the message. Configured logging still shows it.
        logger.addHandler(logging.NullHandler())
    try:
        yield
    except (ConfigError, *passthrough):
        raise
    except Exception as error:  # client libraries of stores raise their own types
        if local is not None and is_local_failure(error, local):
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise failure(f"{type(cause).__name__}: {cause}") from error


def is_local_failure(error: BaseException, folder: Path) -> bool:
    """Whether the local disk caused the failure of a copy between `folder` and a remote store."""
    if not isinstance(error, OSError):
        return False
    if error.errno in DISK_FULL_ERRNOS:
        return True  # errors on write carry no file name, and stores report their own quota differently
    return error.filename is not None and Path(error.filename).absolute().is_relative_to(folder.absolute())
