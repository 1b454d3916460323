"""Stop strings: texts that end a continuation.

They are searched in the decoded text, because a stop string may start in the middle of a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

StopFunction = Callable[[list[int]], bool]
"""Whether the new tokens of a row end its continuation."""


@dataclass(frozen=True)
class StopStrings:
    """Ends a continuation at the first stop string, which is not part of the output.

    Attributes:
        texts: the stop strings, none of them empty.
        decode: decodes tokens to text.
    """

    texts: Sequence[str]
    decode: Callable[[list[int]], str]

    @property
    def until(self) -> StopFunction | None:
        """The stop function for `generate_tokens`; None if there are no stop strings."""
        return self._contains_stop if self.texts else None

    def before(self, ids: list[int]) -> str:
        """The text of the tokens up to the first stop string.

        Truncates at each stop string in the order given, as lm-evaluation-harness does; this matters if two overlap.
        """
        text = self.decode(ids)
        for stop in self.texts:
            text = text.partition(stop)[0]
        return text

    def _contains_stop(self, ids: list[int]) -> bool:
        text = self.decode(ids)
        return any(stop in text for stop in self.texts)
