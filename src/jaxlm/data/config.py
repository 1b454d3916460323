"""The `data` section: which text, cut into which tokens."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.data.base import Show
from jaxlm.data.bpe import SMALLEST_VOCABULARY, trained_tokenizer
from jaxlm.data.cache import TokenCache, read_about
from jaxlm.data.cache_building import document_ends, open_or_build
from jaxlm.data.origins import Origins, make_origins
from jaxlm.data.packing import Windows
from jaxlm.data.recipe import cache_recipe, check_same, content_of
from jaxlm.data.sources import find_files, list_sources
from jaxlm.data.text_file import TextFile
from jaxlm.data.tokenizer import Tokenizer, load_tokenizer

TRAIN_BPE = "bpe"
_DEFAULT_VOCABULARY = 8192
_USUAL_TEXT_KEY = "text"


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
        train_urls: files, folders and globs of .txt, .py, .jsonl, .json, .parquet and .arrow, also compressed; the same
            behind `s3://`, `https://` and whatever else fsspec reads; `hf:ID?name=..&split=..` for a dataset of the Hugging
            Face hub; `stdlib:train` for Python's standard library.
        validation_urls: the same, to evaluate on; `stdlib:validation` holds what `stdlib:train` leaves out.
        cache_dir: token caches, a tokenizer trained here and copies of remote files are kept in it. Where it lies in a
            folder of text, it is left out of that.
        tokenizer: a tokenizer.json or a folder with one; `bpe` trains one on the training files.
        vocab_size: of a tokenizer trained here (8192 where it is null), or what a loaded one must have.
        text_key: the key of the text in records (.jsonl, .json), and its column in tables (.parquet, .arrow).
        shuffle: a new order of the windows in each epoch; false reads them as they stand.
        enforce_bos: begin every document with the tokenizer's token for that.
        enforce_eos: end every document with the tokenizer's token for that.
    """

    train_urls: list[str] = field(default_factory=list)
    validation_urls: list[str] = field(default_factory=list)
    cache_dir: str = "cache/"
    tokenizer: str = TRAIN_BPE
    vocab_size: int | None = None
    text_key: str = _USUAL_TEXT_KEY
    shuffle: bool = True
    enforce_bos: bool = True
    enforce_eos: bool = True

    def check(self) -> None:
        """Looks for every file, remote ones included, and writes and copies nothing.

        Raises:
            ConfigError: for what is not there, for what cannot be, for a key that has no effect here, and for caches in
                `cache_dir` that were made from other text or with other options.
        """
        if not self.train_urls:
            raise ConfigError("data.train_urls: empty. Name files, folders or globs, or 'stdlib:train'")
        self._check_tokenizer()
        urls = {"train": self.train_urls, "validation": self.validation_urls}
        splits = {
            split: [
                source
                for some in list_sources(own, f"data.{split}_urls", self._mirror, Path(self.cache_dir))
                for source in some
            ]
            for split, own in urls.items()
        }
        if self.text_key != _USUAL_TEXT_KEY and not any(
            source.has_records for sources in splits.values() for source in sources
        ):
            raise ConfigError(
                f"data.text_key: '{self.text_key}' given, but no file is .jsonl, .json, .parquet or .arrow, and others have"
                " no keys. Leave it out"
            )
        for split, sources in splits.items():
            folder = Path(self.cache_dir) / split
            # Content is compared; what would have to be copied for that is compared when the cache is opened.
            if sources and folder.exists() and all(source.is_here(self._mirror) for source in sources):
                self._check_cache(folder, self._files(urls[split], f"data.{split}_urls"))

    def identity(self) -> dict[str, Any]:
        """What makes two runs' data the same: content, not places. Reads all files, remote ones through the mirror.

        Not among it: `cache_dir`, and the validation text, which nothing is trained on.
        """
        trained = {"bpe": self.vocab_size or _DEFAULT_VOCABULARY}
        files = content_of(self._train_files())
        return {
            "train_files": len(files),
            "train_content": hashlib.sha256("".join(files.values()).encode()).hexdigest(),
            "tokenizer": trained if self.tokenizer == TRAIN_BPE else load_tokenizer(self.tokenizer).fingerprint,
            "text_key": self.text_key,
            "shuffle": self.shuffle,
            "enforce_bos": self.enforce_bos,
            "enforce_eos": self.enforce_eos,
        }

    def load_tokenizer(self, show: Show) -> Tokenizer:
        """The tokenizer that the section names, trained first if that is what it asks for.

        Raises:
            ConfigError: there is none, or its vocabulary is not `vocab_size`.
        """
        if self.tokenizer == TRAIN_BPE:
            size = self.vocab_size or _DEFAULT_VOCABULARY
            return trained_tokenizer(Path(self.cache_dir) / "tokenizer", self._train_files(show), size, show)
        tokenizer = load_tokenizer(self.tokenizer)
        if self.vocab_size is not None and tokenizer.vocab_size != self.vocab_size:
            raise ConfigError(
                f"data.vocab_size: {self.vocab_size} given, but the tokenizer {self.tokenizer} has"
                f" {tokenizer.vocab_size} tokens. Leave vocab_size out, or set it to that"
            )
        return tokenizer

    def open(self, tokenizer: Tokenizer, seq_len: int, show: Show) -> TokenData:
        """The tokens, cut into windows; tokenized first where no cache is there."""
        train = self._cache("train", self._train_files(show), tokenizer, show)
        return TokenData(Windows(train, seq_len), self.open_validation(tokenizer, seq_len, show))

    def open_validation(self, tokenizer: Tokenizer, seq_len: int, show: Show, *, apart: bool = False) -> Windows | None:
        """The windows to evaluate on alone; None where no validation_urls are given.

        Args:
            apart: in a token cache named by its content, so that it is never taken for the run's.
        """
        files = self._validation_files(show)
        if not files:
            return None
        place = "validation"
        if apart:
            recipe = json.dumps(cache_recipe(files, tokenizer, bos=self.enforce_bos, eos=self.enforce_eos))
            place = f"evaluate/{hashlib.sha256(recipe.encode()).hexdigest()[:16]}/validation"
        return Windows(self._cache(place, files, tokenizer, show), seq_len)

    def validation_origins(self, windows: Windows) -> Origins:
        """Which of `validation_urls` each token of the open validation data is from."""
        urls = list(dict.fromkeys(self.validation_urls))
        ends = [len(replace(self, validation_urls=urls[: n + 1])._validation_files()) for n in range(len(urls))]
        return make_origins(windows.cache, urls, ends)

    def validation_documents(self) -> Iterator[str]:
        """The text of the validation files."""
        for file in self._validation_files():
            yield from file.documents()

    @property
    def _mirror(self) -> Path:
        return Path(self.cache_dir) / "mirror"

    def _train_files(self, show: Show = print) -> list[TextFile]:
        return self._files(self.train_urls, "data.train_urls", show)

    def _validation_files(self, show: Show = print) -> list[TextFile]:
        return self._files(self.validation_urls, "data.validation_urls", show)

    def _files(self, urls: list[str], key: str, show: Show = print) -> list[TextFile]:
        return find_files(urls, key, self.text_key, self._mirror, show, Path(self.cache_dir))

    def _cache(self, place: str, files: list[TextFile], tokenizer: Tokenizer, show: Show) -> TokenCache:
        made_from = cache_recipe(files, tokenizer, bos=self.enforce_bos, eos=self.enforce_eos)
        return open_or_build(Path(self.cache_dir) / place, files, tokenizer, made_from, show)

    def _check_tokenizer(self) -> None:
        if self.tokenizer != TRAIN_BPE:
            document_ends(self.load_tokenizer(show=lambda _: None), bos=self.enforce_bos, eos=self.enforce_eos)
        elif self.vocab_size is not None and self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.vocab_size: {self.vocab_size} given; bytes and the end of text need at least"
                f" {SMALLEST_VOCABULARY}"
            )

    def _check_cache(self, folder: Path, files: list[TextFile]) -> None:
        """Compares what needs no tokenizer; opening the cache compares the rest."""
        before = read_about(folder)["made_from"]
        now = {**before, "enforce_bos": self.enforce_bos, "enforce_eos": self.enforce_eos, "files": content_of(files)}
        if "text_key" in before:
            now["text_key"] = self.text_key
        check_same("token cache", folder, before, now)
