"""Token caches on disk: one memory-mapped array of tokens, the offset of each document, and the provenance of each token.

<cache_dir>/<split>/tokens.bin     uint16, or uint32 for vocabularies above 65,536
                    offsets.bin    int64 [documents + 1]
                    targets.bin    uint8: target mask: 1 if the loss is computed on the token; no file means all tokens
                    numbers.bin    float32 [documents, N]: numbers that belong to each document; no file means none
                    cache.json     the cache key, counts, and checksums, including its own
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from jaxlm.data.cache.artifacts import Artifact, DamagedError, Key, Kind
from jaxlm.data.sources.record_files import TextFile, files_key
from jaxlm.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxlm.data.cache.token_blocks import TokenBlocks

TOKENS, OFFSETS, TARGETS, NUMBERS = "tokens.bin", "offsets.bin", "targets.bin", "numbers.bin"
GROUPS = "documents_of_groups"
"""Key of the metadata; caches of earlier versions do not have it."""


def cache_key(files: Sequence[TextFile], tokenizer: Tokenizer, *, bos: bool | list[int], eos: bool) -> Key:
    """The part of a token cache's key that does not depend on the format.

    Args:
        bos: whether documents begin with BOS, or the other ids that they begin with.
    """
    return {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "enforce_bos": bos,
        "enforce_eos": eos,
        **files_key(files),
    }


@dataclass(frozen=True)
class TokenCache:
    """An open token cache.

    Attributes:
        folder: folder of the cache; if its tokens are at a URL, of its other files.
        tokens: [num_tokens], memory-mapped, or in blocks at a URL.
        offsets: int64 [documents + 1]: the first token of each document, then the total number of tokens.
        vocab_size: all ids are below this.
        num_bytes: bytes of the documents' text.
        fingerprint: CRC-32 of the content; equal for equal data.
        documents_of: file name -> number of documents from that file, in order.
        target_mask: uint8 [num_tokens], 1 where the loss is computed on a token; None means all tokens.
        blocks: the same as `tokens` if they are at a URL; None if they are on the disk.
        numbers: float32 [documents, N], numbers that belong to each document, such as rewards; None means none.
        documents_of_groups: int64, number of documents from each row group of a Parquet file, or from each other file; None
            in a cache of an earlier version.
    """

    folder: Path
    tokens: "np.ndarray | TokenBlocks"
    offsets: np.ndarray
    vocab_size: int
    num_bytes: int
    fingerprint: str
    documents_of: Mapping[str, int]
    target_mask: np.ndarray | None = None
    blocks: "TokenBlocks | None" = None
    numbers: np.ndarray | None = None
    documents_of_groups: np.ndarray | None = None

    @property
    def location(self) -> str:
        """The folder or URL of the tokens."""
        return str(self.folder) if self.blocks is None else self.blocks.url

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including special tokens."""
        return len(self.tokens)

    @property
    def trained_share(self) -> float:
        """The fraction of tokens that the loss is computed on, before documents are packed."""
        is_target = self.read_target_mask(np.zeros(1, np.int64), self.num_tokens)[0]
        is_target[self.offsets[:-1][np.diff(self.offsets) > 0]] = False  # the first token of a document is not a target
        return float(is_target.mean())

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int32 [len(starts), length]: `length` tokens from each start on; 0 past the end of the cache.

        Raises:
            DamagedError: an id is outside the vocabulary. The message names the cache file, the token, and its source.
        """
        if self.blocks is not None:
            self.blocks.fetch(starts, length)
        ids = np.zeros((len(starts), length), np.int32)
        for row, start in zip(ids, starts.tolist(), strict=True):
            available = self.tokens[start : start + length]
            row[: len(available)] = available
        if ids.max(initial=0) >= self.vocab_size:
            row, column = np.unravel_index(int(ids.argmax()), ids.shape)
            self._refuse(int(starts[row] + column), int(ids[row, column]))
        return ids

    def read_ranges(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int32 [sum of `lengths`]: some ranges of tokens, one after another. Raises like `read`."""
        if self.blocks is not None:
            self.blocks.fetch(starts, lengths)
        parts = [self.tokens[start : start + n] for start, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
        ids = np.concatenate([np.zeros(0, np.int32), *parts], dtype=np.int32)
        if ids.max(initial=0) >= self.vocab_size:
            at = int(ids.argmax())
            before = np.cumsum(lengths) - lengths
            number = int(np.searchsorted(before, at, side="right")) - 1
            self._refuse(int(starts[number] + at - before[number]), int(ids[at]))
        return ids

    def _refuse(self, position: int, token: int) -> NoReturn:
        raise DamagedError(
            f"{self.location}/{TOKENS}: token {position} ({self.source_of(position)}) is {token}, but the vocabulary has"
            f" {self.vocab_size}. The cache is damaged: delete {self.location} and start again"
        )

    def read_target_mask(self, starts: np.ndarray, length: int) -> np.ndarray:
        """bool [len(starts), length]: whether the loss is computed on each token, for `length` tokens from each start on."""
        if self.target_mask is None:
            return np.ones((len(starts), length), bool)
        target_mask = np.zeros((len(starts), length), bool)
        for row, start in zip(target_mask, starts.tolist(), strict=True):
            available = self.target_mask[start : start + length]
            row[: len(available)] = available
        return target_mask

    def source_of(self, position: int) -> str:
        """The document and file that a token came from, for messages."""
        document = int(np.searchsorted(self.offsets, position, side="right")) - 1
        for name, number in self.documents_of.items():
            if document < number:
                return f"document {document + 1} of {name}"
            document -= number
        raise AssertionError(f"no source has token {position}")


def read_cache(stored: Artifact, blocks: "TokenBlocks | None" = None) -> TokenCache:
    """Opens a cache and verifies its checksums.

    Args:
        blocks: its tokens, if they are not in the folder. They are verified as they are read.

    Raises:
        DamagedError: a file is missing or damaged.
    """
    metadata, crc32 = stored.metadata, stored.crc32
    return TokenCache(
        stored.folder,
        stored.raw(TOKENS, metadata["dtype"]) if blocks is None else blocks,
        np.array(stored.raw(OFFSETS, np.int64)),
        target_mask=stored.raw(TARGETS) if TARGETS in crc32 else None,
        vocab_size=stored.made_from["vocab_size"],
        num_bytes=metadata["num_bytes"],
        fingerprint="".join(f"{crc32[name]:08x}" for name in (TOKENS, OFFSETS, TARGETS, NUMBERS) if name in crc32),
        documents_of=dict(zip(stored.made_from["files"], metadata["documents_of_files"], strict=True)),
        blocks=blocks,
        # All documents have the same number, which follows from the size.
        numbers=stored.raw(NUMBERS, np.float32).reshape(metadata["num_documents"], -1) if NUMBERS in crc32 else None,
        documents_of_groups=np.array(metadata[GROUPS], np.int64) if GROUPS in metadata else None,
    )


_FACTS = frozenset({"dtype", "num_tokens", "num_documents", "num_bytes", "documents_of_files"})
TOKEN_CACHE = Kind("token cache", read_cache, _FACTS, frozenset({GROUPS}))


@dataclass(frozen=True)
class Provenance:
    """Says which URL each token of a cache came from. Each URL fills one contiguous range of tokens.

    Attributes:
        urls: URLs in configuration order.
        ends: int64 [urls], end (exclusive) of each URL's range of tokens.
    """

    urls: tuple[str, ...]
    ends: np.ndarray

    def of(self, positions: np.ndarray) -> np.ndarray:
        """int32: the index of the URL of each token; the last URL for positions past the end."""
        numbers = np.searchsorted(self.ends, positions, side="right")
        return np.minimum(numbers, len(self.urls) - 1).astype(np.int32)


def make_provenance(cache: TokenCache, urls: Sequence[str], files_until: Sequence[int]) -> Provenance:
    """Args: files_until: cumulative number of the cache's files up to and including each URL."""
    documents = np.concatenate([[0], np.cumsum(list(cache.documents_of.values()))]).astype(np.int64)
    return Provenance(tuple(urls), cache.offsets[documents[np.asarray(files_until)]])
