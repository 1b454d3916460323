"""What a failed read or write means: the local disk is at fault, or a remote store."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.atomic_io import FULL
from jaxlm.core.errors import ConfigError


@contextlib.contextmanager
def storage_errors(
    failure: Callable[[str], Exception], *, local: Path | None = None, passthrough: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Around what speaks to a store by fsspec, whose implementations raise the kinds of their own client libraries.

    Args:
        failure: what to raise instead. It takes the kind and the words of the first cause.
        here: the local side; what fails there is raised as it is.
        told: kinds that say themselves what they mean, as a `ConfigError` does: raised as they are.
    """
    if not (logger := logging.getLogger("gcsfs")).handlers:
        # It would print a traceback of its own beside the message. Whoever configures logging still sees it.
        logger.addHandler(logging.NullHandler())
    try:
        yield
    except (ConfigError, *passthrough):
        raise
    except Exception as error:  # whatever the store's client library raises, each its own kinds
        if local is not None and is_local_failure(error, local):
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise failure(f"{type(cause).__name__}: {cause}") from error


def is_local_failure(error: BaseException, folder: Path) -> bool:
    """Whether what failed, while something was copied to or from a store, is the local disk.

    Args:
        folder: the local side of the copy.
    """
    if not isinstance(error, OSError):
        return False
    if error.errno in FULL:
        return True  # writing says no file name; stores speak of their own space in other words
    return error.filename is not None and Path(error.filename).absolute().is_relative_to(folder.absolute())
