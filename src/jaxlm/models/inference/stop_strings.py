"""Texts that end a continuation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxlm.models.inference.generate import StopFunction


@dataclass(frozen=True)
class StopStrings:
    """Ends a continuation where one of them appears, which is then without it.

    Attributes:
        texts: none of them is empty.
        decode: tokens to text.
    """

    texts: Sequence[str]
    decode: Callable[[list[int]], str]

    @property
    def until(self) -> StopFunction | None:
        """For `continued`; None where nothing ends it, so that nobody has to look."""
        return self._found if self.texts else None

    def before(self, ids: list[int]) -> str:
        """The text of the tokens up to them. One after another is cut off, as lm-evaluation-harness does it: of two that
        overlap, the one that is named first decides.
        """
        text = self.decode(ids)
        for stop in self.texts:
            text = text.partition(stop)[0]
        return text

    def _found(self, ids: list[int]) -> bool:
        text = self.decode(ids)
        return any(stop in text for stop in self.texts)
