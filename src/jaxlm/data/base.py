"""What a source of text and a stream of training batches are."""

import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlm.models.base import LanguageModel

Log = Callable[[str], None]


class DataSource(abc.ABC):
    """Files of documents that a URL means, here or elsewhere. Known by name and size before anything is copied."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """How it is known in fingerprints, relative to its URL."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int | None:
        """Of its files; None where the other side does not say."""

    @property
    @abc.abstractmethod
    def has_records(self) -> bool:
        """Whether its text is found by a key."""

    @abc.abstractmethod
    def is_here(self, mirror: Path) -> bool:
        """Whether `files` would have nothing to copy."""

    @abc.abstractmethod
    def files(self, mirror: Path, log: Log) -> list[tuple[str, Path]]:
        """Name and path of its files; copied into the folder `mirror` first, where they are elsewhere.

        Raises:
            ConfigError: the other side does not answer, or has changed; says what to do.
        """


class Batches(abc.ABC):
    """Batches without end, whose place can be saved and found again."""

    @abc.abstractmethod
    def __next__(self) -> Any:
        """The next batch, on the devices; at once where it has been read already.

        Raises:
            Exception: what went wrong in the background, with its own traceback.
        """

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """The position after the last batch that was handed out: the same on every process, whatever their number."""

    @abc.abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a position that `state` told, in O(1)."""

    @abc.abstractmethod
    def records(self, step: int) -> str:
        """What the batch of a step (from 0, none later than the newest) is made of, so that a person can find it."""

    @abc.abstractmethod
    def read_ahead(self) -> None:
        """Tells a stream that reads in the background that the newest batch's step is under way: now is the time."""

    def refresh(self, model: LanguageModel) -> None:
        """Tells a stream that depends on the model about its newest form; most do not."""
        del model

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what runs in the background."""
