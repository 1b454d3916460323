"""Preference pairs: two completions of the same prompt, side by side."""

from dataclasses import field
from typing import Any, ClassVar

from haliax import Axis

from jaxlm.core.axes import PAIR, POSITION
from jaxlm.core.values.batch_types import PairBatch
from jaxlm.data.batch import BatchSpec, Columns, random_tokens, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.pairs_format import PairsFormat
from jaxlm.data.several_completions import ComparedCompletions, SeveralCompletions
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

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> ComparedCompletions:
        pairs = SeveralCompletions(cache, seq_len, ("chosen", "rejected"), "pairs", record_format.overlong)
        return ComparedCompletions(
            pairs,
            pairs.with_equal_completions(),
            wording=("pairs have two equal completions", "they show no preference"),
            if_all="so nothing is preferred to anything. Check chosen_field and rejected_field of the format, and"
            " model.seq_len: what it cuts off is not compared",
        )

    def identity(self) -> dict[str, Any]:
        return super().identity() | truncations(self.sources())

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        return random_tokens((num_examples, 2, seq_len), vocab_size, seed)
