"""Packed token sequences: documents for language modeling, with a loss mask for instruction tuning."""

from dataclasses import dataclass
from typing import Any

from haliax import Axis

from jaxlm.core.axes import POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt
from jaxlm.core.types import TokenBatch
from jaxlm.data.batch import BatchSpec, Columns, random_tokens, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import TRAIN_BPE, DataConfig, given
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.packing import PackedSequences, pack_documents
from jaxlm.data.tokenizer.tokenizer import load_tokenizer


@DataConfig.register_subclass("tokens")
@dataclass(frozen=True)
class TokensConfig(DataConfig):
    """Sequences of tokens, packed with documents.

    Attributes:
        ignore_token_id: no loss is computed where the token to predict has this id, in training and validation.
    """

    ignore_token_id: NonNegativeInt | None = None

    def batch_spec(self, seq_len: int) -> BatchSpec[TokenBatch]:
        return BatchSpec(TokenBatch, token_columns(Axis(POSITION, seq_len)))

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> PackedSequences:
        max_documents = record_format.documents_per_sequence
        self._check_ignored(cache.vocab_size)
        packed = None if max_documents is None else pack_documents(cache, seq_len, max_documents=max_documents)
        return PackedSequences(cache, seq_len, packed, ignored_id=self.ignore_token_id)

    def check(self) -> None:
        super().check()
        if self.ignore_token_id is not None:
            # A tokenizer that is trained here may get fewer tokens, which `arrange` checks.
            size = self.vocab_size if self.tokenizer == TRAIN_BPE else load_tokenizer(self.tokenizer).vocab_size
            if size is not None:
                self._check_ignored(size)

    def _check_ignored(self, vocab_size: int) -> None:
        if self.ignore_token_id is not None and self.ignore_token_id >= vocab_size:
            raise ConfigError(
                f"data.ignore_token_id: {self.ignore_token_id} given, but the tokenizer has {vocab_size} tokens. Give the id"
                " of one of them, or remove it"
            )

    def identity(self) -> dict[str, Any]:
        return super().identity() | given(ignore_token_id=self.ignore_token_id)

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        return random_tokens((num_examples, seq_len), vocab_size, seed)
