"""From URLs to documents: local files, folders and globs, and the standard library of the running Python.

    corpus/*.jsonl    a glob                stdlib:train         source files of the standard library ...
    corpus/           everything below      stdlib:validation    ... and the twentieth of them that is held out

A `.txt` or `.py` file is one document, a `.jsonl` file has one in each line.
"""

import difflib
import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxlm.core.errors import ConfigError

SUFFIXES = (".txt", ".jsonl", ".py")
_STDLIB = "stdlib:"
_STDLIB_SPLITS = ("train", "validation")
_HELD_OUT_OF = 20


@dataclass(frozen=True)
class TextFile:
    """A file of documents.

    Attributes:
        path: where it is.
        name: how it is known in fingerprints: independent of the machine for the standard library.
        text_key: the key of the text in a `.jsonl` record.
    """

    path: Path
    name: str
    text_key: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its content."""
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def documents(self) -> Iterator[str]:
        """Its documents, empty ones left out.

        Raises:
            ConfigError: not UTF-8, or a record that is no JSON or has no text; names file and byte or line.
        """
        if self.path.suffix == ".jsonl":
            yield from self._records()
            return
        text = self._decoded(self.path.read_bytes(), "")
        if text:
            yield text

    def _records(self) -> Iterator[str]:
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                text = self._decoded(line, f"line {number}: ").strip()
                if not text:
                    continue
                try:
                    record = json.loads(text)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{self.path}: line {number}: not JSON ({error})") from error
                value = record.get(self.text_key) if isinstance(record, dict) else None
                if not isinstance(value, str):
                    keys = ", ".join(record) if isinstance(record, dict) else "none"
                    raise ConfigError(
                        f"{self.path}: line {number}: no text under data.text_key '{self.text_key}'. Its keys: {keys}"
                    )
                if value:
                    yield value

    def _decoded(self, raw: bytes, where: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self.path}: {where}not UTF-8 text (byte 0x{raw[error.start]:02x} at offset {error.start})."
                " Convert the file, or leave it out of the URLs"
            ) from error


def find_files(urls: Sequence[str], key: str, text_key: str) -> list[TextFile]:
    """The files that URLs mean, each once, in an order that does not depend on the file system.

    Args:
        key: where the URLs are configured (`data.train_urls`), for messages.

    Raises:
        ConfigError: a URL that matches nothing; says what there is nearby.
    """
    found: dict[str, TextFile] = {}
    for number, url in enumerate(urls):
        for file in _files_of(url, f"{key}[{number}]", text_key):
            found.setdefault(file.name, file)
    return list(found.values())


def _files_of(url: str, key: str, text_key: str) -> list[TextFile]:
    if url.startswith(_STDLIB):
        return _standard_library(url, key)
    if "://" in url:
        raise ConfigError(f"{key}: '{url}': only local files, folders and globs are read, and stdlib:train|validation")
    path = Path(url).expanduser()
    if path.is_dir():
        paths = [p for p in sorted(path.rglob("*")) if p.is_file() and p.suffix in SUFFIXES]
        if not paths:
            raise ConfigError(f"{key}: the folder '{url}' holds no file that ends in {', '.join(SUFFIXES)}")
    elif path.is_file():
        paths = [path]
    else:
        paths = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if Path(p).is_file()]
        if not paths:
            raise ConfigError(f"{key}: '{url}' matches no file{_nearby(path)}")
    for p in paths:
        if p.suffix not in SUFFIXES:
            raise ConfigError(f"{key}: '{p}' ends in '{p.suffix}'. Allowed: {', '.join(SUFFIXES)}")
    return [TextFile(p, str(p), text_key) for p in paths]


def _nearby(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(p.name for p in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=5, cutoff=0.3) or names[:5]
    return f" (looked in {folder.resolve()}, which holds {', '.join(near) if near else 'nothing'})"


def _standard_library(url: str, key: str) -> list[TextFile]:
    """Source files of the standard library, without installed packages; a hash of the path decides the split.

    Files that are not UTF-8 (there are a few on purpose, as tests) and empty ones are left out.
    """
    split = url.removeprefix(_STDLIB)
    if split not in _STDLIB_SPLITS:
        raise ConfigError(f"{key}: '{url}' given. Allowed: {', '.join(_STDLIB + s for s in _STDLIB_SPLITS)}")
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in ("site-packages", "dist-packages") or not path.is_file():
            continue
        held_out = hashlib.sha256(relative.as_posix().encode()).digest()[0] % _HELD_OUT_OF == 0
        if held_out == (split == "validation") and _is_text(path):
            files.append(TextFile(path, f"{_STDLIB}{relative.as_posix()}", "text"))
    if not files:
        raise ConfigError(f"{key}: this Python has no source files of its standard library in {root}")
    return files


def _is_text(path: Path) -> bool:
    raw = path.read_bytes()
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(raw)
