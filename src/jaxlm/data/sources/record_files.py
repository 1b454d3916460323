"""Local files of documents, or of records with several keys for formats that need more than text."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import sha256
from jaxlm.data.sources.document_files import (
    Document,
    check_unicode,
    format_of,
    has_records,
    json_values,
    open_table,
    read_documents,
)


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


def glance(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    """Reads the records of a file. Columns of bytes and of numbers that are not `keys` have their type instead."""
    if _READERS.get(format_of(path.name) or "") is not _table:
        return read_records(path, None)
    with open_table(path, []) as (schema, _):
        types = {field.name: str(field.type) for field in schema}
    large = {
        name: kind
        for name, kind in types.items()
        if name not in keys and ("binary" in kind or ("list" in kind and "string" not in kind))
    }
    records = read_records(path, [name for name in types if name not in large])
    return (record._replace(values={**large, **record.values}) for record in records)


def _json(path: Path, keys: Sequence[str] | None, optional: Sequence[str]) -> Iterator[Record]:
    for where, value, position in json_values(path):
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {where}: expected a record with keys, got {value!r:.80}")
        check_unicode(
            f"{path}: {where}", value if keys is None else {key: value.get(key) for key in (*keys, *optional)}
        )
        yield Record(f"{path}: {where}", value, position)


def _table(path: Path, keys: Sequence[str] | None, optional: Sequence[str]) -> Iterator[Record]:
    row = 0
    with open_table(path, None if keys is None else [*keys, *optional]) as (schema, parts):
        wanted = schema.names if keys is None else keys
        missing = [key for key in wanted if key not in schema.names]
        if missing:
            raise ConfigError(f"{path}: no column '{missing[0]}'. The file has: {', '.join(schema.names)}")
        columns = [*wanted, *(key for key in optional if key in schema.names and key not in wanted)]
        for batch, position, _ in parts:
            for values in batch.select(columns).to_pylist():
                row += 1
                yield Record(f"{path}: row {row}", values, position)


_READERS: dict[str, Callable[[Path, Sequence[str] | None, Sequence[str]], Iterator[Record]]] = {
    ".jsonl": _json,
    ".json": _json,
    ".parquet": _table,
    ".arrow": _table,
}


@dataclass(frozen=True)
class TextFile:
    """A file of documents.

    Attributes:
        path: local path. If `known_digest` is given, the file may be missing; then it cannot be read.
        name: name used in fingerprints: relative to the URL, so the data may move to another folder or machine.
        text_key: key of the text in a record, or column of the text in a table.
        identity: `DataSource.identity` of a remote file; empty for others.
        known_digest: SHA-256 of the content, if it is known without reading it.
    """

    path: Path
    name: str
    text_key: str
    identity: str = ""
    known_digest: str | None = None

    @property
    def has_records(self) -> bool:
        """Tells whether the file holds records, with the text under `text_key`."""
        return has_records(self.path.name)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.path.stat().st_size

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return sha256(self.path) if self.known_digest is None else self.known_digest

    def read(self) -> Iterator[Document]:
        """The non-empty documents, and the position in the file after each.

        Raises:
            ConfigError: the file cannot be read. The message names the file and the byte, line, record or row.
        """
        return (document for document in read_documents(self.path, self.text_key) if document.text)

    def records(self, keys: Sequence[str] | None, optional: Sequence[str] = ()) -> Iterator[Record]:
        """The records; of tables, only the columns `keys` (None: all), and those of `optional` it has. Raises like `read`."""
        return read_records(self.path, keys, optional)

    def documents(self) -> Iterator[str]:
        """The text of the documents. Raises like `read`."""
        return (document.text for document in self.read())


def files_key(files: Sequence[TextFile]) -> dict[str, Any]:
    """The part of an artifact's key that identifies the text."""
    key: dict[str, Any] = {"files": file_digests(files)}
    if any(file.has_records for file in files):
        key["text_key"] = files[0].text_key
    return key


def file_digests(files: Sequence[TextFile]) -> dict[str, str]:
    """File name -> SHA-256 of the file's content."""
    with ThreadPoolExecutor() as pool:
        return dict(zip([f.name for f in files], pool.map(lambda file: file.digest, files), strict=True))
