"""The text behind a `data` section: its sources, and the tokenizer that makes tokens of it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.data.base import TRAIN, VALIDATION, Log
from jaxlm.data.cache.artifacts import Artifacts
from jaxlm.data.sources.named import NamedSource
from jaxlm.data.sources.record_files import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer, open_tokenizer
from jaxlm.data.tokenizer.train_bpe import (
    DEFAULT_VOCAB_SIZE,
    TRAIN_BPE,
    BpeConfig,
    bpe_config,
    load_or_train_tokenizer,
)


@dataclass(frozen=True)
class Corpus:
    """The text behind a `data` section, and the tokenizer that makes tokens of it. Records that a class generates are one
    of its sources (`CorpusConfig`).

    Attributes:
        sources: those under `configs`, or the section itself as the only one.
        store: the folder of the caches, and where it is shared.
        tokenizer, added_tokens, vocab_size, enforce_bos: keys of the section.
    """

    sources: tuple[NamedSource, ...]
    store: Artifacts
    tokenizer: str | BpeConfig
    added_tokens: list[str]
    vocab_size: int | None
    enforce_bos: bool | None

    @property
    def train_sources(self) -> list[NamedSource]:
        """The sources that have training data."""
        return [source for source in self.sources if source.has(TRAIN)]

    @property
    def packs_documents(self) -> bool:
        """Tells whether a sequence may have several documents."""
        return any(source.config.format.documents_per_sequence != 1 for source in self.sources)

    def chat_templates(self) -> list[str]:
        """The chat templates given for the training sources, as in the configuration; that of the first source last."""
        templates = (source.config.format.given_template() for source in self.train_sources)
        return [template for template in templates if template is not None][::-1]

    def validation_documents(self) -> Iterator[str]:
        if any(source.config.format.bos_policy == "ids" for source in self.sources):
            return iter(())  # token ids are not the text they were made from
        return itertools.chain.from_iterable(source.documents(VALIDATION) for source in self.sources)

    def check_not_empty(self) -> None:
        """Raises `ConfigError` if nothing is named to train on. Needs no files."""
        for source in self.sources:
            if source.name and not (source.has(TRAIN) or source.has(VALIDATION)):
                raise ConfigError(
                    f"{source.key}: a source without text, which would be left out. Give train_urls, id, source or"
                    " validation_urls: cache_dir says where a cache is made, and caches of other programs are not read"
                )
        if not self.train_sources:
            named = any(source.name for source in self.sources)
            where = "data.configs: no source has train_urls" if named else "data.train_urls: empty"
            raise ConfigError(f"{where}. Give files, folders, globs or 'stdlib:train', or set id to a dataset")

    def check_tokenizer(self) -> None:
        """Raises `ConfigError` if the tokenizer cannot be loaded or trained, or lacks something that a format needs."""
        if bpe := bpe_config(self.tokenizer):
            bpe.check(self.vocab_size)
            return
        tokenizer = self.load_tokenizer(log=lambda _: None)
        for source in self.sources:
            source.encoder(tokenizer)

    def load_tokenizer(self, log: Log) -> Tokenizer:
        """Loads the tokenizer, and trains it first if `tokenizer` is `bpe` and it does not exist yet.

        Raises:
            ConfigError: the tokenizer does not exist, or its vocabulary size is not `vocab_size`.
        """
        bpe = bpe_config(self.tokenizer)
        if bpe is None:
            tokenizer = open_tokenizer(str(self.tokenizer), self.added_tokens, self.vocab_size)
            tokenizer.note_template(log)
            return tokenizer
        formats = {source.name: source.config.format.cache_key() for source in self.sources}
        return load_or_train_tokenizer(
            self.store,
            self._train_files(log),
            lambda: itertools.chain.from_iterable(source.documents(TRAIN, log) for source in self.sources),
            self.vocab_size or DEFAULT_VOCAB_SIZE,
            log,
            formats={name: format_key for name, format_key in formats.items() if format_key},
            config=bpe,
        )

    def known_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None for one that is trained, or if no document depends on what it puts in front of a text."""
        depends = self.enforce_bos is None and any(s.config.format.bos_policy == "prompt" for s in self.sources)
        return None if bpe_config(self.tokenizer) or not depends else self.load_tokenizer(log=lambda _: None)

    @property
    def prompt_bos(self) -> bool | None:
        """Tells whether a text to continue begins with BOS, as in training; None for what the tokenizer itself does."""
        if self.enforce_bos is not None:
            return self.enforce_bos
        formats = [source.config.format for source in self.train_sources]
        are_answers = all(one.bos_policy in ("prompt", "template") for one in formats)
        return None if formats and are_answers else True

    def describe_begin(self) -> str:
        """Says what the documents that are trained on begin with, and why, for the table at the start."""
        try:
            tokenizer = self.known_tokenizer()
        except ConfigError:
            return "documents begin as data.tokenizer says, which cannot be read"
        begin = {source.name: source.describe_begin(tokenizer) for source in self.train_sources}
        if len(set(begin.values())) == 1:
            return f"documents {next(iter(begin.values()))}"
        return "; ".join(f"documents of {name} {how}" for name, how in begin.items())

    def identity(self) -> dict[str, Any]:
        """The identity of the training text and its tokenizer, by content and not by path. Reads all local files, and remote
        ones once."""
        by_name = {source.name: source.content() for source in self.train_sources}
        known = self.known_tokenizer()
        # What documents begin with, by source if they differ.
        begin = {source.name: source.begin(known) for source in self.train_sources}
        values = list(begin.values())
        if bpe := bpe_config(self.tokenizer):
            tokenizer: Any = {TRAIN_BPE: self.vocab_size or DEFAULT_VOCAB_SIZE, **bpe.cache_key()}
        else:
            tokenizer = open_tokenizer(str(self.tokenizer), self.added_tokens, None).fingerprint
        return {
            **(by_name.get("") or {"sources": by_name}),
            "tokenizer": tokenizer,
            "enforce_bos": values[0] if values and all(value == values[0] for value in values) else begin,
        }

    def _train_files(self, log: Log) -> list[TextFile]:
        """The training files of all sources; names are prefixed with the source's name to be unique."""
        return [
            replace(file, name=f"{source.name}/{file.name}") if source.name else file
            for source in self.sources
            for file in source.identified(TRAIN, log)
        ]
