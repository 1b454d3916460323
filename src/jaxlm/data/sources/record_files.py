"""From a file to its records, where more than one text of each is wanted."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm.core.errors import ConfigError
from jaxlm.data.sources.compression import damage_named, opened
from jaxlm.data.sources.document_files import arrow_batches, decoded, format_of, is_arrow_file, parquet_batches, parsed

if TYPE_CHECKING:
    import pyarrow as pa


class Record(NamedTuple):
    """A record.

    Attributes:
        where: file and line, record or row, for messages.
        values: by key; of a table's row, only what was asked for.
        position: bytes of the file that are read by then.
    """

    where: str
    values: dict[str, Any]
    position: int


def read_records(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    """The records of a file.

    Args:
        keys: of what is wanted; the columns, of a table.

    Raises:
        ConfigError: a file without records, damaged, or without these columns; names the place in it.
    """
    reader = _READERS.get(format_of(path.name) or "")
    if reader is None:
        raise ConfigError(f"{path}: records expected ({', '.join(_READERS)}); this file has none")
    return reader(path, keys)


def _json_lines(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    del keys
    number = 0
    with opened(path) as (stream, position), damage_named(path, lambda: f"line {number + 1}"):
        for line in stream:
            number += 1
            where = f"line {number}: "
            text = decoded(path, line, where)
            if not text.isspace():
                yield _record(path, f"line {number}", parsed(path, text, where), position())


def _json(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    del keys
    with opened(path) as (stream, position), damage_named(path, lambda: "while it was read"):
        text = decoded(path, stream.read(), "")
        end = position()
    content = parsed(path, text, "") if text.strip() else []
    records = content if isinstance(content, list) else [content]
    for number, record in enumerate(records, start=1):
        yield _record(path, f"record {number}", record, end * number // len(records))


def _record(path: Path, where: str, found: Any, position: int) -> Record:
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {where}: a record with keys expected, {found!r:.80} given")
    return Record(f"{path}: {where}", found, position)


def _parquet(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    import pyarrow as pa

    with damage_named(path, lambda: "while it was read", pa.ArrowException):
        yield from _rows(path, keys, parquet_batches(path, keys))


def _arrow(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    import pyarrow as pa

    with damage_named(path, lambda: "while it was read", pa.ArrowException), pa.memory_map(str(path)) as source:
        is_file = is_arrow_file(source)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        yield from _rows(path, keys, arrow_batches(reader, source, is_file))


def _rows(path: Path, keys: Sequence[str], batches: Iterator[tuple["pa.RecordBatch", int]]) -> Iterator[Record]:
    row = 0
    for batch, position in batches:
        missing = [key for key in keys if key not in batch.schema.names]
        if missing:
            raise ConfigError(f"{path}: no column '{missing[0]}'. Its columns: {', '.join(batch.schema.names)}")
        for values in batch.select(list(keys)).to_pylist():
            row += 1
            yield Record(f"{path}: row {row}", values, position)


_READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[Record]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
