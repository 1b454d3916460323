"""Reads records with several keys from files, for formats that need more than one text per record."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm.core.errors import ConfigError
from jaxlm.data.sources.compression import damaged_file_errors
from jaxlm.data.sources.document_files import format_of, json_values, open_arrow, parquet_batches

if TYPE_CHECKING:
    import pyarrow as pa

_WITH_TEXT = {str, dict, list}


class Record(NamedTuple):
    """A record.

    Attributes:
        where: file and line, record or row, for messages.
        values: key -> value; of a table, only the requested columns, or all.
        position: how many bytes of the file have been read after this record.
    """

    where: str
    values: dict[str, Any]
    position: int


def read_records(path: Path, keys: Sequence[str] | None, optional: Sequence[str] = ()) -> Iterator[Record]:
    """The records of a file.

    Args:
        keys: the columns to read from a table, None for all; other files yield whole records.
        optional: more columns to read, if the table has them.

    Raises:
        ConfigError: the file has no records, is damaged, or lacks a column. The message names the position in the file.
    """
    reader = _READERS.get(format_of(path.name) or "")
    if reader is None:
        raise ConfigError(f"{path}: expected a file of records ({', '.join(_READERS)})")
    return reader(path, keys, optional)


def _json(path: Path, keys: Sequence[str] | None, optional: Sequence[str]) -> Iterator[Record]:
    for where, value, position in json_values(path):
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {where}: expected a record with keys, got {value!r:.80}")
        _check_unicode(
            f"{path}: {where}", value if keys is None else {key: value.get(key) for key in (*keys, *optional)}
        )
        yield Record(f"{path}: {where}", value, position)


def _parquet(path: Path, keys: Sequence[str] | None, optional: Sequence[str]) -> Iterator[Record]:
    import pyarrow as pa

    with damaged_file_errors(path, lambda: "while it was read", pa.ArrowException):
        yield from _rows(path, keys, optional, parquet_batches(path, None if keys is None else [*keys, *optional]))


def _arrow(path: Path, keys: Sequence[str] | None, optional: Sequence[str]) -> Iterator[Record]:
    import pyarrow as pa

    with damaged_file_errors(path, lambda: "while it was read", pa.ArrowException), pa.memory_map(str(path)) as source:
        yield from _rows(path, keys, optional, open_arrow(source)[1])


def _rows(
    path: Path, keys: Sequence[str] | None, optional: Sequence[str], batches: Iterator[tuple["pa.RecordBatch", int]]
) -> Iterator[Record]:
    row = 0
    for batch, position in batches:
        wanted = batch.schema.names if keys is None else keys
        missing = [key for key in wanted if key not in batch.schema.names]
        if missing:
            raise ConfigError(f"{path}: no column '{missing[0]}'. The file has: {', '.join(batch.schema.names)}")
        columns = [*wanted, *(key for key in optional if key in batch.schema.names and key not in wanted)]
        for values in _values(path, batch.select(columns), row):
            row += 1
            yield Record(f"{path}: row {row}", values, position)


def _values(path: Path, batch: "pa.RecordBatch", rows_before: int) -> Iterator[dict[str, Any]]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        yield from _one_by_one(path, batch, rows_before)  # to find the row


def _one_by_one(path: Path, batch: "pa.RecordBatch", rows_before: int) -> Iterator[dict[str, Any]]:
    for number in range(len(batch)):
        try:
            yield from batch.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: row {rows_before + number + 1}: not UTF-8 text ({error.reason} at offset {error.start}). Convert"
                " the text to UTF-8, or remove such rows from the file"
            ) from error


def _check_unicode(where: str, value: Any) -> None:
    """Raises `ConfigError` for half of a surrogate pair, which JSON can escape. `value` is JSON."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where}: the text is not valid Unicode: {value[error.start]!a} at character {error.start}"
            ) from error
    elif isinstance(value, (dict, list)):
        parts = value.values() if isinstance(value, dict) else value
        if not _WITH_TEXT.isdisjoint(map(type, parts)):  # no call for each of a million token ids
            for part in parts:
                _check_unicode(where, part)


_READERS: dict[str, Callable[[Path, Sequence[str] | None, Sequence[str]], Iterator[Record]]] = {
    ".jsonl": _json,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
