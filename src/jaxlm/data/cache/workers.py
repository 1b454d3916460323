"""Who tokenizes the parts of a cache."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxlm.data.formats.base import Encoder, TokenizedText


class EncodingPool(NamedTuple):
    """Workers that know an encoder.

    Attributes:
        submit: documents -> what `Encoder.encode` makes of them, in time.
        at_once: how many parts they should have in hand.
    """

    submit: Callable[[Sequence[Any]], Future[list[TokenizedText | None]]]
    at_once: int


class Workers(abc.ABC):
    """Tokenize what they are given; the result does not depend on who they are, or how many."""

    @abc.abstractmethod
    def encoding(self, encoder: Encoder) -> contextlib.AbstractContextManager[EncodingPool]:
        """Hands them an encoder, until the block ends."""


class LocalWorkers(Workers):
    """Threads of this process: the tokenizer's own work is done outside of Python, on all cores."""

    @contextlib.contextmanager
    def encoding(self, encoder: Encoder) -> Iterator[EncodingPool]:
        # Two, so that no core waits for the last long document of one part, or for reading and writing.
        with ThreadPoolExecutor(2) as pool:
            yield EncodingPool(lambda contents: pool.submit(encoder.encode, contents), at_once=2)


LOCAL_WORKERS = LocalWorkers()
