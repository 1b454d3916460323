"""Opens token caches in a store at a URL without copying their tokens.

<local folder>/<split>          a whole cache: built on this machine, or copied because the store has no blocks.crc32
               <split>.parts    everything except tokens.bin, which is read in blocks
"""

import contextlib
import shutil
from typing import Any

import numpy as np

from jaxlm.core.safe_io import atomic_folder, folder_lock, read_bytes, read_stored
from jaxlm.core.stores import AT_START_S, open_store, retried
from jaxlm.data.base import Log
from jaxlm.data.cache.artifacts import METADATA, Artifacts, Key, disk_full_errors, writable_folder
from jaxlm.data.cache.token_blocks import BLOCKS, BlockMirror, BlockSums, TokenBlocks
from jaxlm.data.cache.token_cache import TOKEN_CACHE, TOKENS, TokenCache, read_cache


def find_blocks(store: Artifacts, name: str, mirror: BlockMirror) -> tuple[TokenBlocks, bytes] | None:
    """The tokens of a cache in the store, and the content of its `cache.json`. Reads nothing else, and writes nothing.

    Returns:
        None if the cache is on this machine, or the store does not have it, or it has no checksums of blocks.

    Raises:
        ConfigError: the store cannot be read, or the cache there is damaged.
    """
    if store.url is None or (store.folder / name).exists():
        return None
    fs, root = open_store(url := store.url_of(name), store.key)
    with store.errors("read", store.folder):
        try:
            raw = retried(lambda: read_stored(fs, f"{root}/{METADATA}"), AT_START_S)
            raw_sums = retried(lambda: read_stored(fs, f"{root}/{BLOCKS}"), AT_START_S)
            size = retried(lambda: fs.info(f"{root}/{TOKENS}")["size"], AT_START_S)
        except FileNotFoundError:
            return None
    metadata = TOKEN_CACHE.parse(raw, f"{url}/{METADATA}")
    sums = BlockSums.parse(raw_sums, metadata)
    if sums is None:
        return None
    if size != sums.num_bytes:
        raise TOKEN_CACHE.damaged(f"{url}/{TOKENS}", f"its size is {size:,} bytes instead of {sums.num_bytes:,}")
    return TokenBlocks(url, store.key, sums, np.dtype(metadata["dtype"]), mirror), raw


def open_in_store(store: Artifacts, name: str, made_from: Key, mirror: BlockMirror, log: Log) -> TokenCache | None:
    """Opens a cache whose tokens stay in the store. Returns and raises like `find_blocks`.

    Raises:
        ConfigError: the cache was built from something else.
    """
    cached_blocks = find_blocks(store, name, mirror)
    if cached_blocks is None:
        return None
    blocks, metadata = cached_blocks
    parts = store.folder / f"{name}.parts"
    with folder_lock(writable_folder(parts.parent), log):
        # The cache in the store may have been deleted and built again.
        if not (parts / METADATA).is_file() or read_bytes(parts / METADATA) != metadata:
            shutil.rmtree(parts, ignore_errors=True)
            with disk_full_errors(parts), atomic_folder(parts) as unfinished:
                unfinished.mkdir()
                store.copy(name, unfinished, but=(TOKENS, BLOCKS))
    mirror.trim()
    log(f"{store.key}: {blocks.describe()}")
    stored = TOKEN_CACHE.at(parts)
    TOKEN_CACHE.check_key(blocks.url, stored.made_from, made_from)
    return read_cache(stored, blocks)


def describe_cache(store: Artifacts, name: str, mirror: BlockMirror) -> str:
    """Says what a start will do about a cache. Writes nothing, and raises like `find_blocks`."""
    folder = store.folder / name
    if folder.exists():
        return f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e9:,.3g} GB in {folder}"
    if cached_blocks := find_blocks(store, name, mirror):
        return cached_blocks[0].describe()
    if store.url is None:
        return f"not built yet: the text is tokenized to {folder}"
    fs, root = open_store(url := store.url_of(name), store.key)
    with store.errors("read", folder):
        infos = fs.find(root, detail=True) if fs.exists(f"{root}/{METADATA}") else {}
    if not infos:
        return f"not built yet: the text is tokenized to {folder}, and the cache uploaded to {url}"
    num_bytes = sum(info["size"] for info in infos.values())
    return f"{num_bytes / 1e9:,.3g} GB at {url}, without checksums of blocks, copied as a whole to {folder}"


def share_sums(store: Artifacts, name: str, log: Log) -> None:
    """Uploads the checksums of the blocks of a whole cache, if the store lacks them. Does nothing if it cannot be written."""

    def missing(fs: Any, path: str) -> bytes | None:
        metadata = TOKEN_CACHE.at(store.folder / name).metadata
        with contextlib.suppress(FileNotFoundError):
            if BlockSums.parse(read_stored(fs, path), metadata) is not None:
                return None
        return BlockSums.of_file(store.folder / name / TOKENS, metadata["crc32"][TOKENS]).to_bytes()

    store.offer(f"{name}/{BLOCKS}", missing, log, "copy the cache as a whole")
