"""The configuration of one source: files, a Hugging Face dataset, or records that a class of yours or a task generates.

Generated records (`data.source` names a class, of `data/sources/tasks/` or in your own package) are written once to
<cache_dir>/mirror/<hash of config and version>/<split>.jsonl and then read like any other file, so formats, tokenization,
interruption and resumption work the same way.
"""

import abc
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import draccus

from jaxlm.core.errors import ConfigError, counted
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.rules import Rules, excludes, only
from jaxlm.core.safe_io import atomic_file
from jaxlm.data.base import TRAIN, VALIDATION, DataSource, Log
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.documents import TextFormat
from jaxlm.data.sources.files import LocalFile, sources_of
from jaxlm.data.sources.hugging_face import HubDataset, is_saved_dataset, saved_files, saved_split, saved_splits
from jaxlm.data.sources.mirror import MirroredSource, copy_folder_name
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import encode
from jaxlm.reading.effects import OWN, Effect, field


def dataset_sources(
    dataset_id: str, name: str | None, split: str, stream: bool, mirror: Path, *, key: str, named: str, advice: str
) -> Sequence[DataSource]:
    """The sources of one split of a dataset. Asks the Hub unless the dataset is local or mirrored.

    Args:
        dataset_id: id on the Hub, or a folder.
        key: config path of the section with the id (`data`), for messages.
        named: config path and value of the split (`data.split: 'train'`), for messages.
        advice: what else to do about a split that does not exist.

    Raises:
        ConfigError: the dataset or split does not exist, or the Hub does not respond.
    """
    folder = Path(os.path.expanduser(dataset_id))
    splits = saved_splits(folder)
    if splits or is_saved_dataset(folder):
        if name is not None:
            raise ConfigError(
                f"{key}.name: has no effect on {folder}: a saved dataset has a single configuration. Remove it"
            )
        _check_split(dataset_id, split, splits or [saved_split(folder) or "train"], named, advice)
        saved = saved_files(folder / split if splits else folder, f"{key}.id")
        return [LocalFile(path.name, path) for path in saved]
    options = (("split", split),) if name is None else (("name", name), ("split", split))
    url = f"hf:{dataset_id}?{'&'.join(f'{option}={value}' for option, value in options)}"
    dataset = HubDataset(url, f"{key}.id", dataset_id, options, stream)
    if available := dataset.check(mirror):
        _check_split(dataset_id, split, available, named, advice)
    return [dataset]


def _check_split(dataset_id: str, split: str, available: Sequence[str], named: str, advice: str) -> None:
    if split not in available:
        raise ConfigError(f"{named}, but {dataset_id} has no such split. Choose one of: {', '.join(available)}{advice}")


