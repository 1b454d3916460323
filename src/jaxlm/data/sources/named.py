"""One source of text: what its keys say, and its token caches."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.data.base import DataSource, Log
from jaxlm.data.cache.build import open_or_build
from jaxlm.data.cache.cache_key import cache_key, check_same, content_of
from jaxlm.data.cache.token_cache import Provenance, make_provenance, read_about
from jaxlm.data.cache.workers import LOCAL_WORKERS, Workers
from jaxlm.data.formats.base import Encoder
from jaxlm.data.formats.text import TextFormat
from jaxlm.data.packing import PackedSequences, describe_packing, pack_documents
from jaxlm.data.sources.config import TRAIN, USUAL_TEXT_KEY, VALIDATION, ListedUrl, SourceConfig
from jaxlm.data.sources.files import open_files
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class NamedSource:
    """A source, and where it stands.

    Attributes:
        name: under `data.configs`; empty where the data section is the one source itself.
        key: of the section that configures it, for messages.
        config: its keys.
        folder: its caches are `<folder>/train` and `<folder>/validation`.
        home: the run's `data.cache_dir`, which is no text; copies of remote files are kept in it.
        bos, eos: whether every document begins and ends with the tokenizer's tokens for that.
    """

    name: str
    key: str
    config: SourceConfig
    folder: Path
    home: Path
    bos: bool
    eos: bool

    @property
    def mirror(self) -> Path:
        """Where copies of remote files are kept."""
        return self.home / "mirror"

    def has(self, split: str) -> bool:
        """Whether there is anything to train on, or to evaluate on."""
        return self.config.has(split)

    def check(self) -> None:
        """Looks for its files, remote ones included, and writes and copies nothing.

        Raises:
            ConfigError: for what is not there, for a key that has no effect, and for caches that were made from other text
                or with other options.
        """
        splits = {
            split: [source for one in self._listed(split) for source in one.sources] for split in (TRAIN, VALIDATION)
        }
        self._check_records([source for sources in splits.values() for source in sources])
        for split, sources in splits.items():
            # Content is compared; what would have to be copied for that is compared when the cache is opened.
            if sources and (self.folder / split).exists() and all(source.is_here(self.mirror) for source in sources):
                self._check_cache(split)

    def files(self, split: str, log: Log = print) -> list[TextFile]:
        """Its files, remote ones copied first."""
        return self._files(self._listed(split), log)

    def documents(self, split: str) -> Iterator[str]:
        """Their text."""
        for file in self.files(split):
            yield from self.config.format.texts(file)

    def content(self) -> dict[str, Any]:
        """What it trains on, by content: plain JSON."""
        files = content_of(self.files(TRAIN))
        return {
            "train_files": len(files),
            "train_content": hashlib.sha256("".join(files.values()).encode()).hexdigest(),
            "text_key": self._text_key,
            **self.config.format.cache_key(),
        }

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        """Its format, with the tokenizer."""
        return self.config.format.encoder(tokenizer, bos=self.bos, eos=self.eos, key=f"{self.key}.format")

    def is_tokenized(self, split: str) -> bool:
        """Whether `open` would find a cache."""
        return (self.folder / split).exists()

    def open(
        self,
        split: str,
        tokenizer: Tokenizer,
        seq_len: int,
        log: Log,
        *,
        separate_cache: bool = False,
        workers: Workers = LOCAL_WORKERS,
    ) -> PackedSequences:
        """Its windows; tokenized first where no cache is there.

        Args:
            apart: in a cache named by its content.
            workers: who tokenizes.
        """
        named = (lambda line: log(f"{self.name} {line}")) if self.name else log
        how = self.config.format
        encoder, files = self.encoder(tokenizer), self.files(split, log)
        made_from = cache_key(files, tokenizer, bos=self.bos, eos=self.eos)
        made_from = {**made_from, **how.cache_key(), **encoder.cache_key()}
        apart_name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
        folder = self.folder / "evaluate" / apart_name if separate_cache else self.folder
        cache = open_or_build(folder / split, files, encoder, made_from, named, workers)
        if how.documents_per_sequence is None:
            return PackedSequences(cache, seq_len)
        windows = PackedSequences(cache, seq_len, pack_documents(cache, seq_len, most=how.documents_per_sequence))
        if not len(windows):
            raise ConfigError(
                f"{self.key}: no document has a token to learn from within model.seq_len ({seq_len}). Raise it"
            )
        named(f"{split}: {describe_packing(windows)}")
        return windows

    def origins(self, split: str, windows: PackedSequences) -> Provenance:
        """Which of its URLs each token of an open cache is from."""
        listed = list({one.url: one for one in reversed(self._listed(split))}.values())[::-1]
        files_until = [len(self._files(listed[: n + 1], print)) for n in range(len(listed))]
        return make_provenance(windows.cache, [one.url for one in listed], files_until)

    def _listed(self, split: str) -> list[ListedUrl]:
        return self.config.listed(split, self.key, self.mirror, self.home)

    def _files(self, listed: list[ListedUrl], log: Log) -> list[TextFile]:
        return open_files([(one.key, one.sources) for one in listed], self._text_key, self.mirror, log)

    @property
    def _text_key(self) -> str:
        own = self.config.format.text_key if isinstance(self.config.format, TextFormat) else None
        return own or self.config.text_key

    def _check_records(self, sources: list[DataSource]) -> None:
        how = self.config.format
        for source in sources:
            if not how.can_read(source.name) and not (source.has_records and how.can_read("x.jsonl")):
                raise ConfigError(
                    f"{self.key}.format: {how.get_choice_name(type(how))} given, and '{source.name}' cannot hold that"
                )
        if self._text_key == USUAL_TEXT_KEY:
            return
        if not isinstance(how, TextFormat) or self._text_key != self.config.text_key != USUAL_TEXT_KEY:
            raise ConfigError(
                f"{self.key}.text_key: '{self.config.text_key}' has no effect beside this format. Leave it out"
            )
        if not any(source.has_records for source in sources):
            raise ConfigError(
                f"{self.key}.text_key: '{self._text_key}' given, but no file is .jsonl, .json, .parquet or .arrow,"
                " and others have no keys. Leave it out"
            )

    def _check_cache(self, split: str) -> None:
        """Compares what needs no tokenizer; opening the cache compares the rest."""
        before = read_about(self.folder / split)["made_from"]
        files = content_of(self.files(split))
        now = {**before, "enforce_bos": self.bos, "enforce_eos": self.eos, "files": files}
        if "text_key" in before:
            now["text_key"] = self._text_key
        now |= {"format": None} if "format" in before else {}
        now |= self.config.format.cache_key()
        check_same("token cache", self.folder / split, before, now)
