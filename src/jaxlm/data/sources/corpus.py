"""Records that a program makes, instead of files: `data.source`, for a class of one's own package.

They are written once, into <cache_dir>/mirror/<hash of what makes them>/<split>.jsonl, and read from there like any file: so
formats, tokenizing, kills and resumption are the same as for files.
"""

import abc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draccus

from jaxlm.config.decode import encode
from jaxlm.core.atomic_io import atomic_file, remove_leftovers
from jaxlm.core.errors import ConfigError
from jaxlm.data.base import Log
from jaxlm.data.cache.cache_dir import disk_full_errors
from jaxlm.data.sources.mirror import MirroredSource, folder_of


@dataclass(frozen=True)
class CorpusConfig(draccus.ChoiceRegistry, abc.ABC):
    """A source of records of one's own: `type: my_package.my_module:MyCorpus`, or a name that a plugin registers."""

    @property
    @abc.abstractmethod
    def splits(self) -> Sequence[str]:
        """Which of `train` and `validation` it has."""

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """What is different when the records are, beside the keys of this section: they are made anew then."""

    @abc.abstractmethod
    def records(self, split: str) -> Iterator[Mapping[str, Any]]:
        """The records of a split, one after another, in an order that never changes: values of JSON by key.

        Raises:
            OSError, ConfigError: they cannot be had.
        """


@dataclass(frozen=True)
class CorpusSource(MirroredSource):
    """A split of such a source.

    Attributes:
        corpus: what makes the records.
        split: `train` or `validation`.
        key: of its section, for messages.
    """

    corpus: CorpusConfig
    split: str
    key: str

    @property
    def name(self) -> str:
        return f"{self.split}.jsonl"

    def _place(self, mirror: Path) -> Path:
        made_by = json.dumps({**encode(self.corpus), "version": self.corpus.version}, sort_keys=True)
        return mirror / folder_of(made_by) / self.name

    def _make(self, place: Path, log: Log) -> None:
        remove_leftovers(place)
        number = 0
        with disk_full_errors(place), atomic_file(place) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
            for number, record in enumerate(self.corpus.records(self.split), start=1):
                file.write(f"{self._line(record, number)}\n")
        log(f"mirror: {self.key}: {number:,} records of {self.split}, kept in {place}")

    def _line(self, record: Mapping[str, Any], number: int) -> str:
        try:
            return json.dumps(dict(record), ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.key}: record {number} of {self.split} is {record!r:.80}; keys with values that JSON has are"
                f" expected ({error})"
            ) from error
