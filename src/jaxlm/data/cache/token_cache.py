"""Tokens on disk: one long array mapped into memory, the offset of each document in it, and the URL each token came from.

<cache_dir>/<split>/tokens.bin     uint16, or uint32 for vocabularies above 65,536
                    offsets.bin    int64 [documents + 1]
                    targets.bin    uint8: 1 for each token that is asked for; no such file where all are
                    cache.json     what it was made from, and checksums, its own among them
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.cache.cache_key import CacheKey, check_same

TOKENS, OFFSETS, TARGETS, ABOUT = "tokens.bin", "offsets.bin", "targets.bin", "cache.json"
_SEAL = "seal"


class DamagedCacheError(ConfigError):
    """The files of a token cache are not what was written."""


@dataclass(frozen=True)
class TokenCache:
    """An open cache.

    Attributes:
        folder: where it is.
        tokens: [num_tokens], mapped into memory.
        offsets: int64 [documents + 1]: where each document begins, and where the last one ends.
        vocab_size: ids are below this.
        num_bytes: of the documents' text.
        fingerprint: CRC-32 of tokens and offsets: equal for equal data.
        documents_of: how many documents each file gave, in their order.
        targets: uint8 [num_tokens], 1 for each token that is asked for; None where all are.
    """

    folder: Path
    tokens: np.ndarray
    offsets: np.ndarray
    vocab_size: int
    num_bytes: int
    fingerprint: str
    documents_of: Mapping[str, int]
    targets: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Special tokens included."""
        return len(self.tokens)

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int32 [len(starts), length]: the tokens from each start on, 0 beyond the last one.

        Raises:
            DamagedCacheError: an id that the vocabulary does not have; names cache file, place, and source.
        """
        ids = np.zeros((len(starts), length), np.int32)
        for row, start in zip(ids, starts.tolist(), strict=True):
            found = self.tokens[start : start + length]
            row[: len(found)] = found
        if ids.max(initial=0) >= self.vocab_size:
            row, column = np.unravel_index(int(ids.argmax()), ids.shape)
            place = int(starts[row] + column)
            raise DamagedCacheError(
                f"{self.folder / TOKENS}: token {place} ({self.source_of(place)}) is {ids[row, column]},"
                f" but the vocabulary has {self.vocab_size}. The cache is damaged: delete {self.folder} and start again"
            )
        return ids

    def read_targets(self, starts: np.ndarray, length: int) -> np.ndarray:
        """bool [len(starts), length]: whether the tokens from each start on are asked for."""
        if self.targets is None:
            return np.ones((len(starts), length), bool)
        asked = np.zeros((len(starts), length), bool)
        for row, start in zip(asked, starts.tolist(), strict=True):
            found = self.targets[start : start + length]
            row[: len(found)] = found
        return asked

    def source_of(self, place: int) -> str:
        """The file and the document in it that a token came from, for messages."""
        document = int(np.searchsorted(self.offsets, place, side="right")) - 1
        for name, number in self.documents_of.items():
            if document < number:
                return f"document {document + 1} of {name}"
            document -= number
        raise AssertionError(f"no source has token {place}")


def open_cache(folder: Path, made_from: CacheKey | None = None) -> TokenCache:
    """An existing cache, its files checked.

    Raises:
        ConfigError: it was made from something else than `made_from`.
        DamagedCacheError: a file is missing, or is not what was written.
    """
    about = read_about(folder)
    if made_from is not None:
        check_same("token cache", folder, about["made_from"], made_from)
    dtype = np.dtype(about["dtype"])
    # A plain view: slices of `memmap` itself are slow to make.
    tokens = np.asarray(np.memmap(_sized(folder / TOKENS, about["num_tokens"] * dtype.itemsize), dtype, mode="r"))
    _check_sum(folder / TOKENS, tokens, about["crc32"][TOKENS])
    offsets = np.fromfile(_sized(folder / OFFSETS, (about["num_documents"] + 1) * 8), np.int64)
    _check_sum(folder / OFFSETS, offsets, about["crc32"][OFFSETS])
    targets = None
    if TARGETS in about["crc32"]:
        targets = np.asarray(np.memmap(_sized(folder / TARGETS, about["num_tokens"]), np.uint8, mode="r"))
        _check_sum(folder / TARGETS, targets, about["crc32"][TARGETS])
    return TokenCache(
        folder,
        tokens,
        offsets,
        targets=targets,
        vocab_size=about["made_from"]["vocab_size"],
        num_bytes=about["num_bytes"],
        fingerprint="".join(
            f"{about['crc32'][name]:08x}" for name in (TOKENS, OFFSETS, TARGETS) if name in about["crc32"]
        ),
        documents_of=dict(zip(about["made_from"]["files"], about["documents_of_files"], strict=True)),
    )


def read_about(folder: Path) -> dict[str, Any]:
    """What `cache.json` says of a finished cache: `made_from`, counts, checksums."""
    try:
        about = json.loads((folder / ABOUT).read_text())
    except FileNotFoundError:
        raise _damaged(folder / ABOUT, "the file is missing") from None
    except ValueError as error:
        raise _damaged(folder / ABOUT, f"not JSON ({error})") from error
    expected = {"made_from", "dtype", "num_tokens", "num_documents", "num_bytes", "documents_of_files", "crc32"}
    if not isinstance(about, dict) or about.keys() != expected | {_SEAL}:
        raise _damaged(folder / ABOUT, "other keys than this version of jaxlm writes")
    if about.pop(_SEAL) != _seal(about):
        raise _damaged(folder / ABOUT, "its content is not what was written")
    return about


def write_about(path: Path, about: Mapping[str, Any]) -> None:
    """Writes what `read_about` reads, with a checksum of itself."""
    path.write_text(json.dumps({**about, _SEAL: _seal(about)}))


def _seal(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about).encode())


def _sized(path: Path, size: int) -> Path:
    """The path of a file that is there and has so many bytes."""
    if not path.is_file():
        raise _damaged(path, "the file is missing")
    if path.stat().st_size != size:
        raise _damaged(path, f"{path.stat().st_size:,} bytes instead of {size:,}")
    return path


def _check_sum(path: Path, content: np.ndarray, crc32: int) -> None:
    if zlib.crc32(content.data) != crc32:
        raise _damaged(path, "its content is not what was written")


def _damaged(path: Path, problem: str) -> DamagedCacheError:
    return DamagedCacheError(
        f"the token cache is damaged: {path}: {problem}. Delete the folder {path.parent}; it will be built again"
    )


@dataclass(frozen=True)
class Provenance:
    """URLs, and the stretches of a cache that they fill one after another.

    Attributes:
        urls: in the order of the configuration.
        ends: int64 [urls], the place of the first token behind each.
    """

    urls: tuple[str, ...]
    ends: np.ndarray

    def of(self, places: np.ndarray) -> np.ndarray:
        """int32, the number of the URL that each token is from; the last one's beyond the end."""
        numbers = np.searchsorted(self.ends, places, side="right")
        return np.minimum(numbers, len(self.urls) - 1).astype(np.int32)


def make_provenance(cache: TokenCache, urls: Sequence[str], files_until: Sequence[int]) -> Provenance:
    """Args: files_until: how many of the cache's files come from each URL and those before it."""
    documents = np.concatenate([[0], np.cumsum(list(cache.documents_of.values()))]).astype(np.int64)
    return Provenance(tuple(urls), cache.offsets[documents[np.asarray(files_until)]])
