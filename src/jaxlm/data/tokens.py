"""Packed token sequences: documents for language modeling, with a loss mask for instruction tuning."""

from dataclasses import dataclass

from haliax import Axis

from jaxlm.core.axes import POSITION
from jaxlm.core.types import TokenBatch
from jaxlm.data.batch import BatchSpec, Columns, random_tokens, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.packing import PackedSequences, pack_documents


@DataConfig.register_subclass("tokens")
@dataclass(frozen=True)
class TokensConfig(DataConfig):
    """Sequences of tokens, packed with documents."""

    def batch_spec(self, seq_len: int) -> BatchSpec[TokenBatch]:
        return BatchSpec(TokenBatch, token_columns(Axis(POSITION, seq_len)))

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> PackedSequences:
        max_documents = record_format.documents_per_sequence
        if max_documents is None:
            return PackedSequences(cache, seq_len)
        return PackedSequences(cache, seq_len, pack_documents(cache, seq_len, max_documents=max_documents))

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        return random_tokens((num_examples, seq_len), vocab_size, seed)