@dataclass(frozen=True)
class CorpusConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A class that generates records: `type: arithmetic`, `type: my_package.my_module:MyCorpus`, or a name registered by a
    plugin."""

    @property
    @abc.abstractmethod
    def splits(self) -> Sequence[str]:
        """The splits the corpus has: `train`, `validation`, or both."""

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """Must change whenever the records change for the same config keys; the records are then generated again."""

    @abc.abstractmethod
    def records(self, split: str) -> Iterator[Mapping[str, Any]]:
        """The records of a split, as JSON-serializable mappings, in deterministic order.

        Raises:
            OSError, ConfigError: the records cannot be generated.
        """


@dataclass(frozen=True)
class CorpusSource(MirroredSource):
    """A split (`train` or `validation`) of a `CorpusConfig`. `key` is its config path, for messages."""

    corpus: CorpusConfig
    split: str
    key: str

    @property
    def name(self) -> str:
        return f"{self.split}.jsonl"

    def _copy_path(self, mirror: Path) -> Path:
        identity = json.dumps({**encode(self.corpus), "version": self.corpus.version}, sort_keys=True)
        return mirror / copy_folder_name(identity) / self.name

    def _make_copy(self, copy: Path, log: Log) -> None:
        number = 0
        with atomic_file(copy) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
            for number, record in enumerate(self.corpus.records(self.split), start=1):
                file.write(f"{self._line(record, number)}\n")
        log(f"mirror: {self.key}: wrote {number:,} records of {self.split} to {copy}")

    def _line(self, record: Mapping[str, Any], number: int) -> str:
        try:
            return json.dumps(dict(record), ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.key}: record {number} of {self.split} is {record!r:.80}; expected a mapping of keys to JSON values"
                f" ({error})"
            ) from error


DEFAULT_TEXT_KEY = "text"
_RESERVED = (TRAIN, VALIDATION, "tokenizer", "mirror", "evaluate")


class ListedUrl(NamedTuple):
    """A configured URL and the sources it resolves to.

    Attributes:
        key: config path of the URL (`data.train_urls[0]`), for messages.
        url: the URL as written; for an `id`, `<id>/<split>`.
        sources: what it resolves to, in reading order.
    """

    key: str
    url: str
    sources: Sequence[DataSource]


@dataclass(frozen=True)
class SourceConfig:
    """A source of training and validation text.

    Attributes:
        train_urls: files, folders and globs to train on (.txt, .py, .jsonl, .json, .parquet, .arrow; all but the last two
            also compressed), local or behind any fsspec URL (`s3://`, `https://`, ...); `hf:ID?name=..&split=..` for a
            dataset on the Hugging Face Hub; `stdlib:train` for the source files of Python's standard library.
        validation_urls: the same for validation; `stdlib:validation` holds the files that `stdlib:train` leaves out.
        num_validation_files: hold the last files of `train_urls` out of training, and evaluate on them unless there are
            `validation_urls`. An `hf:` dataset counts as one file.
        cache_dir: folder or URL of this source's token caches; null means `<data.cache_dir>/<source name>`.
        text_key: key of the text in each record (.jsonl, .json), or column of the text (.parquet, .arrow).
        format: format of the records: plain text, chat conversations, prompts with completions, or token ids.
        tags: groups this source belongs to in evaluation, logged as `eval/<tag>/loss` and `eval/<tag>/bpb`.
        id: a dataset on the Hugging Face Hub, or a folder written by `save_to_disk`; use it instead of `train_urls`.
        name: configuration of the dataset `id`, if it has several.
        split: split of the dataset `id` to train on.
        validation_split: split of the dataset `id` to validate on if `validation_urls` is empty; null means no validation
            data from the dataset.
        stream: stream the rows of the dataset `id` straight into `<cache_dir>/mirror/`, instead of first downloading it
            to the cache of the `datasets` library.
        source: a class that generates the records; use it instead of `train_urls`: `{type: arithmetic}`, `{type: spelling}`,
            or one of your own, `{type: "my_package.my_module:MyCorpus"}`.
    """

    train_urls: list[str] = field(default_factory=list, on_resume="content")
    validation_urls: list[str] = field(default_factory=list, on_resume="evaluations")
    num_validation_files: PositiveInt | None = field(None, on_resume="content")
    cache_dir: str | None = field(None, on_resume="harmless")
    text_key: str = field(DEFAULT_TEXT_KEY, on_resume="content")
    format: FormatConfig = field(default_factory=TextFormat, on_resume="content")
    tags: list[str] = field(default_factory=list, on_resume="evaluations")
    id: str | None = field(None, on_resume="content")
    name: str | None = field(None, on_resume="content")
    split: str = field(TRAIN, on_resume="content")
    validation_split: str | None = field(VALIDATION, on_resume="evaluations")
    stream: bool = field(False, on_resume="content")
    source: CorpusConfig | None = field(None, on_resume="content")

    key_rules: ClassVar[Rules] = (
        excludes("train_urls", "id", "source", why="and a source has one of them"),
        only("num_validation_files", when="train_urls"),
        only("name", "split", "stream", "validation_split", when="id"),
    )
    keys_effect: ClassVar[Effect] = OWN
    """Of a key that states none: one of a class outside jaxlm."""

    def has(self, split: str) -> bool:
        """Tells whether the source has data for the split."""
        if split == VALIDATION and (self.validation_urls or self.num_validation_files):
            return True
        if self.id is not None:
            return split == TRAIN or self.validation_split is not None
        if self.source is not None:
            return split in self.source.splits
        return split == TRAIN and bool(self.train_urls)

    @property
    def by_default(self) -> str:
        """Says that validation data is there by default, for messages; empty if a key asks for it."""
        asks = self.id is None or self.validation_urls or self.validation_split != VALIDATION
        return "" if asks else f" (validation_split: '{VALIDATION}' is the default; null means none)"

    def list_urls(self, split: str, key: str, mirror: Path, cache: Path) -> list[ListedUrl]:
        """Resolves the URLs of a split. Copies nothing.

        Args:
            key: config path of this section (`data.configs.wiki`).
            mirror: folder for copies of remote files.
            cache: a folder whose files are not text.

        Raises:
            ConfigError: nothing matches.
        """
        held_out = self.num_validation_files
        if held_out is not None and (split == TRAIN or not self.validation_urls):
            listed = _list(self.train_urls, f"{key}.train_urls", mirror, cache)
            return _hold_out(listed, held_out, split, f"{key}.num_validation_files", mirror)
        urls = {TRAIN: self.train_urls, VALIDATION: self.validation_urls}[split]
        if urls or not self.has(split):
            return _list(urls, f"{key}.{split}_urls", mirror, cache)
        if self.source is not None:
            where = f"{key}.source"
            return [ListedUrl(where, where, [CorpusSource(self.source, split, where)])]
        assert self.id is not None, "has() is false without an id"
        option = "split" if split == TRAIN else "validation_split"
        dataset_split = getattr(self, option) or ""
        sources = dataset_sources(
            self.id,
            self.name,
            dataset_split,
            self.stream,
            mirror,
            key=key,
            named=f"{key}.{option}: {dataset_split!r}",
            advice="" if split == TRAIN else ", or null for no validation data",
        )
        return [ListedUrl(f"{key}.id", f"{self.id}/{dataset_split}", sources)]


def _list(urls: Sequence[str], key: str, mirror: Path, cache: Path) -> list[ListedUrl]:
    keys = [f"{key}[{n}]" for n in range(len(urls))]
    return [ListedUrl(k, url, sources_of(url, k, mirror, cache)) for k, url in zip(keys, urls, strict=True)]


def _hold_out(listed: list[ListedUrl], count: int, split: str, key: str, mirror: Path) -> list[ListedUrl]:
    """Returns what is left of some URLs for a split, if the last `count` of their files are for validation.

    Raises:
        ConfigError: no file would be left to train on.
    """

    def identity(source: DataSource) -> object:
        """Equal for a file that is listed twice."""
        if source.is_local(mirror):
            return tuple(path.resolve() for _, path in source.paths(mirror))
        return source.identity or source

    files = list(dict.fromkeys(identity(source) for item in listed for source in item.sources))
    if count >= len(files):
        raise ConfigError(
            f"{key}: {count} given, but train_urls lists {counted(len(files), 'file')}. Give fewer, so that"
            " some are left to train on"
        )
    chosen = set(files[-count:] if split == VALIDATION else files[:-count])
    kept = [item._replace(sources=[s for s in item.sources if identity(s) in chosen]) for item in listed]
    return [item for item in kept if item.sources]


def check_source_names(names: Iterable[str]) -> None:
    """Raises `ConfigError` for a name that cannot be a source's, whose caches are in a folder of that name."""
    for name in names:
        if not name.replace("_", "").replace("-", "").replace(".", "").isalnum() or name in _RESERVED:
            raise ConfigError(
                f"data.configs: '{name}' is not a valid source name. Use letters, digits, '_', '-' and '.'; reserved:"
                f" {', '.join(_RESERVED)}"
            )
