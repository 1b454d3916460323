"""Generated records instead of files: `data.source` names a class, of `data/sources/tasks/` or in your own package.

The records are written once to <cache_dir>/mirror/<hash of config and version>/<split>.jsonl and then read like any other
file, so formats, tokenization, interruption and resumption work the same way.
"""

import abc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draccus

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import atomic_file, remove_leftovers
from jaxlm.data.base import Log
from jaxlm.data.cache.cache_dir import disk_full_errors
from jaxlm.data.sources.mirror import MirroredSource, copy_folder_name
from jaxlm.reading.decode import encode


@dataclass(frozen=True)
class CorpusConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.data.sources.tasks"):
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
        remove_leftovers(copy)
        number = 0
        with disk_full_errors(copy), atomic_file(copy) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
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
