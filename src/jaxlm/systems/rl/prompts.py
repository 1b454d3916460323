"""The prompts of rollouts: their tokens are in a token cache, and what rewards read beside them in the records."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError, listed
from jaxlm.core.field_types import is_float32, what_float32_needs
from jaxlm.data.base import TRAIN, Log
from jaxlm.data.batch import Columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.examples import ContiguousExamples, Examples
from jaxlm.data.sources.named import NamedSource
from jaxlm.data.sources.record_files import Record, TextFile
from jaxlm.systems.rl.rewards.base import Rewards

_FIRST = 1000  # records of each source that are read before the start


class Prompts(ContiguousExamples):
    """The prompts of a token cache, each of which is a document.

    A sequence has room for `max_new_tokens` after its prompt. Longer prompts are left out or refused.
    """

    def __init__(self, cache: TokenCache, seq_len: int, max_new_tokens: int, *, leave_out_long: bool):
        self.cache, self.seq_len = cache, seq_len
        sizes = np.diff(cache.offsets)
        fits = sizes + max_new_tokens <= seq_len
        (self._documents,) = np.nonzero(fits)
        self._num_long = int((~fits).sum())
        self._mean_size = float(sizes[fits].mean()) if fits.any() else 0.0
        if self._num_long and not leave_out_long:
            at = int(np.argmin(fits))
            raise ConfigError(
                f"data.max_new_tokens: {max_new_tokens} given, but the prompt of {sizes[at]:,} tokens in"
                f" {cache.source_of(int(cache.offsets[at]))} leaves room for {max(0, seq_len - int(sizes[at])):,} in"
                f" model.seq_len ({seq_len:,}); {self._num_long:,} of {len(sizes):,} prompts are too long. Lower"
                " max_new_tokens, raise model.seq_len, or leave them out: data.long_prompts: leave_out"
            )

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def padding(self) -> float:
        return 1 - self._mean_size / self.seq_len

    @property
    def summary(self) -> str:
        text = f"{len(self):,} prompts of {self._mean_size:.1f} tokens on average"
        return text + (f"; {self._num_long:,} left out: they are too long" if self._num_long else "")

    def starts(self, indices: np.ndarray) -> np.ndarray:
        return self.cache.offsets[self._documents[indices]]

    def read(self, indices: np.ndarray) -> Columns:
        """The tokens of the prompts, int32 [len(indices), seq_len], and 0 after their end."""
        sizes = np.diff(self.cache.offsets)[self._documents[indices]]
        ids = self.cache.read(self.starts(indices), self.seq_len)
        return {"tokens": ids * (np.arange(self.seq_len) < sizes[:, None])}

    def show(self, index: int, tokenizer: Any) -> Iterator[str]:
        yield "a prompt, whose responses are sampled when it is its turn"
        (ids,) = prompt_tokens(self, np.array([index]))
        start = int(self.starts(np.array([index]))[0])
        yield f"--- {self.cache.source_of(start)} ---\n{tokenizer.decode(ids.tolist(), special=True)}"


def prompt_tokens(prompts: Examples, indices: np.ndarray) -> list[np.ndarray]:
    """int32 [tokens] of each prompt. Args: prompts: `Prompts`, or a range of them."""
    cache, numbers = prompts.cache, document_numbers(prompts, indices)
    sizes = np.diff(cache.offsets)[numbers]
    return np.split(cache.read_ranges(cache.offsets[numbers], sizes), np.cumsum(sizes)[:-1])


def document_numbers(prompts: Examples, indices: np.ndarray) -> np.ndarray:
    """int64: the number of each prompt's document in the cache."""
    return np.searchsorted(prompts.cache.offsets, prompts.starts(indices))


def prompt_values(prompts: Examples, records: "PromptRecords", column: str) -> np.ndarray:
    """float64 [prompts]: the number that each prompt's record has under a key."""
    documents = document_numbers(prompts, np.arange(len(prompts))).tolist()
    values = np.zeros(len(documents))
    for row, record in enumerate(records.of(documents, len(prompts.cache.offsets) - 1)):
        values[row] = _number(record, column)
    return values


def _number(record: Record, column: str) -> float:
    """The number that a record has under a key. Args: record: without the prompt."""
    value = record.values.get(column)
    if not isinstance(value, bool) and isinstance(value, int | float) and is_float32(value):
        return value
    is_there = column in record.values
    what = (
        f"has {value!r:.40} there"
        if is_there
        else f"has only {listed(record.values) if record.values else 'nothing'} besides the prompt"
    )
    raise ConfigError(
        f"data.curriculum.column: {column} given, {what_float32_needs(value)} in every record expected, but {record.where}"
        f" {what}. Correct the record, or name another key"
    )


def check_first_records(sources: Sequence[NamedSource], rewards: Rewards, numbers: Sequence[str]) -> None:
    """Raises `ConfigError` if the records on this machine lack a column of a reward, or the first ones have no number.

    The first records of all sources are read before the rest of any: a column may be in one source alone, and each start
    would read the sources before it to their ends, while the other processes wait. Records that are elsewhere are checked
    when they are here.

    Args:
        numbers: columns that must have a number in every record.
    """
    if not (rewards.columns or numbers):
        return
    opened = [_local_records(source) for source in sources]
    local_records = [records for records in opened if records is not None]
    keys: set[str] = set()
    for records in local_records:
        for record in itertools.islice(records, _FIRST):
            if keys >= rewards.columns and not numbers:
                break
            keys |= record.values.keys()
            for column in numbers:
                _number(record, column)
    if len(local_records) < len(opened):
        return
    for record in itertools.chain(*local_records):
        if keys >= rewards.columns:
            break
        keys |= record.values.keys()
    rewards.check_columns(keys)


def _local_records(source: NamedSource) -> Iterator[Record] | None:
    """The records of a source without their prompts. None if some are elsewhere, or its files cannot be listed."""
    try:
        files = source.local_files(TRAIN)
    except ConfigError:  # the check of the source says what is wrong with its files
        return None
    return None if files is None else _without_prompts(source, files)


def _without_prompts(source: NamedSource, files: Iterable[TextFile]) -> Iterator[Record]:
    keys = source.config.format.keys
    for record in (record for file in files for record in file.records(None)):
        yield record._replace(values={key: value for key, value in record.values.items() if key not in keys})


class PromptRecords:
    """Gives what the records of a source have besides the prompt, in the order of the documents of its cache. The first
    access reads all of them into memory.
    """

    def __init__(self, source: NamedSource, log: Log):
        self._source, self._log = source, log
        self._records: list[Record] | None = None

    def of(self, documents: Sequence[int], num_documents: int) -> list[Record]:
        """The records of some documents. Args: num_documents: how many the cache has."""
        records = self._all()
        if len(records) != num_documents:
            raise ConfigError(
                f"{self._source.key}: the files have {len(records):,} records, but there were {num_documents:,} when"
                " their prompts were tokenized. Restore the files, or start a new run with another data.cache_dir"
            )
        return [records[number] for number in documents]

    @property
    def columns(self) -> set[str]:
        """The keys that some record has besides the prompt."""
        return {key for record in self._all() for key in record.values}

    def _all(self) -> list[Record]:
        if self._records is None:
            self._records = list(_without_prompts(self._source, self._source.files(TRAIN, self._log)))
        return self._records
