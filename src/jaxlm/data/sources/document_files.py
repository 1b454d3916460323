"""Reads documents from files incrementally, decompressing them on the fly: text, JSON, and Arrow tables.

    .txt .py            one document                 .parquet    one per row
    .jsonl              one per line                 .arrow      one per row: Arrow IPC, file or stream format
    .json               one, or a list of them       all but .parquet and .arrow also with .gz, .zst, .xz or .bz2

The text of a record is under `data.text_key`. Only `.txt`, `.py` and `.json` files are read into memory as a whole.
"""

import contextlib
import io
import json
import lzma
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from jaxlm.core.errors import ConfigError, listed
from jaxlm.core.safe_io import open_regular, read_lines, read_stream

if TYPE_CHECKING:
    import pyarrow as pa

COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
_CHUNK = 1 << 16


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """The decompressed content as a binary stream, and a function for the position in the (compressed) file."""
    with open_regular(path) as file, _content(file, path.suffix) as stream:
        yield stream, file.tell


@contextlib.contextmanager
def damaged_file_errors(path: Path, position: Callable[[], str], *kinds: type[Exception]) -> Iterator[None]:
    """Converts errors of a damaged file, raised while reading it, to `ConfigError`.

    Args:
        position: describes the current position in the file, for the message (`line 3`).
        kinds: further exceptions that the file's format raises for damage.

    Raises:
        ConfigError: the file is truncated or damaged, or its content does not match its suffix.
    """
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error, *kinds) as error:
        if isinstance(error, ConfigError) or getattr(error, "errno", None) is not None:
            raise  # an error of the operating system; the file itself may be fine
        raise ConfigError(
            f"{path}: {position()}: the file is truncated or damaged, or its content does not match its suffix: {error}."
            " Replace the file, or remove it from the URLs"
        ) from error


def _content(file: BinaryIO, suffix: str) -> contextlib.AbstractContextManager[Any]:
    if suffix == ".gz":
        import gzip

        return gzip.GzipFile(fileobj=file)
    if suffix == ".bz2":
        import bz2

        return bz2.BZ2File(file)
    if suffix == ".xz":
        return lzma.LZMAFile(file)
    if suffix == ".zst":
        import pyarrow as pa

        # Unlike the package zstandard, Arrow detects truncated frames.
        return io.BufferedReader(pa.CompressedInputStream(file, "zstd"), _CHUNK)  # pyright: ignore[reportArgumentType]
    return contextlib.nullcontext(file)


_ROWS = 256  # table rows converted to Python strings per batch
_BUFFER = 1 << 20  # bytes; without a buffer size, whole columns of a row group are fetched
_ARROW_FILE = b"ARROW1"
_WITH_TEXT = {str, dict, list}
Parts = Iterator[tuple["pa.RecordBatch", int, int]]  # rows of a table, the position after them, their row group
ARRAYS = ".npy"  # arrays of token ids: not documents, but may be listed in URLs


class Document(NamedTuple):
    """A text.

    Attributes:
        position: how many bytes of its file have been read after it.
        group: the number of its row group in a Parquet file; 0 in other files.
    """

    text: str
    position: int
    group: int = 0


def format_of(name: str) -> str | None:
    """The suffix that determines how a file is read (`.jsonl` for `x.jsonl.gz`); None if it cannot be read."""
    path = Path(name)
    compressed = path.suffix in COMPRESSIONS
    suffix = Path(path.stem).suffix if compressed else path.suffix
    return suffix if suffix in _READERS and not (compressed and suffix in _TABLES) else None


def has_records(name: str) -> bool:
    """Tells whether a file with this name holds records, with the text under a key."""
    return format_of(name) not in (None, ".txt", ".py")


def allowed_suffixes() -> str:
    """The list of readable suffixes, for messages."""
    compressed = ", ".join(COMPRESSIONS)
    return f"{', '.join(_READERS)}; also compressed with {compressed} (except {' and '.join(_TABLES)})"


