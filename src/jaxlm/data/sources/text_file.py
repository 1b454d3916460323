"""A local file of documents."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxlm.data.sources.document_files import Document, has_records, read_documents
from jaxlm.data.sources.record_files import Record, read_records


@dataclass(frozen=True)
class TextFile:
    """A file of documents.

    Attributes:
        path: where it is.
        name: how it is known in fingerprints: relative to its URL, so that data may move to another folder or machine.
        text_key: the key of the text in a record, or its column in a table.
    """

    path: Path
    name: str
    text_key: str

    @property
    def has_records(self) -> bool:
        """Whether its text is found by `text_key`."""
        return has_records(self.path.name)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.path.stat().st_size

    @property
    def digest(self) -> str:
        """SHA-256 of its content."""
        stat = self.path.stat()
        return _digest(self.path.resolve(), stat.st_size, stat.st_mtime_ns)

    def read(self) -> Iterator[Document]:
        """Its documents, empty ones left out, and how far into the file each reaches.

        Raises:
            ConfigError: what cannot be read; names the file and its byte, line, record or row.
        """
        return (document for document in read_documents(self.path, self.text_key) if document.text)

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        """Its records; of a table, these columns. Raises as `read` does."""
        return read_records(self.path, keys)

    def documents(self) -> Iterator[str]:
        """The texts alone. Raises as `read` does."""
        return (document.text for document in self.read())


@functools.cache
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    # Size and time are no part of the answer: they only tell this process when to look again.
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
