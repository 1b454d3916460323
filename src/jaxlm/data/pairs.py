"""Preference pairs: two completions of the same prompt, side by side."""

from dataclasses import field
from typing import Any, ClassVar

from haliax import Axis

from jaxlm.core.axes import PAIR, POSITION
from jaxlm.core.types import PairBatch
from jaxlm.data.batch import BatchSpec, Columns, random_tokens, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.completions import SeveralCompletions, first_of
from jaxlm.data.config import DataConfig
from jaxlm.data.examples import WrappedExamples
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.pairs import PairsFormat
from jaxlm.data.sources.named import truncations
from jaxlm.reading.choices import choice


@choice(DataConfig, "pairs")
class PairsConfig(DataConfig):
    """Pairs of a chosen and a rejected completion of the same prompt. `model.seq_len` limits each half; `format.truncation`
    says what becomes of longer ones.
    """

    reads: ClassVar[str] = "pairs"

    format: FormatConfig = field(default_factory=PairsFormat)

    def batch_spec(self, seq_len: int) -> BatchSpec[PairBatch]:
        return BatchSpec(PairBatch.of, token_columns(Axis(PAIR, 2), Axis(POSITION, seq_len)))

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> "PreferencePairs":
        names, truncation = ("chosen", "rejected"), record_format.overlong
        return PreferencePairs(SeveralCompletions(cache, seq_len, names, "pairs", truncation))

    def identity(self) -> dict[str, Any]:
        return super().identity() | truncations(self.sources())

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        return random_tokens((num_examples, 2, seq_len), vocab_size, seed)


class PreferencePairs(WrappedExamples):
    """Pairs, of which some may have equal completions. These stay, because the next-token loss can read them."""

    def __init__(self, pairs: SeveralCompletions):
        super().__init__(pairs)
        equal = pairs.with_equal_completions()
        self._equal = (
            f"{len(equal):,} pairs have two equal completions {first_of(pairs, equal)}" if len(equal) else None
        )
        self._are_all_equal = 0 < len(equal) == len(pairs)

    @property
    def summary(self) -> str | None:
        return "; ".join(filter(None, (super().summary, self._equal and f"{self._equal}: they show no preference")))

    def no_signal(self) -> str | None:
        if not self._are_all_equal:
            return None
        return (
            f"all {self._equal}, so nothing is preferred to anything. Check chosen_field and rejected_field of the format,"
            " and model.seq_len: what it cuts off is not compared"
        )
