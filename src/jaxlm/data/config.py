"""The `data` section: which text, cut into which tokens."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from jaxlm.config.decode import encode
from jaxlm.core.errors import ConfigError
from jaxlm.data.base import Log
from jaxlm.data.cache.workers import LOCAL_WORKERS, Workers
from jaxlm.data.shuffle import EraShuffle
from jaxlm.data.sources.config import TRAIN, VALIDATION, SourceConfig
from jaxlm.data.sources.named import NamedSource
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer, document_ends, load_tokenizer
from jaxlm.data.tokenizer.train_bpe import SMALLEST_VOCABULARY, trained_tokenizer
from jaxlm.data.tokens import StopStrategy, TokenData, ValidationData
from jaxlm.data.train_weights import block_counts, weight_stages

TRAIN_BPE = "bpe"
_DEFAULT_VOCABULARY = 8192
_RESERVED = ("train", "validation", "tokenizer", "mirror", "evaluate")


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """Text, a tokenizer, and where the tokens are kept: one source, or several under `configs`.

    Attributes:
        cache_dir: token caches, a tokenizer trained here and copies of remote files are kept in it. Where it lies in a
            folder of text, it is left out of that.
        tokenizer: a tokenizer.json or a folder with one; `bpe` trains one on the training files.
        vocab_size: of a tokenizer trained here (8192 where it is null), or what a loaded one must have.
        shuffle: a new order of the windows in each epoch; false reads them as they stand, and `{type: era, era_length: N}`
            shuffles within stretches of N windows only.
        enforce_bos: begin every document with the tokenizer's token for that.
        enforce_eos: end every document with the tokenizer's token for that.
        configs: several sources by name, each with the keys of one (`train_urls`, `tags`, ...), instead of those here.
        train_weights: how much of each source: `{wiki: 3, code: 1}`, or changing with the phase's steps:
            `[[0, {wiki: 1, code: 0}], [1000, {wiki: 1, code: 1}]]`. Null takes them as large as they are.
        stop_strategy: when the data ends. `restart`: never, each source begins anew; `first_exhausted`: when one of them has
            been read; `all_exhausted`: when all have. Then the phase has as many steps, if `num_train_steps` is more.
        mixture_block_size: examples in which each source has exactly its part.
    """

    cache_dir: str = "cache/"
    tokenizer: str = TRAIN_BPE
    vocab_size: int | None = None
    shuffle: bool | EraShuffle = True
    enforce_bos: bool = True
    enforce_eos: bool = True
    configs: dict[str, SourceConfig] = field(default_factory=dict)
    train_weights: dict[str, float] | list[list[Any]] | None = None
    stop_strategy: StopStrategy = "restart"
    mixture_block_size: int = 2048

    def sources(self) -> tuple[NamedSource, ...]:
        """All sources: those of `configs`, or the section itself."""
        here = Path(self.cache_dir)
        if not self.configs:
            return (self._source("", "data", self, here),)
        return tuple(
            self._source(name, f"data.configs.{name}", config, Path(config.cache_dir or here / name))
            for name, config in self.configs.items()
        )

    def trained_names(self) -> list[str]:
        """Of the sources that can be trained on."""
        return [source.name for source in self.sources() if source.has(TRAIN)]

    def check(self) -> None:
        """Looks for every file, remote ones included, and writes and copies nothing.

        Raises:
            ConfigError: for what is not there, for what cannot be, for a key that has no effect here, and for caches that
                were made from other text or with other options.
        """
        if "://" in self.cache_dir:
            raise ConfigError(
                f"data.cache_dir: '{self.cache_dir}' is no folder of this machine. Caches are read from local files: name a"
                " local or mounted folder; remote text is copied there once"
            )
        self.check_mixture()
        if not self.trained_names():
            where = "data.configs: no source has train_urls" if self.configs else "data.train_urls: empty"
            raise ConfigError(f"{where}. Name files, folders or globs, or 'stdlib:train'; or a dataset by its id")
        self._check_tokenizer()
        for source in self.sources():
            source.check()

    def identity(self) -> dict[str, Any]:
        """What makes two runs' data the same: content, not places. Reads all files, remote ones through the mirror.

        Not among it: `cache_dir`, the validation text, which nothing is trained on, and weights, which may change on the way.
        """
        trained = {"bpe": self.vocab_size or _DEFAULT_VOCABULARY}
        trained_on = [source for source in self.sources() if source.has(TRAIN)]
        by_name = {source.name: source.content() for source in trained_on}
        return {
            **(by_name.get("") or {"sources": by_name}),
            "tokenizer": trained if self.tokenizer == TRAIN_BPE else load_tokenizer(self.tokenizer).fingerprint,
            "shuffle": encode(self.shuffle),
            "enforce_bos": self.enforce_bos,
            "enforce_eos": self.enforce_eos,
        }

    def load_tokenizer(self, log: Log) -> Tokenizer:
        """The tokenizer that the section names, trained first if that is what it asks for.

        Raises:
            ConfigError: there is none, or its vocabulary is not `vocab_size`.
        """
        if self.tokenizer == TRAIN_BPE:
            size = self.vocab_size or _DEFAULT_VOCABULARY
            formats = {source.name: source.config.format.cache_key() for source in self.sources()}
            return trained_tokenizer(
                Path(self.cache_dir) / "tokenizer",
                self._all_files(log),
                self._all_texts,
                size,
                log,
                formats={name: cache_key for name, cache_key in formats.items() if cache_key},
            )
        tokenizer = load_tokenizer(self.tokenizer)
        if self.vocab_size is not None and tokenizer.vocab_size != self.vocab_size:
            raise ConfigError(
                f"data.vocab_size: {self.vocab_size} given, but the tokenizer {self.tokenizer} has"
                f" {tokenizer.vocab_size} tokens. Leave vocab_size out, or set it to that"
            )
        return tokenizer

    def is_tokenized(self) -> bool:
        """Whether all caches are there that `open` would make."""
        names = self._weighed_names()
        return all(
            source.is_tokenized(split)
            for source in self.sources()
            for split in (TRAIN, VALIDATION)
            if source.has(split) and (split == VALIDATION or source.name in names)
        )

    def open(self, tokenizer: Tokenizer, seq_len: int, log: Log, workers: Workers = LOCAL_WORKERS) -> TokenData:
        """The tokens, cut into windows; tokenized first, by `workers`, where no cache is there."""
        names, trained = self._weighed_names(), {}
        for source in self.sources():
            if source.name in names:
                trained[source.name] = source.open(TRAIN, tokenizer, seq_len, log, workers=workers)
        sizes = {name: float(len(windows)) for name, windows in trained.items()}
        return TokenData(
            train=trained,
            validation=self.open_validation(tokenizer, seq_len, log, workers=workers),
            weights=weight_stages(self.train_weights or sizes, self.trained_names()) if self.configs else (),
            block_size=self.mixture_block_size,
            shuffle=self.shuffle,
            stop_strategy=self.stop_strategy,
        )

    def open_validation(
        self,
        tokenizer: Tokenizer,
        seq_len: int,
        log: Log,
        *,
        separate_cache: bool = False,
        workers: Workers = LOCAL_WORKERS,
    ) -> tuple[ValidationData, ...]:
        """The windows to evaluate on alone, of the sources that have any.

        Args:
            apart: in token caches named by their content, so that they are never taken for the run's.
            workers: who tokenizes.
        """
        return tuple(
            ValidationData(
                source, source.open(VALIDATION, tokenizer, seq_len, log, separate_cache=separate_cache, workers=workers)
            )
            for source in self.sources()
            if source.has(VALIDATION)
        )

    def validation_documents(self) -> Iterator[str]:
        """The text of the validation files."""
        return itertools.chain.from_iterable(source.documents(VALIDATION) for source in self.sources())

    def _source(self, name: str, key: str, config: SourceConfig, folder: Path) -> NamedSource:
        home = Path(self.cache_dir)
        return NamedSource(name, key, config, folder, home, bos=self.enforce_bos, eos=self.enforce_eos)

    def _weighed_names(self) -> list[str]:
        """Of the sources that are trained on at some step."""
        names = self.trained_names()
        if not self.configs or self.train_weights is None:
            return names
        stages = weight_stages(self.train_weights, names)
        return [name for name in names if any(stage.weights.get(name) for stage in stages)]

    def _all_files(self, log: Log) -> list[TextFile]:
        """Those to train a tokenizer on, under names that differ between sources."""
        return [
            replace(file, name=f"{source.name}/{file.name}") if source.name else file
            for source in self.sources()
            for file in source.files(TRAIN, log)
        ]

    def _all_texts(self) -> Iterator[str]:
        return itertools.chain.from_iterable(source.documents(TRAIN) for source in self.sources())

    def check_mixture(self) -> None:
        """Raises `ConfigError` for sources and weights that cannot be; looks at no file."""
        if self.mixture_block_size < 1:
            raise ConfigError(f"data.mixture_block_size: {self.mixture_block_size} given, 1 or more expected")
        if not self.configs:
            if self.train_weights is not None:
                raise ConfigError("data.train_weights: has no effect on one source. Name several under data.configs")
            return
        usual = SourceConfig()
        for key in (item.name for item in fields(SourceConfig) if item.name != "cache_dir"):
            if getattr(self, key) != getattr(usual, key):
                raise ConfigError(
                    f"data.{key}: has no effect beside data.configs, whose sources have their own. Move it into one, or"
                    " leave it out"
                )
        for name in self.configs:
            if not name.replace("_", "").replace("-", "").replace(".", "").isalnum() or name in _RESERVED:
                raise ConfigError(
                    f"data.configs: '{name}' given as a name; letters, digits, '_', '-' and '.' are allowed, and none of"
                    f" {', '.join(_RESERVED)}"
                )
        folders = [source.folder for source in self.sources()]
        shared = {str(folder) for folder in folders if folders.count(folder) > 1}
        if shared:
            raise ConfigError(
                f"data.configs: several sources have the cache_dir {', '.join(shared)}. Give each its own"
            )
        if self.train_weights is not None:
            names = self.trained_names()
            for stage in weight_stages(self.train_weights, names):
                block_counts(stage.weights, names, self.mixture_block_size)

    def _check_tokenizer(self) -> None:
        if self.tokenizer != TRAIN_BPE:
            tokenizer = self.load_tokenizer(log=lambda _: None)
            if any(source.config.format.adds_special_tokens for source in self.sources()):
                document_ends(tokenizer, bos=self.enforce_bos, eos=self.enforce_eos)
            for source in self.sources():
                source.encoder(tokenizer)
        elif self.vocab_size is not None and self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.vocab_size: {self.vocab_size} given; bytes and the end of text need at least"
                f" {SMALLEST_VOCABULARY}"
            )
