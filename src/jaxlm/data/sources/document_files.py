"""From a file to its documents, a piece at a time: text, JSON, and tables of Arrow.

    .txt .py            one document                 .parquet    one a row
    .jsonl              one a line                   .arrow      the same: Arrow IPC, as a file or as a stream
    .json               one, or a list of them       each but .parquet and .arrow also with .gz, .zst, .xz or .bz2

The text of a record is under `data.text_key`. Only a `.txt`, `.py` or `.json` file is ever in memory as a whole.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm.core.errors import ConfigError
from jaxlm.data.sources.compression import COMPRESSIONS, damage_named, opened

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 256  # of a table, made into Python strings at once
_BUFFER = 1 << 20  # bytes; without it, whole columns of a row group are fetched
_ARROW_FILE = b"ARROW1"
ARRAYS = ".npy"  # of token ids: no documents, but found like them where they are named


class Document(NamedTuple):
    """A text, and how many bytes of its file have been read once it is known."""

    text: str
    position: int


def format_of(name: str) -> str | None:
    """The suffix that decides how a file is read (`.jsonl` for `x.jsonl.gz`); None where it cannot be."""
    path = Path(name)
    compressed = path.suffix in COMPRESSIONS
    suffix = Path(path.stem).suffix if compressed else path.suffix
    return suffix if suffix in _READERS and not (compressed and suffix in _TABLES) else None


def has_records(name: str) -> bool:
    """Whether its text is found by a key."""
    return format_of(name) not in (None, ".txt", ".py")


def allowed_suffixes() -> str:
    """For messages."""
    outside = ", ".join(COMPRESSIONS)
    return f"{', '.join(_READERS)}; and compressed by {outside} (but {' and '.join(_TABLES)}, which are so inside)"


def read_documents(path: Path, text_key: str) -> Iterator[Document]:
    """The documents of a file, empty ones among them.

    Raises:
        ConfigError: not UTF-8, damaged, or a record without text; names the file and its byte, line, record or row.
    """
    suffix = format_of(path.name)
    assert suffix is not None, f"{path} should not have been found"
    return _READERS[suffix](path, text_key)


def _text(path: Path, text_key: str) -> Iterator[Document]:
    del text_key
    raw = b""
    with opened(path) as (stream, position), damage_named(path, lambda: "while it was read"):
        raw = stream.read()
        end = position()
    yield Document(decoded(path, raw, ""), end)


def _json_lines(path: Path, text_key: str) -> Iterator[Document]:
    number = 0
    with opened(path) as (stream, position), damage_named(path, lambda: f"line {number + 1}"):
        for line in stream:
            number += 1
            where = f"line {number}: "
            text = decoded(path, line, where)
            if not text.isspace():
                yield Document(_text_of(path, where, parsed(path, text, where), text_key), position())


def _json(path: Path, text_key: str) -> Iterator[Document]:
    with opened(path) as (stream, position), damage_named(path, lambda: "while it was read"):
        text = decoded(path, stream.read(), "")
        end = position()
    if not text or text.isspace():
        return
    content = parsed(path, text, "")
    records = content if isinstance(content, list) else [content]
    for number, record in enumerate(records, start=1):
        yield Document(_text_of(path, f"record {number}: ", record, text_key), end * number // len(records))


def _parquet(path: Path, text_key: str) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row, size = 0, path.stat().st_size
    with (
        damage_named(path, lambda: f"row {row + 1}", pa.ArrowException),
        pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file,
    ):
        _check_column(path, file.schema_arrow, text_key)
        total = max(1, file.metadata.num_rows)
        for group in range(file.num_row_groups):  # all at once, Arrow holds several of them
            for batch in file.iter_batches(_ROWS, [group], [text_key]):
                for text in _texts(path, batch.column(text_key), row, text_key):
                    row += 1
                    yield Document(text, size * row // total)


def _arrow(path: Path, text_key: str) -> Iterator[Document]:
    import pyarrow as pa

    row = 0
    with damage_named(path, lambda: f"row {row + 1}", pa.ArrowException), pa.memory_map(str(path)) as source:
        is_file = is_arrow_file(source)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        _check_column(path, reader.schema, text_key)
        for batch, position in arrow_batches(reader, source, is_file):
            column = batch.column(text_key)
            for start in range(0, len(column), _ROWS):
                for text in _texts(path, column.slice(start, _ROWS), row, text_key):
                    row += 1
                    yield Document(text, position)


def is_arrow_file(source: "pa.NativeFile") -> bool:
    """Whether this is Arrow's format for files, and not that for streams; goes back to its beginning."""
    is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
    source.seek(0)
    return is_file


