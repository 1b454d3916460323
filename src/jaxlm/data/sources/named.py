"""A configured source of text, its token caches, and the ledger of what remote text contained.

The ledger lets remote text be read once, and not by every machine at every start:

<folder of the source>/text.json    identity of a remote file, as the server reports it -> SHA-256 of its content

Caches and runs are identified by content. A file whose identity is unknown, because it is new or was changed, is read.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import note
from jaxlm.core.safe_io import atomic_file, folder_lock, read_bytes, read_stored
from jaxlm.core.stores import AT_START_S, open_store, retried
from jaxlm.data.base import TRAIN, VALIDATION, DataSource, Log
from jaxlm.data.cache.artifacts import Artifacts, digest, disk_full_errors, writable_folder
from jaxlm.data.cache.build import LOCAL_WORKERS, Workers, build_cache
from jaxlm.data.cache.shared_cache import describe_cache, find_blocks, open_in_store, share_sums
from jaxlm.data.cache.token_blocks import BlockMirror
from jaxlm.data.cache.token_cache import TOKEN_CACHE, Provenance, TokenCache, cache_key, make_provenance
from jaxlm.data.formats.base import Encoder
from jaxlm.data.formats.chat import renders_messages
from jaxlm.data.formats.preview import MaskPreview, describe_records, preview_masks
from jaxlm.data.sources.files import open_files
from jaxlm.data.sources.record_files import TextFile, file_digests
from jaxlm.data.sources.source_config import DEFAULT_TEXT_KEY, ListedUrl, SourceConfig
from jaxlm.data.tokenizer.chat_template import RENDERING
from jaxlm.data.tokenizer.tokenizer import Tokenizer

_NAME = "text.json"


@dataclass(frozen=True)
class TextLedger:
    """The ledger of a source. Args: store: the source's caches, with which it is shared."""

    store: Artifacts

    def known(self, identities: Collection[str]) -> dict[str, str]:
        """The SHA-256 of known contents, by identity. Raises `ConfigError` if the store cannot be read."""
        digests = self._here()
        if self.store.url is not None and not digests.keys() >= set(identities):
            digests = self._in_store() | digests
        return {identity: digests[identity] for identity in identities if identity in digests}

    def add(self, digests: Mapping[str, str], log: Log) -> None:
        """Records contents: here, and on process 0 in the store, unless it cannot be written."""
        if not digests:
            return
        path = self.store.folder / _NAME
        with folder_lock(writable_folder(path.parent), log), disk_full_errors(path):
            merged = self._here() | dict(digests)
            with atomic_file(path) as unfinished:
                unfinished.write_bytes(_json(merged))
        self.store.offer(_NAME, lambda *_: _json(self._in_store() | merged), log, "read the text")

    def _here(self) -> dict[str, str]:
        path = self.store.folder / _NAME
        return _parse(read_bytes(path)) if path.is_file() else {}

    def _in_store(self) -> dict[str, str]:
        assert self.store.url is not None
        fs, root = open_store(self.store.url, self.store.key)
        with self.store.errors("read", self.store.folder):
            try:
                return _parse(retried(lambda: read_stored(fs, f"{root}/{_NAME}"), AT_START_S))
            except FileNotFoundError:
                return {}


def _json(digests: Mapping[str, str]) -> bytes:
    return json.dumps(digests, indent=1).encode()


def _parse(raw: bytes) -> dict[str, str]:
    """Empty if the content is damaged: the text is then read again."""
    try:
        digests = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return {str(identity): str(digest) for identity, digest in digests.items()} if isinstance(digests, dict) else {}


_NOT_USUAL = ("drop_overlength", "keep_end")


