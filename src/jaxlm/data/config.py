"""The `data` section: which text, cut into which tokens."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.data.cache import TokenCache, open_or_build, recipe
from jaxlm.data.packing import Windows
from jaxlm.data.sources import TextFile, find_files
from jaxlm.data.tokenizer import Tokenizer, load_tokenizer, train_bpe

TRAIN_BPE = "bpe"
_DEFAULT_VOCABULARY = 8192
_MAX_BPE_BYTES = 1 << 30  # of training text; more changes a vocabulary little and takes memory


@dataclass(frozen=True)
class TokenData:
    """The open data of a phase.

    Attributes:
        train: windows to train on.
        validation: windows to evaluate on; None where no validation_urls are given.
    """

    train: Windows
    validation: Windows | None


@dataclass(frozen=True)
class DataConfig:
    """Text files, a tokenizer, and where the tokens are kept.

    Attributes:
        train_urls: files, folders and globs of .txt, .jsonl and .py; `stdlib:train` for Python's standard library.
        validation_urls: the same, to evaluate on; `stdlib:validation` holds what `stdlib:train` leaves out.
        cache_dir: token caches and a tokenizer trained here are kept in it.
        tokenizer: a tokenizer.json or a folder with one; `bpe` trains one on the training files.
        vocab_size: of a tokenizer trained here (8192 where it is null), or what a loaded one must have.
        text_key: the key of the text in .jsonl records.
        shuffle: a new order of the windows in each epoch; false reads them as they stand.
        enforce_bos: begin every document with the tokenizer's token for that, if it has one.
        enforce_eos: end every document with the tokenizer's token for that, if it has one.
    """

    train_urls: list[str] = field(default_factory=list)
    validation_urls: list[str] = field(default_factory=list)
    cache_dir: str = "cache/"
    tokenizer: str = TRAIN_BPE
    vocab_size: int | None = None
    text_key: str = "text"
    shuffle: bool = True
    enforce_bos: bool = True
    enforce_eos: bool = True

    def check(self) -> None:
        """Looks for every file, and writes nothing. Raises `ConfigError` for what is not there."""
        if not self.train_urls:
            raise ConfigError("data.train_urls: empty. Name files, folders or globs, or 'stdlib:train'")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"data.vocab_size: {self.vocab_size} given, null or 1 and more expected")
        if self.tokenizer == TRAIN_BPE and self.vocab_size is not None and self.vocab_size < 257:
            raise ConfigError(f"data.vocab_size: {self.vocab_size} given; bytes and the end of text need 257 at least")
        if self.tokenizer != TRAIN_BPE:
            self.load_tokenizer(show=lambda _: None)
        self._train_files()
        self._validation_files()

    def identity(self) -> dict[str, Any]:
        """What makes two runs' data the same, as far as a configuration tells."""
        own = {k: v for k, v in vars(self).items() if k not in ("cache_dir", "validation_urls")}
        return {**own, "train_urls": list(self.train_urls)}

    def load_tokenizer(self, show: Callable[[str], None]) -> Tokenizer:
        """The tokenizer that the section names, trained first if that is what it asks for.

        Raises:
            ConfigError: there is none, or its vocabulary is not `vocab_size`.
        """
        if self.tokenizer == TRAIN_BPE:
            return self._trained_here(show)
        tokenizer = load_tokenizer(self.tokenizer)
        if self.vocab_size is not None and tokenizer.vocab_size != self.vocab_size:
            raise ConfigError(
                f"data.vocab_size: {self.vocab_size} given, but the tokenizer {self.tokenizer} has"
                f" {tokenizer.vocab_size} tokens. Leave vocab_size out, or set it to that"
            )
        return tokenizer

    def open(self, tokenizer: Tokenizer, seq_len: int, show: Callable[[str], None]) -> TokenData:
        """The tokens, cut into windows; tokenized first where no cache is there."""
        train = self._cache("train", self._train_files(), tokenizer, show)
        validation = self._validation_files()
        return TokenData(
            Windows(train, seq_len),
            Windows(self._cache("validation", validation, tokenizer, show), seq_len) if validation else None,
        )

    def validation_documents(self) -> Iterator[str]:
        """The text of the validation files."""
        for file in self._validation_files():
            yield from file.documents()

    def _train_files(self) -> list[TextFile]:
        return find_files(self.train_urls, "data.train_urls", self.text_key)

    def _validation_files(self) -> list[TextFile]:
        return find_files(self.validation_urls, "data.validation_urls", self.text_key)

    def _cache(
        self, split: str, files: list[TextFile], tokenizer: Tokenizer, show: Callable[[str], None]
    ) -> TokenCache:
        made_from = recipe(files, tokenizer, bos=self.enforce_bos, eos=self.enforce_eos)
        return open_or_build(Path(self.cache_dir) / split, files, tokenizer, made_from, show)

    def _trained_here(self, show: Callable[[str], None]) -> Tokenizer:
        """Trained once and kept in the cache folder, complete or invisible."""
        folder = Path(self.cache_dir) / "tokenizer"
        files = self._train_files()
        size = self.vocab_size or _DEFAULT_VOCABULARY
        made_from = {"vocab_size": size, "files": {file.name: file.digest for file in files}}
        note = folder / "made_from.json"
        if note.is_file():
            if json.loads(note.read_text()) != made_from:
                raise ConfigError(
                    f"the tokenizer in {folder} was trained on other files or for another vocab_size than"
                    f" {size:,}. Choose another data.cache_dir, or delete this one"
                )
            return load_tokenizer(str(folder))
        show(f"training a BPE tokenizer of {size:,} tokens on {len(files):,} files ...")
        tokenizer = train_bpe(_up_to(files, _MAX_BPE_BYTES), size)
        unfinished = folder.with_name(f"tokenizer.{os.getpid()}.unfinished")
        tokenizer.save(unfinished)
        (unfinished / "made_from.json").write_text(json.dumps(made_from))
        os.rename(unfinished, folder)
        return load_tokenizer(str(folder))


def _up_to(files: list[TextFile], max_bytes: int) -> Iterator[str]:
    seen = 0
    for file in files:
        for document in file.documents():
            yield document
            seen += len(document)
            if seen > max_bytes:
                return
