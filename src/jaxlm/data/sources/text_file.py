"""A local file of documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxlm.core.safe_io import sha256
from jaxlm.data.sources.document_files import Document, has_records, read_documents
from jaxlm.data.sources.record_files import Record, read_records


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
        """Whether the file holds records, with the text under `text_key`."""
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
