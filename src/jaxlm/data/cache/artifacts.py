"""Keeps on disk what follows from a key: each artifact is made once, then opened by every process and machine.

<folder>/<name, or digest of the key>/...           the files of an artifact
                                      cache.json    its key, facts, and the CRC-32 of each file and of itself
         <name>.building/                           what an interrupted start has made of it, if its making can be resumed
         .lock                                      held while one is made

An artifact is complete or absent: it is made in a temporary folder, which is renamed once it is on disk. In a store at a URL
its metadata is uploaded last.
"""

import contextlib
import hashlib
import json
import os
import posixpath
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import is_main_process
from jaxlm.core.safe_io import DISK_FULL_ERRNOS, atomic_folder, folder_lock, map_array, read_bytes
from jaxlm.core.stores import AT_START_S, is_url, local_copy, open_store, put_folder, retried, storage_errors
from jaxlm.data.base import Log

Key = Mapping[str, Any]
"""Everything that determines an artifact. Plain JSON. `files` maps names to digests; their order counts."""
METADATA = "cache.json"
_MADE_FROM, _CRC32, _SEAL, _FILES = "made_from", "crc32", "seal", "files"
_LOCAL = Path("cache")
_NAMES_SHOWN = 5
T = TypeVar("T")


class DamagedError(ConfigError):
    """The files of an artifact were changed, truncated or deleted after they were written."""


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of artifact.

    Attributes:
        name: for messages (`token cache`).
        read: opens one. Raises `DamagedError`.
        facts: what its metadata says, besides the key and the checksums.
        optional: facts that those of earlier versions do not have.
        remade: whether a damaged one is made again. Otherwise the user decides.
        metadata: name of the file with its metadata.
    """

    name: str
    read: Callable[["Artifact"], T]
    facts: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    remade: bool = False
    metadata: str = METADATA

    def open(self, folder: Path, made_from: Key | None = None) -> T:
        """Opens the artifact in a folder.

        Raises:
            DamagedError: a file that is read is missing or damaged.
            ConfigError: it was made from something else. The message lists the differences.
        """
        return self.read(self.at(folder, made_from))

    def at(self, folder: Path, made_from: Key | None = None) -> "Artifact":
        """The artifact in a folder, of which only the metadata is read. Raises like `open`."""
        path = folder / self.metadata
        try:
            raw = read_bytes(path)
        except (FileNotFoundError, NotADirectoryError):
            raise self.damaged(path, "the file is missing") from None
        except OSError as error:
            raise self.damaged(path, f"it cannot be read ({error.strerror})") from error
        metadata = self.parse(raw, str(path))
        if made_from is not None:
            self.check_key(folder, metadata[_MADE_FROM], made_from)
        return Artifact(self, folder, metadata)

    def parse(self, raw: bytes, path: str) -> dict[str, Any]:
        """The metadata in a file. Args: path: its path or URL, for messages. Raises `DamagedError`."""
        try:
            metadata = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self.damaged(path, f"not JSON ({error})") from error
        if isinstance(metadata, dict) and isinstance(metadata.get(_FILES), dict):
            return {_MADE_FROM: metadata, _CRC32: {}}  # a tokenizer of a version that stored its key alone
        expected = {_MADE_FROM, _CRC32, _SEAL} | self.facts
        if not isinstance(metadata, dict) or metadata.keys() - self.optional != expected:
            raise self.damaged(path, "its keys are not those that this version of jaxlm writes")
        if metadata.pop(_SEAL) != _seal(metadata):
            raise self.damaged(path, "its checksum does not match its content")
        return metadata

    def damaged(self, path: Path | str, problem: str) -> DamagedError:
        folder = str(path).rpartition("/")[0]
        return DamagedError(f"the {self.name} is damaged: {path}: {problem}. Delete the folder {folder} to rebuild it")

    def check_key(self, folder: Path | str, before: Key, now: Key) -> None:
        """Raises `ConfigError` with the differences if two keys differ.

        Args:
            folder: the folder or URL of what was made from the key `before`.
        """
        now = json.loads(json.dumps(now))  # what it is once it is stored
        if before == now and list(before.get(_FILES, ())) == list(now.get(_FILES, ())):
            return
        changes = [
            f"{key}: was {_short(before.get(key))}, is now {_short(now.get(key))}"
            for key in dict.fromkeys([*before, *now])
            if key != _FILES and before.get(key) != now.get(key)
        ]
        changes += _file_changes(before.get(_FILES, {}), now.get(_FILES, {}))
        raise ConfigError(
            f"the {self.name} {folder} was built from other inputs:\n  "
            + "\n  ".join(changes)
            + "\nChoose another data.cache_dir, or delete this folder to rebuild it"
        )


@dataclass(frozen=True)
class Artifact:
    """An artifact on the local disk. A file is checked when it is read."""

    kind: Kind[Any]
    folder: Path
    metadata: Mapping[str, Any]

    @property
    def made_from(self) -> Key:
        return self.metadata[_MADE_FROM]

    @property
    def crc32(self) -> Mapping[str, int]:
        """File name -> its checksum."""
        return self.metadata[_CRC32]

    def raw(self, name: str, dtype: Any = np.uint8) -> np.ndarray:
        """The content of a file, memory-mapped. Raises `DamagedError`."""
        path = self.folder / name
        if not path.is_file():
            raise self.kind.damaged(path, "the file is missing")
        # As a plain array: slicing a `memmap` is slow.
        content = np.asarray(np.memmap(path, np.uint8, mode="r")) if path.stat().st_size else np.zeros(0, np.uint8)
        if zlib.crc32(content.data) != self.crc32[name]:
            raise self.kind.damaged(path, "its checksum does not match its content")
        return content.view(dtype)

    def array(self, name: str, *, is_checked: bool = False) -> np.ndarray:
        """The array that `Files.put_array` has written, memory-mapped. Raises `DamagedError`.

        Args:
            is_checked: do not check it again.
        """
        if not is_checked:
            self.raw(f"{name}.npy")
        try:
            return np.asarray(map_array(self.folder / f"{name}.npy"))
        except OSError as error:
            raise self.kind.damaged(self.folder / f"{name}.npy", f"it cannot be read ({error.strerror})") from error

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, by name. Raises like `array`."""
        return {name.removesuffix(".npy"): self.array(name.removesuffix(".npy")) for name in self.crc32}


