"""What a stream of training batches is."""

import abc
from typing import Any

from jaxlm.models.base import LanguageModel


class Batches(abc.ABC):
    """Batches without end, whose place can be saved and found again."""

    @abc.abstractmethod
    def __next__(self) -> Any:
        """The next batch, on the devices.

        Raises:
            Exception: what went wrong in the background, with its own traceback.
        """

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """The position after the last batch that was handed out: the same on every process, whatever their number."""

    @abc.abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a position that `state` told, in O(1)."""

    def refresh(self, model: LanguageModel) -> None:
        """Tells a stream that depends on the model about its newest form; most do not."""
        del model

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what runs in the background."""