def read_documents(path: Path, text_key: str) -> Iterator[Document]:
    """The documents of a file, including empty ones.

    Raises:
        ConfigError: the file is damaged or not UTF-8, or a record has no text. The message names the file and the byte, line,
            record or row.
    """
    suffix = format_of(path.name)
    assert suffix is not None, f"{path} cannot be read, and should not have been listed"
    return _READERS[suffix](path, text_key)


def _text(path: Path, text_key: str) -> Iterator[Document]:
    del text_key
    raw = b""
    with open_decompressed(path) as (stream, position), damaged_file_errors(path, lambda: "while it was read"):
        raw = read_stream(stream, path)
        end = position()
    yield Document(_decode_utf8(path, raw, ""), end)


def _json(path: Path, text_key: str) -> Iterator[Document]:
    for where, value, position in json_values(path):
        yield Document(_text_of(path, where, value, text_key), position)


def json_values(path: Path) -> Iterator[tuple[str, Any, int]]:
    """The values in a .jsonl or .json file, each with its place (`line 3`) and the position in the file after it."""
    return (_json_list if format_of(path.name) == ".json" else _json_lines)(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Any, int]]:
    number = 0
    with open_decompressed(path) as (stream, position), damaged_file_errors(path, lambda: f"line {number + 1}"):
        for line in read_lines(stream, path):
            number += 1
            where = f"line {number}"
            text = _decode_utf8(path, line, f"{where}: ")
            if not text.isspace():
                yield where, _parse_json(path, text, f"{where}: "), position()


def _json_list(path: Path) -> Iterator[tuple[str, Any, int]]:
    with open_decompressed(path) as (stream, position), damaged_file_errors(path, lambda: "while it was read"):
        text = _decode_utf8(path, read_stream(stream, path), "")
        end = position()
    content = _parse_json(path, text, "") if text.strip() else []
    records = content if isinstance(content, list) else [content]
    for number, record in enumerate(records, start=1):
        yield f"record {number}", record, end * number // len(records)


def _table(path: Path, text_key: str) -> Iterator[Document]:
    row = 0
    with open_table(path, [text_key]) as (schema, parts):
        _check_column(path, schema, text_key)
        for batch, position, group in parts:
            column = batch.column(text_key)
            for start in range(0, len(column), _ROWS):
                for text in _texts(path, column.slice(start, _ROWS), row, text_key):
                    row += 1
                    yield Document(text, position, group)


@contextlib.contextmanager
def open_table(path: Path, columns: Sequence[str] | None) -> Iterator[tuple["pa.Schema", Parts]]:
    """Reads the schema of a table, and its rows with the `columns` that exist, or all. Raises `ConfigError` for damage."""
    row = 0

    def checked(parts: Parts) -> Parts:
        nonlocal row
        for batch, position, group in parts:
            _check_batch(path, batch, row)
            yield batch, position, group
            row += len(batch)

    reader = _open_parquet if format_of(path.name) == ".parquet" else _open_arrow
    # A reader in C++ raises anything for a damaged file.
    with damaged_file_errors(path, lambda: f"row {row + 1}", Exception), reader(path, columns) as (schema, parts):
        yield schema, checked(parts)


@contextlib.contextmanager
def _open_parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple["pa.Schema", Parts]]:
    import pyarrow.parquet as pq

    def parts() -> Parts:
        row, size, total = 0, path.stat().st_size, max(1, file.metadata.num_rows)
        available = [name for name in file.schema_arrow.names if columns is None or name in columns]
        for group in range(file.num_row_groups):  # one by one: otherwise Arrow holds several row groups in memory
            for batch in file.iter_batches(_ROWS, [group], available):
                row += len(batch)
                yield batch, size * row // total, group

    with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
        yield file.schema_arrow, parts()


