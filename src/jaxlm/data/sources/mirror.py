"""Sources that are not on the local disk: patterns in their URLs, and the mirror that each is copied to once.

<cache_dir>/mirror/<hash of URL and version>/<name>

The version is what the server reports: the size, and an ETag, checksum or time. As long as it is unchanged, the copy is used.
"""

import abc
import functools
import glob
import hashlib
import itertools
import posixpath
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import atomic_file, folder_lock, remove_leftovers
from jaxlm.core.stores import open_store, storage_errors
from jaxlm.data.base import DataSource, Log
from jaxlm.data.cache.artifacts import disk_full_errors, writable_folder
from jaxlm.data.sources.document_files import format_of, has_records

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_FILES = 100_000  # per pattern; more is most likely a typo


def expand_braces(pattern: str, key: str) -> list[str]:
    """Expands `x-{1..3}.txt` and `{a,b}/x.txt`, in order. `{01..10}` keeps leading zeros. Braces may be nested.

    Args:
        key: config path of the pattern, for messages.

    Raises:
        ConfigError: the pattern expands to more than 100,000 files.
    """
    start = pattern.find("{")
    while start != -1:
        end = _closing(pattern, start)
        choices = [] if end is None else _choices(pattern[start + 1 : end], key)
        if end is not None and choices:
            rests = expand_braces(pattern[end + 1 :], key)
            heads = [head for choice in choices for head in expand_braces(choice, key)]
            _check_number(len(heads) * len(rests), pattern, key)
            return [pattern[:start] + head + rest for head in heads for rest in rests]
        start = pattern.find("{", start + 1)
    return [pattern]


def before_wildcards(parts: Sequence[str], has_wildcard=glob.has_magic) -> Sequence[str]:
    """The parts of a path before its first wildcard, never including the last part."""
    for number, part in enumerate(parts[:-1]):
        if has_wildcard(part):
            return parts[:number]
    return parts[:-1]


def common_folder(folders: Sequence[str]) -> str:
    """The innermost common folder; "" if there is none."""
    levels = zip(*(folder.rstrip("/").split("/") for folder in folders), strict=False)
    return "/".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))


def _closing(pattern: str, start: int) -> int | None:
    depth = 0
    for position in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[position], 0)
        if depth == 0:
            return position
    return None


def _choices(inside: str, key: str) -> list[str]:
    """The alternatives inside braces; empty if the braces are literal characters."""
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        choices = _split(inside)
        return choices if len(choices) > 1 else []
    first, last = int(numbers[1]), int(numbers[2])
    _check_number(abs(last - first) + 1, f"{{{inside}}}", key)
    padded = any(len(text) > 1 and text.startswith("0") for text in numbers.groups())
    width = max(map(len, numbers.groups())) if padded else 0
    step = 1 if last >= first else -1
    return [f"{number:0{width}}" for number in range(first, last + step, step)]


def _split(inside: str) -> list[str]:
    """Splits at the commas outside nested braces."""
    choices, depth = [""], 0
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            choices.append("")
        else:
            choices[-1] += character
    return choices


def _check_number(number: int, pattern: str, key: str) -> None:
    if number > _MAX_FILES:
        raise ConfigError(f"{key}: '{pattern}' expands to {number:,} files; at most {_MAX_FILES:,} are allowed")


# Names of version fields in fsspec implementations, the most reliable first.
_TAGS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "content_md5")
_VERSION_FIELDS = (
    *_TAGS,
    *("mtime", "Last-Modified", "LastModified", "last_modified", "updated", "modified", "created"),
)
_LOG_INTERVAL_S = 2.0


class MirroredSource(DataSource):
    """A source that is read through a local copy. Concurrent processes make the copy only once."""

    num_bytes: int | None = None
    has_records: bool = True

    @abc.abstractmethod
    def _copy_path(self, mirror: Path) -> Path:
        """The copy: a file or a folder."""

    @abc.abstractmethod
    def _make_copy(self, copy: Path, log: Log) -> None:
        """Makes the copy atomically."""

    def _copied_files(self, copy: Path) -> list[tuple[str, Path]]:
        return [(self.name, copy)]

    def is_local(self, mirror: Path) -> bool:
        return self._copy_path(mirror).is_file()

    def paths(self, mirror: Path) -> list[tuple[str, Path]]:
        return self._copied_files(self._copy_path(mirror))

    def files(self, mirror: Path, log: Log) -> list[tuple[str, Path]]:
        copy = self._copy_path(mirror)
        if not self.is_local(mirror):
            with folder_lock(writable_folder(copy.parent), log), disk_full_errors(copy):
                if not self.is_local(mirror):  # another process may have copied it meanwhile
                    remove_leftovers(copy)
                    self._make_copy(copy, log)
        return self.paths(mirror)


