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

    Only what the model wrote can end it, not the output of a tool.

    Attributes:
        texts: the stop strings, none of them empty.
        fragments: the parts of the text of some tokens, each with whether the model wrote it.
    """

    texts: Sequence[str]
    fragments: Callable[[list[int]], Sequence[tuple[str, bool]]]

    @staticmethod
    def of_text(texts: Sequence[str], decode: Callable[[list[int]], str]) -> "StopStrings":
        """For tokens that the model wrote all. Args: decode: decodes them to text."""
        return StopStrings(texts, lambda ids: [(decode(ids), True)])

    @property
    def until(self) -> StopFunction | None:
        """The stop function for `generate_tokens`; None if there are no stop strings."""
        return self._contains_stop if self.texts else None

    def before(self, ids: list[int]) -> str:
        """The text of the tokens up to the first stop string.

        Truncates at each stop string in the order given, as lm-evaluation-harness does; this matters if two overlap.
        """
        fragments = self.fragments(ids)
        for stop in self.texts:
            fragments = _until(stop, fragments)
        return "".join(text for text, _ in fragments)

    def _contains_stop(self, ids: list[int]) -> bool:
        fragments = self.fragments(ids)
        return any(is_own and stop in text for text, is_own in fragments for stop in self.texts)


def _until(stop: str, fragments: Sequence[tuple[str, bool]]) -> Sequence[tuple[str, bool]]:
    for number, (text, is_own) in enumerate(fragments):
        if is_own and stop in text:
            return [*fragments[:number], (text.partition(stop)[0], is_own)]
    return fragments
