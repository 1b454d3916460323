"""Remembers the content of remote text, so that it is read once, and not by every machine at every start.

<folder of the source>/text.json    identity of a remote file, as the server reports it -> SHA-256 of its content

Caches and runs are identified by content. A file whose identity is unknown, because it is new or was changed, is read.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxlm.core.runtime import is_main_process
from jaxlm.core.safe_io import atomic_file, folder_lock, read_bytes, read_stored
from jaxlm.core.stores import AT_START_S, open_store, retried, storage_errors
from jaxlm.data.base import Log
from jaxlm.data.cache.cache_dir import disk_full_errors, writable_folder
from jaxlm.data.cache.cache_store import CacheStore

_NAME = "text.json"


class _UploadError(Exception):
    pass


@dataclass(frozen=True)
class TextLedger:
    """The ledger of a source. Args: store: the source's caches, with which it is shared."""

    store: CacheStore

    def known(self, identities: Collection[str]) -> dict[str, str]:
        """The SHA-256 of known contents, by identity. Raises `ConfigError` if the store cannot be read."""
        digests = self._here()
        if self.store.url is not None and not digests.keys() >= set(identities):
            digests = self._in_store() | digests
        return {identity: digests[identity] for identity in identities if identity in digests}

    def add(self, digests: Mapping[str, str], log: Log) -> None:
        """Records contents: here, and on process 0 in the store, unless it cannot be written."""
        if not digests:
            return
        path = self.store.folder / _NAME
        with folder_lock(writable_folder(path.parent), log), disk_full_errors(path):
            merged = self._here() | dict(digests)
            with atomic_file(path) as unfinished:
                unfinished.write_bytes(_json(merged))
        if self.store.url is None or not is_main_process():
            return
        fs, root = open_store(self.store.url, self.store.key)
        merged = self._in_store() | merged
        try:
            with storage_errors(_UploadError):
                fs.makedirs(root, exist_ok=True)
                retried(lambda: fs.pipe_file(f"{root}/{_NAME}", _json(merged)), AT_START_S)
        except _UploadError as error:
            log(
                f"{self.store.key}: {self.store.url}/{_NAME} cannot be written ({error}), so other machines read the text"
            )

    def _here(self) -> dict[str, str]:
        path = self.store.folder / _NAME
        return _parse(read_bytes(path)) if path.is_file() else {}

    def _in_store(self) -> dict[str, str]:
        assert self.store.url is not None
        fs, root = open_store(self.store.url, self.store.key)
        with self.store.errors("read", self.store.folder):
            try:
                return _parse(retried(lambda: read_stored(fs, f"{root}/{_NAME}"), AT_START_S))
            except FileNotFoundError:
                return {}


def _json(digests: Mapping[str, str]) -> bytes:
    return json.dumps(digests, indent=1).encode()


def _parse(raw: bytes) -> dict[str, str]:
    """Empty if the content is damaged: the text is then read again."""
    try:
        digests = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return {str(identity): str(digest) for identity, digest in digests.items()} if isinstance(digests, dict) else {}