@dataclass(frozen=True)
class NamedSource:
    """A source with its name and folders.

    Attributes:
        name: name under `data.configs`; empty if the `data` section itself is the only source.
        key: config path of the source, for messages.
        config: the configuration of the source.
        store: the token caches are in `train` and `validation` of its folder.
        cache_dir: the run's `data.cache_dir`. It holds the mirror, and its files are never read as text.
        blocks: where blocks of token caches at a URL are kept.
        bos: whether to begin every document with BOS; None leaves it to the format.
        eos: whether to end every document with EOS.
    """

    name: str
    key: str
    config: SourceConfig
    store: Artifacts
    cache_dir: Path
    blocks: BlockMirror
    bos: bool | None
    eos: bool

    @property
    def folder(self) -> Path:
        """Local folder of the token caches."""
        return self.store.folder

    @property
    def mirror(self) -> Path:
        """Folder with copies of remote files."""
        return self.cache_dir / "mirror"

    def has(self, split: str) -> bool:
        """Tells whether the source has data for the split."""
        return self.config.has(split)

    def check(self, *, caches: bool = True) -> None:
        """Looks up the files, remote ones included. Writes and copies nothing.

        Args:
            caches: also compare existing caches with the files, which reads those that are local.

        Raises:
            ConfigError: a file is missing, a key has no effect, or an existing cache was built from other text or with
                other options.
        """
        self.store.check()
        splits = {
            split: [source for item in self._listed(split) for source in item.sources] for split in (TRAIN, VALIDATION)
        }
        self._check_records([source for sources in splits.values() for source in sources])
        for split, sources in splits.items() if caches else ():
            # Comparing needs the content. Sources that are not copied yet are compared when the cache is opened.
            if sources and (self.folder / split).exists() and all(source.is_local(self.mirror) for source in sources):
                self._check_cache(split)

    def files(self, split: str, log: Log = print) -> list[TextFile]:
        """The files of a split. Remote files are copied first."""
        return self._files(self._listed(split), log, {})

    def identified(self, split: str, log: Log = print) -> list[TextFile]:
        """The files of a split, for their names and digests. Remote files are only copied if their content is unknown."""
        listed = self._listed(split)
        known = self._known(listed)
        files = self._files(listed, log, known)
        file_digests(files)  # several at once
        new = {file.identity: file.digest for file in files if file.identity and file.identity not in known}
        TextLedger(self.store).add(new, log)
        return files

    def documents(self, split: str, log: Log = print) -> Iterator[str]:
        """The text of the files of a split."""
        for file in self.files(split, log):
            yield from self.config.format.texts(file)

    def content(self) -> dict[str, Any]:
        """The identity of the training data, by content, as plain JSON."""
        files = file_digests(self.identified(TRAIN))
        return {
            "train_files": len(files),
            "train_content": hashlib.sha256("".join(files.values()).encode()).hexdigest(),
            "text_key": self._text_key,
            **self.config.format.cache_key(),
        }

    @property
    def _bos(self) -> bool | None:
        """Tells whether documents begin with BOS; None for what the tokenizer itself does."""
        return True if self.bos is None and self.config.format.bos_policy != "prompt" else self.bos

    def begin(self, tokenizer: Tokenizer | None) -> bool | list[int]:
        """Tells whether documents begin with BOS, or the other ids that the tokenizer itself puts in front of a text.

        Args:
            tokenizer: None for one that is to be trained.
        """
        if self._bos is not None or tokenizer is None:
            return self._bos is not False
        ids = tokenizer.ids_before(bos=None)
        return bool(ids) if ids in ((), (tokenizer.bos_id,)) else list(ids)

    def describe_begin(self, tokenizer: Tokenizer | None) -> str:
        """Says what documents begin with, and why. Args: tokenizer: None for one that is to be trained."""
        bos_policy = self.config.format.bos_policy
        if bos_policy == "template":
            return "begin as the chat template writes them"
        if bos_policy == "ids":
            return "begin with the ids that are given"
        begin = self.begin(tokenizer)
        ids = [] if begin is False or tokenizer is None else tokenizer.ids_before(bos=self._bos)
        names = "BOS" if begin is True else tokenizer.decode(ids, special=True) if tokenizer and ids else "no BOS"
        if self.bos is not None:
            return f"begin with {names} (data.enforce_bos: {str(self.bos).lower()})"
        if bos_policy == "text":
            return f"begin with {names} (as plain text does without data.enforce_bos)"
        if tokenizer is None or tokenizer.text_prefix is None:
            return f"begin with {names} (the tokenizer was trained here; data.enforce_bos is null)"
        return f"begin with {names}, as the tokenizer itself begins a text (data.enforce_bos is null)"

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        return self.config.format.encoder(tokenizer, bos=self._bos, eos=self.eos, key=f"{self.key}.format")

    def rendering(self, split: str, tokenizer: Tokenizer, before: Mapping[str, Any] | None) -> dict[str, Any]:
        """Identifies what renders a split's messages. Texts stay what they are, so that their key is what it was `before`."""
        now = self.encoder(tokenizer).cache_key()
        kept = {} if before is None else {name: before[name] for name in RENDERING if name in before}
        if before is None or kept == now:
            return now
        try:
            files = self._files(self._listed(split), lambda _: None, {})
            return now if renders_messages(self.config.format, files) else kept
        except ConfigError:  # nobody can tell without the records
            return now

    def preview(self, tokenizer: Tokenizer, seq_len: int, *, copies: Log | None = None) -> MaskPreview | None:
        """Shows what the loss is computed on in the first training records; None for a format without a loss mask.

        Args:
            copies: logs what is copied from other machines; None copies nothing, and returns None for such text.

        Raises:
            ConfigError: a record cannot be read, or the loss would be computed on no token of the source.
        """
        if not self.config.format.has_loss_mask or not self.has(TRAIN):
            return None
        files = self.local_files(TRAIN) if copies is None else self._files(self._listed(TRAIN), copies, {})
        if files is None:
            return None
        truncation = self.config.format.overlong
        return preview_masks(self.encoder(tokenizer), files, tokenizer, seq_len, truncation=truncation, key=self.key)

    def local_files(self, split: str) -> list[TextFile] | None:
        """The files of a split, if none of them is to be copied from another machine."""
        listed = self._listed(split)
        is_here = all(source.is_local(self.mirror) for item in listed for source in item.sources)
        return self._files(listed, lambda _: None, {}) if is_here else None

    def describe_records(self, split: str, tokenizer: Tokenizer) -> str | None:
        """Says how the records of a split are read, and which keys are not; None also for files of other machines."""
        return describe_records(self.config.format, tokenizer, self.local_files(split) or (), self._text_key)

    def is_tokenized(self, split: str) -> bool:
        """Tells whether the token cache of the split exists, here or at the URL."""
        return (self.folder / split).exists() or find_blocks(self.store, split, self.blocks) is not None

    def open_cache(
        self,
        split: str,
        tokenizer: Tokenizer,
        log: Log,
        *,
        separate_cache: bool = False,
        workers: Workers = LOCAL_WORKERS,
    ) -> TokenCache:
        """Opens the token cache of a split. If it does not exist, `workers` tokenize the text first.

        Args:
            separate_cache: use a cache folder named after the cache key.

        Raises:
            ConfigError: the data cannot be tokenized, or the existing cache was built from something else.
        """
        encoder = self.encoder(tokenizer)
        made_from = cache_key(self.identified(split, log), tokenizer, bos=self.begin(tokenizer), eos=self.eos)
        given = self.folder / split
        before = TOKEN_CACHE.at(given).made_from if given.exists() and not separate_cache else None
        rendering = self.rendering(split, tokenizer, before)
        made_from = {**made_from, **self.config.format.cache_key(), **rendering}
        for name, value in made_from.items():
            note(f"{self.key}, {split} text, {name}", json.dumps(value), evaluates=split == VALIDATION)
        store = self.store.child(f"evaluate/{digest(made_from)}") if separate_cache else self.store
        log = self.log_with_name(log)
        cache = open_in_store(store, split, made_from, self.blocks, log)
        if cache is not None:
            return cache
        make = lambda made: build_cache(made, self.files(split, log), encoder, made_from, log, workers)  # noqa: E731
        cache = store.open_or_make(TOKEN_CACHE, made_from, make, log, name=split)
        share_sums(store, split, log)
        return cache

    def describe_cache(self, split: str) -> str:
        """Says what a start will do about the token cache of the split. Asks the store, and writes nothing.

        Raises:
            ConfigError: the store cannot be read, or the cache there is damaged.
        """
        return describe_cache(self.store, split, self.blocks)

    def log_with_name(self, log: Log) -> Log:
        """`log` with the source's name, if it has one, before every line."""
        return (lambda line: log(f"{self.name} {line}")) if self.name else log

    def provenance(self, split: str, cache: TokenCache) -> Provenance:
        """Says which URL of the split each token of an open cache came from."""
        listed = list({item.url: item for item in reversed(self._listed(split))}.values())[::-1]
        known = self._known(listed)
        files_until = [len(self._files(listed[: n + 1], print, known)) for n in range(len(listed))]
        return make_provenance(cache, [item.url for item in listed], files_until)

    def _listed(self, split: str) -> list[ListedUrl]:
        return self.config.list_urls(split, self.key, self.mirror, self.cache_dir)

    def _files(self, listed: list[ListedUrl], log: Log, known: Mapping[str, str]) -> list[TextFile]:
        """Args: known: digests by identity, of files that are not copied."""
        return open_files([(item.key, item.sources) for item in listed], self._text_key, self.mirror, log, known)

    def _known(self, listed: list[ListedUrl]) -> dict[str, str]:
        identities = {source.identity for item in listed for source in item.sources if source.identity}
        return TextLedger(self.store).known(identities) if identities else {}

    @property
    def _text_key(self) -> str:
        return self.config.format.key_of_text(self.config.text_key) or self.config.text_key

    def _check_records(self, sources: list[DataSource]) -> None:
        record_format = self.config.format
        for source in sources:
            if not record_format.can_read(source.name) and not (
                source.has_records and record_format.can_read("x.jsonl")
            ):
                raise ConfigError(
                    f"{self.key}.format: {record_format.get_choice_name(type(record_format))} given, but"
                    f" '{source.name}' cannot hold records of this format. Choose another format, or remove the file"
                )
        if self._text_key == DEFAULT_TEXT_KEY:
            return
        key = record_format.key_of_text(self.config.text_key)
        if key is None or key != self.config.text_key != DEFAULT_TEXT_KEY:
            raise ConfigError(
                f"{self.key}.text_key: '{self.config.text_key}' has no effect with this format. Remove it"
            )
        if not any(source.has_records for source in sources):
            raise ConfigError(
                f"{self.key}.text_key: '{self._text_key}' given, but no file is .jsonl, .json, .parquet or .arrow;"
                " other files have no keys. Remove it"
            )

    def _check_cache(self, split: str) -> None:
        """Compares the parts of the cache key that need no tokenizer; opening the cache compares the rest."""
        before = TOKEN_CACHE.at(self.folder / split).made_from
        files = file_digests(self.files(split))
        now = {**before, "enforce_eos": self.eos, "files": files}
        if self._bos is not None:
            now["enforce_bos"] = self._bos
        if "text_key" in before:
            now["text_key"] = self._text_key
        now |= {"format": None} if "format" in before else {}
        now |= self.config.format.cache_key()
        TOKEN_CACHE.check_key(self.folder / split, before, now)


def truncations(sources: Sequence[NamedSource]) -> dict[str, list[str]]:
    """The part of the identity of training data that says in which sources documents do not keep their beginnings if they
    are too long."""
    named = {how: [s.name for s in sources if s.config.format.overlong == how] for how in _NOT_USUAL}
    return {how: names for how, names in named.items() if names}