@dataclass
class Files:
    """The files of an artifact that is being made.

    Attributes:
        folder: where they are. Files that are written here in another way are read again for their checksums.
        work: a folder that making may use. It is there when an interrupted start is repeated, and is deleted in the end.
    """

    folder: Path
    work: Path
    crc32: dict[str, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator["_Summed"]:
        """Opens a file to write bytes to."""
        with open(self.folder / name, "wb") as file:
            summed = _Summed(file)
            yield summed
        self.crc32[name] = summed.crc32

    def put(self, name: str, content: np.ndarray) -> None:
        """Writes the bytes of an array."""
        with self.open(name) as file:
            file.write(content.data)

    def put_array(self, name: str, array: np.ndarray) -> None:
        """Writes an array with its shape and dtype to `<name>.npy`."""
        with self.open(f"{name}.npy") as file:
            np.lib.format.write_array(file, array, allow_pickle=False)  # pyright: ignore[reportArgumentType]


class _Summed:
    """A file whose checksum is computed while it is written."""

    def __init__(self, file: BinaryIO):
        self._file, self.crc32 = file, 0

    def write(self, content: Any) -> None:
        self.crc32 = zlib.crc32(content, self.crc32)
        self._file.write(content)  # unlike `tofile`, it reports a full disk


class _OfferError(Exception):
    pass


@dataclass(frozen=True)
class Artifacts:
    """A folder of artifacts on the local disk, and where it is shared.

    Attributes:
        folder: the local folder.
        url: where its artifacts are shared; None if they are not.
        key: the configuration key, for messages.
    """

    folder: Path
    url: str | None = None
    key: str = "data.cache_dir"

    @staticmethod
    def at(cache_dir: str, key: str) -> "Artifacts":
        """Those in a `cache_dir`. A URL is copied to a folder in `cache/`."""
        if is_url(cache_dir):
            return Artifacts(local_copy(_LOCAL, cache_dir), cache_dir.rstrip("/"), key)
        return Artifacts(Path(cache_dir), None, key)

    def child(self, name: str) -> "Artifacts":
        """Those in a folder in this one."""
        return Artifacts(self.folder / name, None if self.url is None else f"{self.url}/{name}", self.key)

    def check(self) -> None:
        """Raises `ConfigError` if the URL cannot be used at all. Writes nothing."""
        if self.url is not None:
            open_store(self.url, self.key)

    def url_of(self, name: str) -> str:
        """Returns the URL at which an artifact is shared."""
        assert self.url is not None, "only the folders of a URL are shared"
        return f"{self.url}/{name}"

    def find(self, kind: Kind[T], made_from: Key, name: str | None = None) -> T | None:
        """Opens an artifact like `open_or_make`; None if it is not here, or has to be made again."""
        folder = self.folder / (name or digest(made_from))
        if not folder.exists():
            return None
        try:
            return kind.open(folder, made_from)
        except ConfigError:
            if kind.remade:
                return None
            raise

    def open_or_make(
        self, kind: Kind[T], made_from: Key, make: Callable[[Files], Key], log: Log, *, name: str | None = None
    ) -> T:
        """Opens an artifact. If it does not exist, it is copied from the URL, or made and then uploaded by process 0.

        Args:
            make: writes its files and returns its facts. Only one process of a machine calls it at a time.
            name: of its folder; None for the digest of the key.

        Raises:
            ConfigError: the artifact was made from something else, or is damaged and of a kind that is not remade; or the
                folder cannot be written, the disk is full, or the URL cannot be read or written.
        """
        name = name or digest(made_from)
        folder = self.folder / name
        work = folder.with_name(f"{folder.name}.building")
        opened = self.find(kind, made_from, name)
        if opened is None or work.exists():
            with folder_lock(writable_folder(folder.parent), log), disk_full_errors(folder):
                opened = self.find(kind, made_from, name)
                if opened is None:  # no other process was faster
                    _remove(folder)
                    with atomic_folder(folder) as unfinished:
                        unfinished.mkdir()
                        if not self._fetch(kind, name, unfinished, log):
                            _fill(kind, Files(unfinished, work), made_from, make)
                    opened = kind.open(folder, made_from)
                shutil.rmtree(work, ignore_errors=True)
        if self.url is not None and is_main_process():
            self._upload(kind, name, log)
        return opened

    def _fetch(self, kind: Kind[Any], name: str, unfinished: Path, log: Log) -> bool:
        """Copies an artifact. Tells whether the store has it."""
        if self.url is None:
            return False
        fs, root = open_store(self.url_of(name), self.key)
        with self.errors("read", unfinished):
            if not fs.exists(f"{root}/{kind.metadata}"):
                return False
        log(f"{self.key}: copying {self.url_of(name)} to {self.folder / name}")
        self.copy(name, unfinished)
        return True

    def copy(self, name: str, folder: Path, *, but: Sequence[str] = ()) -> None:
        """Copies the files of an artifact from the URL. Args: but: names of those that are left out."""
        fs, root = open_store(self.url_of(name), self.key)
        with self.errors("read", folder):
            for path in retried(lambda: fs.find(root), AT_START_S):
                if (file := posixpath.relpath(path, root)) not in but:
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    retried(lambda path=path, file=file: fs.get_file(path, str(folder / file)), AT_START_S)

    def offer(self, name: str, content: Callable[[Any, str], bytes | None], log: Log, otherwise: str) -> None:
        """Uploads a file that other machines can do without. Process 0 does so, and logs it if the store cannot be written.

        Args:
            content: of the file, from the file system and its path there; None if it is not to be uploaded.
            otherwise: what other machines do without it.
        """
        if self.url is None or not is_main_process():
            return
        fs, path = open_store(self.url_of(name), self.key)
        try:
            with storage_errors(_OfferError):
                if (uploaded := content(fs, path)) is not None:
                    fs.makedirs(posixpath.dirname(path), exist_ok=True)
                    retried(lambda: fs.pipe_file(path, uploaded), AT_START_S)
        except _OfferError as error:
            log(f"{self.key}: {self.url_of(name)} cannot be written ({error}), so other machines {otherwise}")

    def _upload(self, kind: Kind[Any], name: str, log: Log) -> None:
        fs, root = open_store(self.url_of(name), self.key)
        with self.errors("write to", self.folder):
            if not fs.exists(f"{root}/{kind.metadata}"):
                log(f"{self.key}: sharing {self.folder / name} at {self.url_of(name)}")
                put_folder(fs, self.folder / name, root, kind.metadata)

    def errors(self, doing: str, folder: Path) -> contextlib.AbstractContextManager[None]:
        """Converts errors of the store to `ConfigError`. Those of the local `folder` are raised unchanged.

        Args:
            doing: `read` or `write to`, for the message.
        """
        advice = "Check the address, the network and your credentials, or set it to a local folder"
        error = lambda reason: ConfigError(f"{self.key}: cannot {doing} {self.url} ({reason}). {advice}")  # noqa: E731
        return storage_errors(error, local=folder)


def digest(made_from: Key) -> str:
    """The name of the folder of what has no other name."""
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]