@dataclass(frozen=True)
class RemoteFile(MirroredSource):
    """A file that fsspec can read.

    Attributes:
        key: config path of the URL, for messages.
        name: relative to its URL.
        version: changes when the content changes (ETag, checksum or time).
    """

    url: str
    key: str
    name: str
    size: int | None
    version: str

    @property
    def num_bytes(self) -> int | None:
        return self.size

    @property
    def identity(self) -> str | None:
        # A hash, because the URL may contain a signature.
        return hashlib.sha256(self._stated.encode()).hexdigest() if self.version and self.size is not None else None

    @property
    def _stated(self) -> str:
        return f"{self.url} {self.size} {self.version}"

    @property
    def has_records(self) -> bool:
        return has_records(_basename(self.url))

    def _copy_path(self, mirror: Path) -> Path:
        return mirror / copy_folder_name(self._stated) / _basename(self.url)

    def _make_copy(self, copy: Path, log: Log) -> None:
        fs, path = open_store(self.url, self.key)
        with atomic_file(copy) as unfinished:
            with _read_errors(self.url, self.key, local=copy.parent):
                fs.get_file(path, str(unfinished), callback=_progress_callback(self, log))
                fs.invalidate_cache(posixpath.dirname(path))
                now = _version(fs.info(path))
            size = unfinished.stat().st_size
            if self.size is not None and size != self.size:
                raise ConfigError(
                    f"{self.key}: {self.url}: received {size:,} bytes instead of {self.size:,}: the connection broke, or"
                    " the file changed during the copy. Start again"
                )
            # Other content must not be recorded for this version. Listings report times in other forms than the file itself.
            if now != self.version and now.split(" ")[0] == self.version.split(" ")[0] in _TAGS:
                raise ConfigError(
                    f"{self.key}: {self.url} changed during the copy: was {self.version}, is now {now}. Start again"
                )
        log(f"mirror: {self.url}: {size / 1e6:.1f} MB copied to {copy}")


@functools.cache  # one listing per process, so all callers see the same files
def list_remote(url: str, key: str) -> tuple[str, tuple[RemoteFile, ...]]:
    """The folder that names are relative to, and the files that a URL (file, folder or glob) matches, sorted by path."""
    fs, path = open_store(url, key)
    has_wildcard = _has_wildcard_http if url.startswith("http") else glob.has_magic
    with _read_errors(url, key):
        info = None if has_wildcard(path) or url.endswith("/") else fs.info(path)
        if has_wildcard(path):
            root, listing = "/".join(before_wildcards(path.split("/"), has_wildcard)), fs.glob(path, detail=True)
            listing = {name: info for name, info in listing.items() if info["type"] == "file"}
        elif info is None or info["type"] == "directory":
            root, listing = path.rstrip("/"), fs.find(path, detail=True)
            listing = {name: info for name, info in listing.items() if format_of(_basename(name))}
        else:
            root, listing = posixpath.dirname(path), {path: info}
        infos = {name: _complete_info(fs, name, info) for name, info in sorted(listing.items())}
    if not infos:
        raise ConfigError(f"{key}: '{url}' matches no readable file. Check the spelling, or list the folder")
    files = [
        RemoteFile(fs.unstrip_protocol(name), key, name, info.get("size"), _version(info))
        for name, info in infos.items()
    ]
    return root, tuple(files)


def _complete_info(fs: Any, path: str, info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The info from a listing, or from the file itself if the listing lacks size or version."""
    return info if info.get("size") is not None and _version(info) else fs.info(path)


def _version(info: Mapping[str, Any]) -> str:
    return next((f"{name} {info[name]}" for name in _VERSION_FIELDS if info.get(name)), "")


def _basename(path: str) -> str:
    return posixpath.basename(urlsplit(path).path if path.startswith("http") else path)


def _has_wildcard_http(path: str) -> bool:
    return "*" in path  # `?` and `[` are common in web addresses


def _progress_callback(file: RemoteFile, log: Log) -> Any:
    """An fsspec callback that logs the progress of a copy every two seconds."""
    from fsspec.callbacks import Callback

    class ProgressCallback(Callback):
        logged_at = time.monotonic()

        def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
            now = time.monotonic()
            if now - self.logged_at > _LOG_INTERVAL_S:
                self.logged_at = now
                total = "" if file.size is None else f" of {file.size / 1e6:.1f}"
                log(f"mirror: {file.url}: copying, {self.value / 1e6:.1f}{total} MB")

    return ProgressCallback()


def _read_errors(url: str, key: str, local: Path | None = None) -> AbstractContextManager[None]:
    """Converts errors of the remote side to `ConfigError`. Errors on the local disk, below `local`, are raised unchanged."""
    advice = "Check the address, the network and your credentials; or copy the files to a local folder and use that"
    return storage_errors(
        lambda reason: ConfigError(f"{key}: '{url}' cannot be read ({reason}). {advice}"), local=local
    )


def copy_folder_name(identity: str) -> str:
    """The name of a copy's folder in the mirror: a hash of what identifies the source."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]
