"""What the keys of one source say: files, a dataset of Hugging Face, or records that a program makes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jaxlm.core.errors import ConfigError
from jaxlm.data.base import DataSource
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.text import TextFormat
from jaxlm.data.sources.corpus import CorpusConfig, CorpusSource
from jaxlm.data.sources.files import list_sources
from jaxlm.data.sources.named_dataset import NamedDataset

TRAIN, VALIDATION = "train", "validation"
USUAL_TEXT_KEY = "text"
USUAL_SPLITS = {TRAIN: "train", VALIDATION: "validation"}


class ListedUrl(NamedTuple):
    """What one key or URL means.

    Attributes:
        key: where it is configured (`data.train_urls[0]`), for messages.
        url: as people know it.
        sources: in their order.
    """

    key: str
    url: str
    sources: Sequence[DataSource]


@dataclass(frozen=True)
class SourceConfig:
    """A source of text.

    Attributes:
        train_urls: files, folders and globs of .txt, .py, .jsonl, .json, .parquet and .arrow, also compressed; the same
            behind `s3://`, `https://` and whatever else fsspec reads; `hf:ID?name=..&split=..` for a dataset of the Hugging
            Face hub; `stdlib:train` for Python's standard library.
        validation_urls: the same, to evaluate on; `stdlib:validation` holds what `stdlib:train` leaves out.
        cache_dir: its token caches; null keeps them below `data.cache_dir`, under the source's name.
        text_key: the key of the text in records (.jsonl, .json), and its column in tables (.parquet, .arrow).
        format: what its records are: text, chats, prompts with completions, or token ids.
        tags: groups that it is evaluated with, as `eval/<tag>/loss` and `eval/<tag>/bpb`.
        id: a dataset of the Hugging Face hub instead of `train_urls`, or a folder that `save_to_disk` has written.
        name: which configuration of it, where it has several.
        split: which of its splits to train on.
        validation_split: which to evaluate on, where there are no `validation_urls`; null evaluates on none.
        stream: read its rows one after another into the cache, without a copy in the library's own cache first.
        source: records of a class of one's own package instead of `train_urls`: `{type: "my_package.my_module:MyCorpus"}`.
    """

    train_urls: list[str] = field(default_factory=list)
    validation_urls: list[str] = field(default_factory=list)
    cache_dir: str | None = None
    text_key: str = USUAL_TEXT_KEY
    format: FormatConfig = field(default_factory=TextFormat)
    tags: list[str] = field(default_factory=list)
    id: str | None = None
    name: str | None = None
    split: str = USUAL_SPLITS[TRAIN]
    validation_split: str | None = USUAL_SPLITS[VALIDATION]
    stream: bool = False
    source: CorpusConfig | None = None

    def has(self, split: str) -> bool:
        """Whether there is anything to train on, or to evaluate on."""
        if split == VALIDATION and self.validation_urls:
            return True
        if self.id is not None:
            return split == TRAIN or self.validation_split is not None
        if self.source is not None:
            return split in self.source.splits
        return split == TRAIN and bool(self.train_urls)

    def listed(self, split: str, key: str, mirror: Path, cache: Path) -> list[ListedUrl]:
        """What its keys mean. Nothing is copied.

        Args:
            key: of the section that it is (`data.configs.wiki`).
            mirror, cache: see `list_sources`.

        Raises:
            ConfigError: what is not there, and keys that contradict each other or have no effect.
        """
        self._check_keys(key)
        urls = {TRAIN: self.train_urls, VALIDATION: self.validation_urls}[split]
        if urls or not self.has(split):
            where = f"{key}.{split}_urls"
            found = list_sources(urls, where, mirror, cache)
            return [ListedUrl(f"{where}[{n}]", *pair) for n, pair in enumerate(zip(urls, found, strict=True))]
        if self.source is not None:
            where = f"{key}.source"
            return [ListedUrl(where, where, [CorpusSource(self.source, split, where)])]
        assert self.id is not None, "otherwise it does not have the split"
        wanted = {TRAIN: self.split, VALIDATION: self.validation_split or ""}[split]
        split_key = {TRAIN: f"{key}.split", VALIDATION: f"{key}.validation_split"}[split]
        dataset = NamedDataset(self.id, self.name, wanted, self.stream, key, split_key)
        sources = dataset.sources(mirror)
        return [ListedUrl(f"{key}.id", f"{self.id}/{wanted}", sources)]

    def _check_keys(self, key: str) -> None:
        given = [name for name in ("train_urls", "id", "source") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(
                f"{key}.{given[1]}: given beside {key}.{given[0]}. A source is one of them; leave one out"
            )
        usual = {"name": None, "split": USUAL_SPLITS[TRAIN], "stream": False}
        for name, default in (usual | {"validation_split": USUAL_SPLITS[VALIDATION]}).items():
            if self.id is None and getattr(self, name) != default:
                raise ConfigError(f"{key}.{name}: has no effect without {key}.id, the dataset that it is of")
