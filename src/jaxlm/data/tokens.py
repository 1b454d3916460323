"""Packed token sequences: documents for language modeling, with a loss mask for instruction tuning."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from haliax import Axis

from jaxlm.core.axes import POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveInt
from jaxlm.core.rules import Rules, excludes, only
from jaxlm.core.values.batch_types import MaskedBatch, TokenBatch
from jaxlm.data.base import given
from jaxlm.data.batch import BatchSpec, Column, Columns, random_tokens, token_columns
from jaxlm.data.best_fit import BestFitConfig, BestFitSequences, open_rows
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import DataConfig
from jaxlm.data.examples import Examples
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.loader import Batching
from jaxlm.data.masking import Masker, MaskingConfig, stratified
from jaxlm.data.packing import PackedSequences, Windows, pack_documents
from jaxlm.data.sources.named import truncations
from jaxlm.data.tokenizer.tokenizer import Tokenizer, open_tokenizer
from jaxlm.data.tokenizer.train_bpe import bpe_config
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import choice_name, encode
from jaxlm.reading.effects import field


@choice(DataConfig, "tokens")
class TokensConfig(DataConfig):
    """Sequences of tokens, packed with documents.

    Attributes:
        ignore_token_id: no loss is computed where the token to predict has this id, in training and validation.
        packing: how documents become sequences. Null concatenates texts and cuts them every `model.seq_len` tokens, and packs
            records with a loss mask whole; `{type: best_fit}` chooses documents that fill a sequence.
        stride: tokens from the start of a sequence of text to the start of the next. With fewer than `model.seq_len`,
            sequences overlap; null means that they do not. Sequences with targets that those held out
            (`num_validation_sequences`) have too are left out of training.
        train_overlap: with a stride, compute the loss on every token of a sequence. `false` computes it only on those that
            the sequence before does not have, so each token counts once, after at least `seq_len - stride` others.
        masking: which tokens are hidden from the model, for the objectives `mlm` and `diffusion`; `{}` hides a random
            fraction of each sequence. Null hides none.
    """

    key_rules: ClassVar[Rules] = (
        only("train_overlap", when="stride"),
        excludes("stride", "packing", why="whose rows do not overlap"),
        only("packing", when="enforce_bos", is_=(True, None), why="because its rows begin with BOS"),
    )

    ignore_token_id: NonNegativeInt | None = field(None, on_resume="content")
    packing: BestFitConfig | None = field(None, on_resume="content")
    stride: PositiveInt | None = field(None, on_resume="content")
    train_overlap: bool = field(True, on_resume="content")
    masking: MaskingConfig | None = field(None, on_resume="content")

    def batch_spec(self, seq_len: int) -> BatchSpec[Any]:
        if self.stride is not None and self.stride > seq_len:
            raise ConfigError(
                f"data.stride: {self.stride} given, but model.seq_len is {seq_len}, so the tokens between two sequences would"
                f" be left out. Set it to {seq_len} or less"
            )
        columns = token_columns(Axis(POSITION, seq_len))
        if self.masking is None:
            return BatchSpec(TokenBatch, columns)
        self.masking.check_length(seq_len)
        rates = {"rates": Column(np.float32, ())} if self.masking.has_rates else {}
        of_rows = {"mask_fractions": Column(np.float32, ()), "mask_ids": Column(np.int32, ()), **rates}
        make = functools.partial(MaskedBatch, mask_range=self.masking.mask_range)
        return BatchSpec(make, {**columns, "maskable": columns["loss_mask"], **of_rows})

    @property
    def batching(self) -> Batching:
        changes = None
        if self.masking is not None:
            if self.masking.mask_replicas is None:
                changes = "data.masking hides other tokens in every epoch. Set data.masking.mask_replicas"
        elif self.packing is not None and self._resolved(self.packing).wrap:
            changes = "data.packing makes other rows in every pass. Set data.packing.wrap: false"
        return Batching(masking=self.masking, never_repeats=changes)

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> Examples:
        max_documents = record_format.documents_per_sequence
        truncation, ignored = record_format.overlong, self.ignore_token_id
        self._check_ignored(cache.vocab_size)
        if self.packing is not None:
            packing = self._resolved(self.packing)
            rows = open_rows(cache, seq_len, packing, truncation=truncation)
            return BestFitSequences(cache, seq_len, packing, rows, ignored_id=ignored, truncation=truncation)
        if max_documents is not None:
            packed = pack_documents(cache, seq_len, max_documents=max_documents, truncation=truncation)
            return PackedSequences(cache, seq_len, packed, ignored_id=ignored)
        windows = None if self.stride is None else Windows(self.stride, self.train_overlap)
        return PackedSequences(cache, seq_len, ignored_id=ignored, windows=windows)

    def check_opens(self, tokenizer: Callable[[], Tokenizer], *, dry: bool) -> None:
        if self.masking is not None:
            self.masking.mask_id(tokenizer())

    def _resolved(self, packing: BestFitConfig) -> BestFitConfig:
        """The same with a value for `wrap`."""
        in_order = packing.fill == "crop" and not self.shuffle and self.num_validation_sequences is None
        return replace(packing, wrap=in_order if packing.wrap is None else packing.wrap)

    def check_keys(self) -> None:
        if self.packing is not None:
            self._check_packing(self.packing)
        self._check_stride()

    def check(self) -> None:
        super().check()
        corpus = self.corpus
        tokenizer = None if self.packing is None else corpus.known_tokenizer()
        for source in () if self.packing is None else corpus.sources:
            if source.begin(tokenizer) is not True:
                raise ConfigError(
                    f"data.enforce_bos: null given, and the tokenizer puts no BOS before the records of {source.key}"
                    ".format, but data.packing: {type: best_fit} makes rows that begin with it. Set it to true"
                )
        if self.ignore_token_id is not None:
            # A tokenizer that is trained here may get fewer tokens, which `arrange` checks.
            is_trained = bpe_config(self.tokenizer) is not None
            size = (
                self.vocab_size
                if is_trained
                else open_tokenizer(str(self.tokenizer), self.added_tokens, None).vocab_size
            )
            if size is not None:
                self._check_ignored(size)

    def _check_stride(self) -> None:
        for source in () if self.stride is None else self.corpus.sources:
            if source.config.format.documents_per_sequence is not None:
                kind = choice_name(type(source.config.format))
                raise ConfigError(
                    f"data.stride: {self.stride} given, but the records of {source.key}.format ({kind}) are not split, so"
                    " their sequences cannot overlap. Remove it"
                )

    def _check_packing(self, packing: BestFitConfig) -> None:
        if packing.wrap and not self._resolved(replace(packing, wrap=None)).wrap:
            unsuitable = {
                "data.packing.fill": None if packing.fill == "crop" else packing.fill,
                "data.shuffle": self.shuffle or None,
                "data.num_validation_sequences": self.num_validation_sequences,
            }
            key, setting = next((key, value) for key, value in unsuitable.items() if value is not None)
            raise ConfigError(
                f"data.packing.wrap: true given together with {key}: {encode(setting)}. Rows that never end have whole"
                " documents or their beginnings, in the order of the documents, and none can be held out. Remove one of them"
            )
        for source in self.corpus.sources:
            if source.config.format.bos_policy == "ids":
                kind = choice_name(type(source.config.format))
                raise ConfigError(
                    f"{source.key}.format.type: {kind} given, whose documents need not begin with BOS, but data.packing:"
                    " {type: best_fit} makes rows that do. Remove data.packing"
                )
            most = source.config.format.documents_per_sequence
            if most == 1:
                raise ConfigError(
                    f"{source.key}.format.pack: false given together with data.packing. Remove one of them"
                )
            if most is not None and packing.fill != "pad":
                raise ConfigError(
                    f"data.packing.fill: {packing.fill} given, but the records of {source.key}.format have a loss mask"
                    " and are not cut. Set it to pad"
                )

    def _check_ignored(self, vocab_size: int) -> None:
        if self.ignore_token_id is not None and self.ignore_token_id >= vocab_size:
            raise ConfigError(
                f"data.ignore_token_id: {self.ignore_token_id} given, but the tokenizer has {vocab_size} tokens. Give the id"
                " of one of them, or remove it"
            )

    def identity(self) -> dict[str, Any]:
        packing = None if self.packing is None else self._resolved(self.packing).identity()
        windows = {} if self.stride is None else {"stride": self.stride, "train_overlap": self.train_overlap}
        keys = given(ignore_token_id=self.ignore_token_id, packing=packing)
        masking = {} if self.masking is None else {"masking": self.masking.identity()}
        return super().identity() | keys | truncations(self.corpus.sources) | windows | masking

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        columns = random_tokens((num_examples, seq_len), vocab_size, seed)
        if self.masking is None:
            return columns
        numbers = np.arange(num_examples)
        masker = Masker(self.masking, vocab_size - 1, np.arange(vocab_size) == vocab_size - 1)
        return masker.mask(columns, numbers, np.zeros_like(numbers), stratified(numbers, (seed,), self.masking.strata))
