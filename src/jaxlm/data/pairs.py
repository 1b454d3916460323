"""Preference pairs: two completions of the same prompt, side by side."""

from dataclasses import dataclass, field
from typing import ClassVar

from haliax import Axis

from jaxlm.core.axes import PAIR, POSITION
from jaxlm.core.types import PairBatch
from jaxlm.data.batch import BatchSpec, Columns, random_tokens, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.completions import SeveralCompletions
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.pairs import PairsFormat


@DataConfig.register_subclass("pairs")
@dataclass(frozen=True)
class PairsConfig(DataConfig):
    """Pairs of a chosen and a rejected completion of the same prompt. `model.seq_len` limits each half; longer ones are
    truncated at the end.
    """

    reads: ClassVar[str] = "pairs"

    format: FormatConfig = field(default_factory=PairsFormat)

    def batch_spec(self, seq_len: int) -> BatchSpec[PairBatch]:
        return BatchSpec(PairBatch.of, token_columns(Axis(PAIR, 2), Axis(POSITION, seq_len)))

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> SeveralCompletions:
        del record_format
        return SeveralCompletions(cache, seq_len, ("chosen", "rejected"), "pairs")

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        return random_tokens((num_examples, 2, seq_len), vocab_size, seed)
