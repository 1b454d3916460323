"""Shares token caches and tokenizers through a URL: built by one machine, then used by the others.

Tokenizers are copied, and caches that cannot be read in blocks (`shared_cache.py`).
"""

import contextlib
import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import is_main_process
from jaxlm.core.safe_io import atomic_folder, folder_lock
from jaxlm.core.stores import is_url, local_copy, open_store, put_folder, storage_errors
from jaxlm.data.cache.cache_dir import disk_full_errors, writable_folder

_LOCAL = Path("cache")


@dataclass(frozen=True)
class CacheStore:
    """A folder of caches on the local disk, and where it is shared.

    Attributes:
        folder: the local folder.
        url: where its caches are shared; None if they are not.
        key: the configuration key, for messages.
    """

    folder: Path
    url: str | None
    key: str

    @staticmethod
    def at(cache_dir: str, key: str) -> "CacheStore":
        """The store for a `cache_dir`. A URL is copied to a folder in `cache/`."""
        if is_url(cache_dir):
            return CacheStore(local_copy(_LOCAL, cache_dir), cache_dir.rstrip("/"), key)
        return CacheStore(Path(cache_dir), None, key)

    def child(self, name: str) -> "CacheStore":
        """The store of a folder in this one."""
        return CacheStore(self.folder / name, None if self.url is None else f"{self.url}/{name}", self.key)

    def check(self) -> None:
        """Raises `ConfigError` if the URL cannot be used at all. Writes nothing."""
        if self.url is not None:
            open_store(self.url, self.key)

    def url_of(self, folder: Path) -> str:
        """Where a folder in `self.folder` is shared."""
        assert self.url is not None, "only the folders of a URL are shared"
        return f"{self.url}/{folder.relative_to(self.folder).as_posix()}"

    @contextlib.contextmanager
    def shared(self, folder: Path, last: str, log: Callable[[str], None]) -> Iterator[None]:
        """Copies a cache from the URL before the block, if it is there and not here, and to the URL after the block.

        Args:
            folder: where the block opens or makes the cache, in `self.folder`.
            last: the file that is uploaded last. A copy without it is not complete.

        Raises:
            ConfigError: the URL cannot be read or written.
        """
        if self.url is None:
            yield
            return
        url = self.url_of(folder)
        if not folder.exists():
            with folder_lock(writable_folder(folder.parent), log):
                self._fetch(url, folder, last, log)
        yield
        if is_main_process():
            self._upload(url, folder, last, log)

    def _fetch(self, url: str, folder: Path, last: str, log: Callable[[str], None]) -> None:
        fs, root = open_store(url, self.key)
        with disk_full_errors(folder), self.errors("read", folder):
            if folder.exists() or not fs.exists(f"{root}/{last}"):
                return
            log(f"{self.key}: copying {url} to {folder}")
            with atomic_folder(folder) as unfinished:
                for path in fs.find(root):
                    local = unfinished / posixpath.relpath(path, root)
                    local.parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(path, str(local))

    def _upload(self, url: str, folder: Path, last: str, log: Callable[[str], None]) -> None:
        fs, root = open_store(url, self.key)
        with self.errors("write to", folder):
            if fs.exists(f"{root}/{last}"):
                return
            log(f"{self.key}: sharing {folder} at {url}")
            put_folder(fs, folder, root, last)

    def errors(self, doing: str, folder: Path) -> contextlib.AbstractContextManager[None]:
        """Converts errors of the store to `ConfigError`. Those of the local `folder` are raised unchanged.

        Args:
            doing: `read` or `write to`, for the message.
        """
        advice = "Check the address, the network and your credentials, or set it to a local folder"
        error = lambda reason: ConfigError(f"{self.key}: cannot {doing} {self.url} ({reason}). {advice}")  # noqa: E731
        return storage_errors(error, local=folder)
