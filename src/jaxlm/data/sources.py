"""From URLs to documents: local files, folders and globs, and the standard library of the running Python.

    corpus/*.jsonl    a glob                stdlib:train         source files of the standard library ...
    corpus/           everything below      stdlib:validation    ... and the twentieth of them that is held out

A `.txt` or `.py` file is one document, a `.jsonl` file has one in each line.
"""

import difflib
import functools
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.data import stdlib

SUFFIXES = (".txt", ".jsonl", ".py")
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class TextFile:
    """A file of documents.

    Attributes:
        path: where it is.
        name: how it is known in fingerprints: relative to its URL, so that data may move to another folder or machine.
        text_key: the key of the text in a `.jsonl` record.
    """

    path: Path
    name: str
    text_key: str

    @property
    def has_records(self) -> bool:
        """Whether each line is a document of its own."""
        return self.path.suffix == ".jsonl"

    @property
    def size(self) -> int:
        """Bytes."""
        return self.path.stat().st_size

    @property
    def digest(self) -> str:
        """SHA-256 of its content."""
        stat = self.path.stat()
        return _digest(self.path.resolve(), stat.st_size, stat.st_mtime_ns)

    def documents(self) -> Iterator[str]:
        """Its documents, empty ones left out.

        Raises:
            ConfigError: not UTF-8, or a record that is no JSON or has no text; names file and byte or line.
        """
        if self.has_records:
            yield from self._records()
            return
        text = self._decoded(self.path.read_bytes(), "")
        if text:
            yield text

    def _records(self) -> Iterator[str]:
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                text = self._decoded(line, f"line {number}: ")
                if not text.isspace() and (document := self._text_of(text, number)):
                    yield document

    def _text_of(self, line: str, number: int) -> str:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{self.path}: line {number}: not JSON ({error.msg} at column {error.colno})") from error
        text = record.get(self.text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(record) if isinstance(record, dict) else "none"
            raise ConfigError(
                f"{self.path}: line {number}: no text under data.text_key '{self.text_key}'. Its keys: {keys}"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise ConfigError(
                f"{self.path}: line {number}: the text is not Unicode: {text[error.start]!a} at character {error.start}"
            ) from error
        return text

    def _decoded(self, raw: bytes, where: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self.path}: {where}not UTF-8 text (byte 0x{raw[error.start]:02x} at offset {error.start})."
                " Convert the file, or leave it out of the URLs"
            ) from error


@functools.cache
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    # Size and time are no part of the answer: they only tell this process when to look again.
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_files(urls: Sequence[str], key: str, text_key: str) -> list[TextFile]:
    """The files that URLs mean, each once: in the order of the URLs, and sorted by name within each.

    Args:
        key: where the URLs are configured (`data.train_urls`), for messages.

    Raises:
        ConfigError: a URL that matches nothing; says what there is nearby.
    """
    found: dict[Path, TextFile] = {}
    names: set[str] = set()
    for number, url in enumerate(urls):
        for name, path in _files_of(url, f"{key}[{number}]"):
            place = path.resolve()
            if place in found:
                continue
            # Files of two URLs may have one name; the later one says which URL it is of.
            name = name if name not in names else f"{name} ({key}[{number}])"
            names.add(name)
            found[place] = TextFile(path, name, text_key)
    return list(found.values())


def _files_of(url: str, key: str) -> list[tuple[str, Path]]:
    if url.startswith(stdlib.SCHEME):
        return stdlib.library_files(url.removeprefix(stdlib.SCHEME), key)
    if "://" in url:
        raise ConfigError(f"{key}: '{url}': only local files, folders and globs are read, and stdlib:train|validation")
    path = Path(url).expanduser()
    if path.is_dir():
        root, paths = path, [p for p in _below(path) if p.suffix in SUFFIXES]
        if not paths:
            raise ConfigError(f"{key}: the folder '{url}' holds no file that ends in {', '.join(SUFFIXES)}")
    elif path.is_file():
        root, paths = path.parent, [path]
    else:
        root = _before_wildcards(path)
        paths = [Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p)]
        if not paths:
            raise ConfigError(f"{key}: '{url}' matches no file{_nearby(path)}")
    for p in paths:
        if p.suffix not in SUFFIXES:
            raise ConfigError(f"{key}: '{p}' ends in '{p.suffix}'. Allowed: {', '.join(SUFFIXES)}")
        if not os.access(p, os.R_OK):
            raise ConfigError(f"{key}: '{p}' may not be read. Change its permissions, or leave it out")
    if not any(p.stat().st_size for p in paths):
        raise ConfigError(f"{key}: '{url}' holds no text: {len(paths)} file(s), all of them empty")
    return sorted((p.relative_to(root).as_posix(), p) for p in paths)


def _below(folder: Path) -> list[Path]:
    """All files of a folder and the folders in it; hidden ones are not meant."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return found


def _before_wildcards(pattern: Path) -> Path:
    fixed = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed)


def _nearby(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(p.name for p in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=_NAMES_SHOWN, cutoff=0.3) or names[:_NAMES_SHOWN]
    return f" (looked in {folder.resolve()}, which holds {', '.join(near) if near else 'nothing'})"