def write_metadata(path: Path, metadata: Key) -> None:
    """Writes the metadata of an artifact, with a checksum of its own content."""
    path.write_text(json.dumps({**metadata, _SEAL: _seal(metadata)}))


def _seal(metadata: Key) -> int:
    return zlib.crc32(json.dumps(metadata).encode())


def _fill(kind: Kind[Any], files: Files, made_from: Key, make: Callable[[Files], Key]) -> None:
    facts = make(files)
    names = {path.relative_to(files.folder).as_posix() for path in files.folder.rglob("*") if path.is_file()}
    others = {name: zlib.crc32(read_bytes(files.folder / name)) for name in sorted(names - files.crc32.keys())}
    metadata = {_MADE_FROM: dict(made_from), **facts, _CRC32: files.crc32 | others}
    write_metadata(files.folder / kind.metadata, metadata)


def _remove(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.unlink(missing_ok=True)


def _file_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    groups = {
        "files added": now.keys() - before.keys(),
        "files removed": before.keys() - now.keys(),
        "files changed": {name for name in before.keys() & now.keys() if before[name] != now[name]},
    }
    changes = []
    for label, names in groups.items():
        if names:
            listed = ", ".join(sorted(names)[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            changes.append(f"{label}: {len(names)} ({listed})")
    if before == now and list(before) != list(now):
        changes.append("the order of the files")
    return changes


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 15 else str(value)


def writable_folder(folder: Path) -> Path:
    """Creates `folder` if necessary and returns it.

    Raises:
        ConfigError: the folder cannot be created or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: {folder} cannot be created: {error.strerror}. Choose another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"data.cache_dir: {folder} is not writable. Choose another folder, or change its permissions")
    return folder


def is_writable(folder: Path) -> bool:
    """Tells whether a folder can be written, or made. Writes nothing."""
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return os.access(nearest, os.W_OK | os.X_OK)


@contextlib.contextmanager
def disk_full_errors(folder: Path) -> Iterator[None]:
    """Converts errors of a full disk, raised while writing to `folder`, to `ConfigError`.

    Raises:
        ConfigError: the disk is full, or the user's quota is exhausted.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise ConfigError(
            f"data.cache_dir: no space left for {folder}. Free some space and start again; finished work is kept"
        ) from error
