"""Shares token caches and tokenizers through a store at a URL: built by one machine, then used by the others.

Tokenizers are copied, and caches that cannot be read in blocks (`CacheStore`). Other caches are opened in the store without
copying their tokens (`open_in_store`).

<local folder>/<split>          a whole cache: built on this machine, or copied because the store has no blocks.crc32
               <split>.parts    everything except tokens.bin, which is read in blocks
"""

import contextlib
import posixpath
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import is_main_process
from jaxlm.core.safe_io import atomic_folder, folder_lock, read_bytes, read_stored
from jaxlm.core.stores import AT_START_S, is_url, local_copy, open_store, put_folder, retried, storage_errors
from jaxlm.data.base import Log
from jaxlm.data.cache.cache_key import CacheKey, disk_full_errors, writable_folder
from jaxlm.data.cache.token_blocks import BLOCKS, BlockMirror, BlockSums, TokenBlocks
from jaxlm.data.cache.token_cache import METADATA, TOKENS, DamagedCacheError, TokenCache, open_cache, parse_metadata

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
        """Returns the URL at which a folder in `self.folder` is shared."""
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


class _UploadError(Exception):
    pass


def find_blocks(store: CacheStore, folder: Path, mirror: BlockMirror) -> tuple[TokenBlocks, bytes] | None:
    """The tokens of a cache in the store, and the content of its `cache.json`. Reads nothing else, and writes nothing.

    Returns:
        None if the cache is in `folder`, or the store does not have it, or it has no checksums of blocks.

    Raises:
        ConfigError: the store cannot be read, or the cache there is damaged.
    """
    if store.url is None or folder.exists():
        return None
    fs, root = open_store(url := store.url_of(folder), store.key)
    with store.errors("read", folder):
        try:
            raw = retried(lambda: read_stored(fs, f"{root}/{METADATA}"), AT_START_S)
            raw_sums = retried(lambda: read_stored(fs, f"{root}/{BLOCKS}"), AT_START_S)
            size = retried(lambda: fs.info(f"{root}/{TOKENS}")["size"], AT_START_S)
        except FileNotFoundError:
            return None
    metadata = parse_metadata(raw, f"{url}/{METADATA}")
    sums = BlockSums.parse(raw_sums, metadata)
    if sums is None:
        return None
    if size != sums.num_bytes:
        raise DamagedCacheError(
            f"the token cache is damaged: {url}/{TOKENS}: its size is {size:,} bytes instead of {sums.num_bytes:,}. Delete"
            f" {url} to rebuild it"
        )
    return TokenBlocks(url, store.key, sums, np.dtype(metadata["dtype"]), mirror), raw


def open_in_store(
    store: CacheStore, folder: Path, made_from: CacheKey, mirror: BlockMirror, log: Log
) -> TokenCache | None:
    """Opens a cache whose tokens stay in the store. Returns and raises like `find_blocks`.

    Raises:
        ConfigError: the cache was built from something else.
    """
    cached_blocks = find_blocks(store, folder, mirror)
    if cached_blocks is None:
        return None
    blocks, metadata = cached_blocks
    parts = parts_of(folder)
    with folder_lock(writable_folder(folder.parent), log):
        # The cache in the store may have been deleted and built again.
        if not (parts / METADATA).is_file() or read_bytes(parts / METADATA) != metadata:
            shutil.rmtree(parts, ignore_errors=True)
            _copy_parts(store, blocks.url, parts)
    mirror.trim()
    log(f"{store.key}: {blocks.describe()}")
    return open_cache(parts, made_from, blocks)


def describe_cache(store: CacheStore, folder: Path, mirror: BlockMirror) -> str:
    """Says what a start will do about a cache. Writes nothing, and raises like `find_blocks`."""
    if folder.exists():
        return f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e9:,.3g} GB in {folder}"
    if cached_blocks := find_blocks(store, folder, mirror):
        return cached_blocks[0].describe()
    if store.url is None:
        return f"not built yet: the text is tokenized to {folder}"
    fs, root = open_store(url := store.url_of(folder), store.key)
    with store.errors("read", folder):
        infos = fs.find(root, detail=True) if fs.exists(f"{root}/{METADATA}") else {}
    if not infos:
        return f"not built yet: the text is tokenized to {folder}, and the cache uploaded to {url}"
    num_bytes = sum(info["size"] for info in infos.values())
    return f"{num_bytes / 1e9:,.3g} GB at {url}, without checksums of blocks, copied as a whole to {folder}"


def share_sums(store: CacheStore, folder: Path, log: Log) -> None:
    """Uploads the checksums of the blocks of a whole cache, if the store lacks them. Does nothing if it cannot be written."""
    if store.url is None or not is_main_process() or not folder.exists():
        return
    metadata = parse_metadata(read_bytes(folder / METADATA), str(folder / METADATA))
    fs, root = open_store(url := store.url_of(folder), store.key)
    try:
        with storage_errors(_UploadError):
            if not _has_sums(fs, f"{root}/{BLOCKS}", metadata):
                sums = BlockSums.of_file(folder / TOKENS, metadata["crc32"][TOKENS])
                fs.pipe_file(f"{root}/{BLOCKS}", sums.to_bytes())
    except _UploadError as error:
        log(f"{store.key}: {url}/{BLOCKS} cannot be written ({error}), so other machines copy the cache as a whole")


def parts_of(folder: Path) -> Path:
    """The local folder with what is not read in blocks."""
    return folder.with_name(f"{folder.name}.parts")


def _has_sums(fs: Any, path: str, metadata: dict[str, Any]) -> bool:
    try:
        return BlockSums.parse(read_stored(fs, path), metadata) is not None
    except FileNotFoundError:
        return False


def _copy_parts(store: CacheStore, url: str, parts: Path) -> None:
    fs, root = open_store(url, store.key)
    with disk_full_errors(parts), store.errors("read", parts), atomic_folder(parts) as unfinished:
        unfinished.mkdir()
        for path in retried(lambda: fs.find(root), AT_START_S):
            name = posixpath.relpath(path, root)
            if name not in (TOKENS, BLOCKS):
                retried(lambda path=path, name=name: fs.get_file(path, str(unfinished / name)), AT_START_S)
