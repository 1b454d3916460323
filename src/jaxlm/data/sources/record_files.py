"""Reads records with several keys from files, for formats that need more than one text per record."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm.core.errors import ConfigError
from jaxlm.data.sources.compression import damaged_file_errors, open_decompressed
from jaxlm.data.sources.document_files import (
    arrow_batches,
    decode_utf8,
    format_of,
    is_arrow_file,
    parquet_batches,
    parse_json,
)

if TYPE_CHECKING:
    import pyarrow as pa


class Record(NamedTuple):
    """A record.

    Attributes:
        where: file and line, record or row, for messages.
        values: key -> value; of a table, only the requested columns.
        position: how many bytes of the file have been read after this record.
    """

    where: str
    values: dict[str, Any]
    position: int


def read_records(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    """The records of a file.

    Args:
        keys: the columns to read from a table; other files yield whole records.

    Raises:
        ConfigError: the file has no records, is damaged, or lacks a column. The message names the position in the file.
    """
    reader = _READERS.get(format_of(path.name) or "")
    if reader is None:
        raise ConfigError(f"{path}: expected a file of records ({', '.join(_READERS)})")
    return reader(path, keys)


def _json_lines(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    del keys
    number = 0
    with open_decompressed(path) as (stream, position), damaged_file_errors(path, lambda: f"line {number + 1}"):
        for line in stream:
            number += 1
            where = f"line {number}: "
            text = decode_utf8(path, line, where)
            if not text.isspace():
                yield _record(path, f"line {number}", parse_json(path, text, where), position())


def _json(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    del keys
    with open_decompressed(path) as (stream, position), damaged_file_errors(path, lambda: "while it was read"):
        text = decode_utf8(path, stream.read(), "")
        end = position()
    content = parse_json(path, text, "") if text.strip() else []
    records = content if isinstance(content, list) else [content]
    for number, record in enumerate(records, start=1):
        yield _record(path, f"record {number}", record, end * number // len(records))


def _record(path: Path, where: str, value: Any, position: int) -> Record:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {where}: expected a record with keys, got {value!r:.80}")
    return Record(f"{path}: {where}", value, position)


def _parquet(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    import pyarrow as pa

    with damaged_file_errors(path, lambda: "while it was read", pa.ArrowException):
        yield from _rows(path, keys, parquet_batches(path, keys))


def _arrow(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    import pyarrow as pa

    with damaged_file_errors(path, lambda: "while it was read", pa.ArrowException), pa.memory_map(str(path)) as source:
        is_file = is_arrow_file(source)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        yield from _rows(path, keys, arrow_batches(reader, source, is_file))


def _rows(path: Path, keys: Sequence[str], batches: Iterator[tuple["pa.RecordBatch", int]]) -> Iterator[Record]:
    row = 0
    for batch, position in batches:
        missing = [key for key in keys if key not in batch.schema.names]
        if missing:
            raise ConfigError(f"{path}: no column '{missing[0]}'. The file has: {', '.join(batch.schema.names)}")
        for values in batch.select(list(keys)).to_pylist():
            row += 1
            yield Record(f"{path}: row {row}", values, position)


_READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[Record]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
