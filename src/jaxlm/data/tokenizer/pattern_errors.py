"""Turns panics and plain exceptions of the library `tokenizers` into messages."""

import contextlib
from collections.abc import Iterator

from jaxlm.core.errors import ConfigError


@contextlib.contextmanager
def pattern_errors(key: str = "data.tokenizer") -> Iterator[None]:
    """Raises `ConfigError` where the library panics because a regular expression takes too many steps, or gives up."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception:
            raise ConfigError(f"{key}: it cannot encode a text: {error}. Its tokenizer.json is damaged") from error
        if not is_panic(error):
            raise
        raise ConfigError(
            f"{key}: the regular expression that cuts text into pieces gives up on a text ({error}). Nested repetitions,"
            " such as (a+)+, can match in exponentially many ways. Write it so that there is only one"
        ) from error


def is_panic(error: BaseException) -> bool:
    """Returns whether code in Rust has panicked. The type cannot be imported, and is no `Exception`."""
    return type(error).__name__ == "PanicException"