@contextlib.contextmanager
def _open_arrow(path: Path, columns: Sequence[str] | None) -> Iterator[tuple["pa.Schema", Parts]]:
    """Without a memory map, in which damaged offsets point anywhere, and whose file may shrink."""
    import pyarrow as pa

    with pa.OSFile(str(path)) as source:
        is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        open_ipc = pa.ipc.open_file if is_file else pa.ipc.open_stream
        source.seek(0)
        schema = open_ipc(source).schema
        source.seek(0)
        wanted = [number for number, name in enumerate(schema.names) if columns is None or name in columns]
        reader = open_ipc(source, options=pa.ipc.IpcReadOptions(included_fields=wanted))
        if is_file:
            total = reader.num_record_batches
            yield schema, ((reader.get_batch(n), source.size() * (n + 1) // total, 0) for n in range(total))
        else:
            yield schema, ((batch, source.tell(), 0) for batch in reader)


def _check_batch(path: Path, batch: "pa.RecordBatch", rows_before: int) -> None:
    """Raises `ConfigError` if its offsets, which C++ follows unseen, or its texts are damaged."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"{path}: rows {rows_before + 1} to {rows_before + len(batch)}: not UTF-8 text, or damaged: {error}. Convert the"
            " text to UTF-8, or remove such rows from the file"
        ) from error


def _check_column(path: Path, schema: "pa.Schema", text_key: str) -> None:
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if text_key not in schema.names:
        raise ConfigError(f"{path}: no column '{text_key}' (data.text_key). The file has: {columns}")
    kind = schema.field(text_key).type
    if not _is_text(kind):
        raise ConfigError(
            f"{path}: column '{text_key}' (data.text_key) holds {kind}, not text. The file has: {columns}"
        )


def _is_text(kind: "pa.DataType") -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind  # pyright: ignore[reportAttributeAccessIssue]
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _texts(path: Path, column: "pa.Array", rows_before: int, text_key: str) -> Iterator[str]:
    for number, text in enumerate(column.to_pylist(), start=rows_before + 1):
        if text is None:
            raise ConfigError(
                f"{path}: row {number}: the text under data.text_key '{text_key}' is null. Remove such rows from the"
                " file, or choose another column"
            )
        yield text


class _RepeatedKeyError(Exception):
    """Says which key an object of JSON has twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RepeatedKeyError(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return found


def _parse_json(path: Path, text: str, where: str) -> Any:
    try:
        # Without the end of the line, an error there is not at column 1 of the next.
        return json.loads(text.rstrip(), object_pairs_hook=_unique)
    except _RepeatedKeyError as error:
        raise ConfigError(
            f"{path}: {where}the key '{error}' is given twice in one object. Keep one of them: only the last would be read"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path}: {where}the JSON is nested too deeply") from error
    except json.JSONDecodeError as error:
        advice = (
            ". If it has one record per line, rename it to .jsonl" if error.msg == "Extra data" and not where else ""
        )
        problem = error.msg.removesuffix(" at") + (f" at line {error.lineno}," if not where else " at")
        raise ConfigError(f"{path}: {where}not JSON ({problem} column {error.colno}){advice}") from error
    except ValueError as error:  # Python reads no integers with more digits
        digits = max(map(len, re.findall(r"\d+", text)), default=0)
        raise ConfigError(
            f"{path}: {where}the JSON has a number with {digits:,} digits, at most {sys.get_int_max_str_digits():,} expected."
            " Put it in quotes, or remove it"
        ) from error


def _text_of(path: Path, where: str, record: Any, text_key: str) -> str:
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = listed(record) if isinstance(record, dict) else "none"
        value = f" (it is {json.dumps(text):.60})" if isinstance(record, dict) and text_key in record else ""
        raise ConfigError(
            f"{path}: {where}: no text under data.text_key '{text_key}'{value}. Keys of the record: {keys}. Remove such"
            " records, or set data.text_key to the key of the text"
        )
    check_unicode(f"{path}: {where}", text)
    return text


def check_unicode(where: str, value: Any) -> None:
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
                check_unicode(where, part)


def _decode_utf8(path: Path, raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: {where}not UTF-8 text (byte 0x{raw[error.start]:02x} at offset {error.start})."
            " Convert the file to UTF-8, or remove it from the URLs"
        ) from error


_READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".txt": _text,
    ".jsonl": _json,
    ".py": _text,
    ".json": _json,
    ".parquet": _table,
    ".arrow": _table,
}
_TABLES = (".parquet", ".arrow")
