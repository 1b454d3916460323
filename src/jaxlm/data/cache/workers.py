"""The interface of workers that tokenize a cache, and the local implementation."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxlm.data.formats.base import Encoder, TokenizedText


class EncodingPool(NamedTuple):
    """Workers bound to an encoder.

    Attributes:
        submit: tokenizes a list of documents with `Encoder.encode` and returns a future.
        max_in_flight: how many submitted calls keep all workers busy.
    """

    submit: Callable[[Sequence[Any]], Future[list[TokenizedText | None]]]
    max_in_flight: int


class Workers(abc.ABC):
    """Workers that tokenize documents. The result must not depend on their kind or number."""

    @abc.abstractmethod
    def encoding(self, encoder: Encoder) -> contextlib.AbstractContextManager[EncodingPool]:
        """Makes the encoder available to the workers until the block ends."""


class LocalWorkers(Workers):
    """Threads in this process. The tokenizer itself runs outside Python and uses all cores."""

    @contextlib.contextmanager
    def encoding(self, encoder: Encoder) -> Iterator[EncodingPool]:
        # Two calls in flight, so no core idles during the last long document of a call, or during file I/O.
        with ThreadPoolExecutor(2) as pool:
            yield EncodingPool(lambda contents: pool.submit(encoder.encode, contents), max_in_flight=2)


LOCAL_WORKERS = LocalWorkers()
