"""Sources whose text is not on the local disk: each is copied once, to the folder `mirror` beside the caches.

<cache_dir>/mirror/<hash of URL and version>/<name>

The version is what the other side says: size, and ETag, checksum or time. As long as that is the same, the copy is read.
"""

import abc
import functools
import hashlib
import posixpath
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxlm.core.atomic_io import atomic_file, folder_lock, remove_leftovers
from jaxlm.core.errors import ConfigError
from jaxlm.core.storage_errors import storage_errors
from jaxlm.data.base import DataSource, Log
from jaxlm.data.cache.cache_dir import disk_full_errors, writable_folder
from jaxlm.data.sources.document_files import format_of, has_records
from jaxlm.data.sources.globs import before_wildcards

# What the implementations call it, the surest first.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "content_md5"),
    *("mtime", "Last-Modified", "LastModified", "last_modified", "updated", "modified", "created"),
)
_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol"}
_SHOW_EVERY_S = 2.0


class MirroredSource(DataSource):
    """A source that is read through a copy of its own. Several processes that want it at once make it once."""

    @property
    def num_bytes(self) -> int | None:
        return None

    @property
    def has_records(self) -> bool:
        return True

    @abc.abstractmethod
    def _place(self, mirror: Path) -> Path:
        """The copy: a file, or a folder."""

    @abc.abstractmethod
    def _make(self, place: Path, log: Log) -> None:
        """Makes the copy, which appears at once and whole."""

    def _parts(self, place: Path) -> list[tuple[str, Path]]:
        """What `files` returns of a copy."""
        return [(self.name, place)]

    def is_here(self, mirror: Path) -> bool:
        return self._place(mirror).is_file()

    def files(self, mirror: Path, log: Log) -> list[tuple[str, Path]]:
        place = self._place(mirror)
        if not self.is_here(mirror):
            with folder_lock(writable_folder(place.parent), log):
                if not self.is_here(mirror):  # another process may have been faster
                    self._make(place, log)
        return self._parts(place)


@dataclass(frozen=True)
class RemoteFile(MirroredSource):
    """A file that fsspec can read.

    Attributes:
        url: where it is.
        key: where it is configured, for messages.
        known_as: its name.
        size: in bytes; None where the other side does not say.
        version: what is different when its content is.
    """

    url: str
    key: str
    known_as: str
    size: int | None
    version: str

    @property
    def name(self) -> str:
        return self.known_as

    @property
    def num_bytes(self) -> int | None:
        return self.size

    @property
    def has_records(self) -> bool:
        return has_records(self._basename)

    def renamed(self, name: str) -> "RemoteFile":
        """The same file under another name."""
        return replace(self, known_as=name)

    @property
    def _basename(self) -> str:
        return _basename(self.url)

    def _place(self, mirror: Path) -> Path:
        return mirror / folder_of(f"{self.url} {self.size} {self.version}") / self._basename

    def _make(self, place: Path, log: Log) -> None:
        fs, path = _filesystem(self.url, self.key)
        remove_leftovers(place)
        with disk_full_errors(place), atomic_file(place) as unfinished:
            with _reading(self.url, self.key, local=place.parent):
                fs.get_file(path, str(unfinished), callback=_copying(self, log))
            size = unfinished.stat().st_size
            if self.size is not None and size != self.size:
                raise ConfigError(
                    f"{self.key}: {self.url}: {size:,} bytes came instead of {self.size:,}: the connection broke, or the"
                    " file is being changed. Start again"
                )
        log(f"mirror: {self.url}: {size / 1e6:.1f} MB copied to {place}")


@functools.cache  # asked once a process: all its parts then see the same files
def list_remote(url: str, key: str) -> tuple[str, tuple[RemoteFile, ...]]:
    """The folder that names are relative to, and the files that a URL (a file, a folder or a glob) means, by their path.

    Raises:
        ConfigError: nothing there, no answer, or no fsspec implementation for it; says what to do.
    """
    fs, path = _filesystem(url, key)
    has_wildcard = _has_wildcard_http if url.startswith("http") else _has_wildcard
    with _reading(url, key):
        info = None if has_wildcard(path) or url.endswith("/") else fs.info(path)
        if has_wildcard(path):
            root, found = "/".join(before_wildcards(path.split("/"), has_wildcard)), fs.glob(path, detail=True)
            found = {place: info for place, info in found.items() if info["type"] == "file"}
        elif info is None or info["type"] == "directory":
            root, found = path.rstrip("/"), fs.find(path, detail=True)
            found = {place: info for place, info in found.items() if format_of(_basename(place))}
        else:
            root, found = posixpath.dirname(path), {path: info}
        infos = {place: _informed(fs, place, info) for place, info in sorted(found.items())}
    if not infos:
        raise ConfigError(f"{key}: '{url}' matches no file that can be read. Look for slips, or list its folder")
    files = [
        RemoteFile(fs.unstrip_protocol(place), key, place, info.get("size"), _version(info))
        for place, info in infos.items()
    ]
    return root, tuple(files)


def _filesystem(url: str, key: str) -> tuple[Any, str]:
    import fsspec
    from fsspec.registry import known_implementations

    protocol = url.split("://", 1)[0].split("::", 1)[0]
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        module = known_implementations.get(protocol, {}).get("class", protocol).split(".")[0]
        package = _PACKAGES.get(protocol, module)
        raise ConfigError(f"{key}: '{url}': {protocol}:// needs a package: pip install {package} ({error})") from error
    except ValueError as error:
        known = ", ".join(sorted(known_implementations))
        raise ConfigError(f"{key}: '{url}': fsspec does not know {protocol}://. It knows: {known}") from error


def _informed(fs: Any, path: str, info: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a listing says, or what the file itself says where a listing says too little."""
    return info if info.get("size") is not None and _version(info) else fs.info(path)


def _version(info: Mapping[str, Any]) -> str:
    return next((f"{name} {info[name]}" for name in _VERSIONS if info.get(name)), "")


def _basename(path: str) -> str:
    return posixpath.basename(urlsplit(path).path if path.startswith("http") else path)


def _has_wildcard(path: str) -> bool:
    return any(character in path for character in "*?[")


def _has_wildcard_http(path: str) -> bool:
    return "*" in path  # the others are usual in addresses


def _copying(file: RemoteFile, log: Log) -> Any:
    """Shows every two seconds how much of a file has been copied."""
    from fsspec.callbacks import Callback

    class Copying(Callback):
        shown = time.monotonic()

        def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
            now = time.monotonic()
            if now - self.shown > _SHOW_EVERY_S:
                self.shown = now
                total = "" if file.size is None else f" of {file.size / 1e6:.1f}"
                log(f"mirror: {file.url}: copying, {self.value / 1e6:.1f}{total} MB")

    return Copying()


def _reading(url: str, key: str, local: Path | None = None) -> AbstractContextManager[None]:
    """Says what the other side's failure means; what fails `here`, on the local disk, is raised as it is."""
    advice = "Check the address, the network and your credentials; or copy the files here and name their folder"
    return storage_errors(
        lambda reason: ConfigError(f"{key}: '{url}' cannot be read ({reason}). {advice}"), local=local
    )


def folder_of(identity: str) -> str:
    """The name of a copy's folder: another one when what identifies the source is another."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]