def parquet_batches(path: Path, columns: Sequence[str]) -> Iterator[tuple["pa.RecordBatch", int]]:
    """Batches of those of the columns that there are, and about how far into the file each reaches."""
    import pyarrow.parquet as pq

    row, size = 0, path.stat().st_size
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
        total = max(1, file.metadata.num_rows)
        wanted = [name for name in file.schema_arrow.names if name in columns]
        for group in range(file.num_row_groups):  # all at once, Arrow holds several of them
            for batch in file.iter_batches(_ROWS, [group], wanted):
                row += len(batch)
                yield batch, size * row // total


def arrow_batches(reader: Any, source: "pa.NativeFile", is_file: bool) -> Iterator[tuple[Any, int]]:
    """Batches, and how far into the file each reaches."""
    if not is_file:
        for batch in reader:
            yield batch, source.tell()
        return
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number), source.size() * (number + 1) // reader.num_record_batches


def _check_column(path: Path, schema: "pa.Schema", text_key: str) -> None:
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if text_key not in schema.names:
        raise ConfigError(f"{path}: no column '{text_key}' (data.text_key). Its columns: {columns}")
    kind = schema.field(text_key).type
    if not _is_text(kind):
        raise ConfigError(f"{path}: column '{text_key}' (data.text_key) holds {kind}, not text. Its columns: {columns}")


def _is_text(kind: "pa.DataType") -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind  # pyright: ignore[reportAttributeAccessIssue]
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _texts(path: Path, column: "pa.Array", rows_before: int, text_key: str) -> Iterator[str]:
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = column  # one by one, to name the row
    for number, value in enumerate(values, start=rows_before + 1):
        try:
            text = value if values is not column else value.as_py()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: row {number}: not UTF-8 text ({error.reason} at offset {error.start})"
            ) from error
        if text is None:
            raise ConfigError(
                f"{path}: row {number}: the text under data.text_key '{text_key}' is null. Leave such rows out of the"
                " file, or name another column"
            )
        yield text


def parsed(path: Path, text: str, where: str) -> Any:
    """JSON, or a `ConfigError` that names the file and `where` in it."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{path}: {where}JSON that is nested too deeply") from error
    except json.JSONDecodeError as error:
        advice = "; with one record a line, its name should end in .jsonl" if error.msg == "Extra data" else ""
        line = f"line {error.lineno}, " if not where else ""
        raise ConfigError(f"{path}: {where}not JSON ({error.msg} at {line}column {error.colno}){advice}") from error
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{path}: {where}not JSON that can be read ({error})") from error


def _text_of(path: Path, where: str, record: Any, text_key: str) -> str:
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(record) if isinstance(record, dict) else "none"
        found = " (it is null)" if isinstance(record, dict) and text_key in record and text is None else ""
        raise ConfigError(f"{path}: {where}no text under data.text_key '{text_key}'{found}. Its keys: {keys}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ConfigError(
            f"{path}: {where}the text is not Unicode: {text[error.start]!a} at character {error.start}"
        ) from error
    return text


def decoded(path: Path, raw: bytes, where: str) -> str:
    """UTF-8, or a `ConfigError` that names the file and `where` in it."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: {where}not UTF-8 text (byte 0x{raw[error.start]:02x} at offset {error.start})."
            " Convert the file, or leave it out of the URLs"
        ) from error


_READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".txt": _text,
    ".jsonl": _json_lines,
    ".py": _text,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
_TABLES = (".parquet", ".arrow")
