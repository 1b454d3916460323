"""Reads the tokens of a cache at a URL in blocks: each is checked and kept in a mirror of limited size.

blocks.crc32, next to tokens.bin in the store, has the checksum of each block. Caches that have none are copied as a whole.

The mirror is a folder with copies of blocks, of which the least recently used are deleted first:

cache/blocks/<identity of the file>/<number of the block>
             .size    bytes that are counted against the limit, at least those that the blocks take
             .lock    held while a block is written or deleted

Several processes may share the folder. A block is complete or absent: it is renamed into place. Nothing is synced to disk:
if the machine crashes, a block may be left with a wrong checksum, and readers then replace it.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import SMALL, exclusive, open_regular, read_bytes, temporary_path
from jaxlm.core.stores import WHILE_TRAINING_S, open_store, retried, storage_errors
from jaxlm.data.cache.artifacts import disk_full_errors, writable_folder
from jaxlm.data.cache.token_cache import TOKEN_CACHE, TOKENS

FOLDER = Path("cache/blocks")
_NUM_LOCKS = 64  # blocks that share a lock wait for each other's download
_SPARE = 16  # once full, this fraction of the limit is freed, so that not every block needs a listing


class _Block(NamedTuple):
    used_ns: int
    num_bytes: int
    path: Path


@dataclass(frozen=True)
class BlockMirror:
    """The blocks on this machine.

    Attributes:
        folder: where they are.
        max_bytes: their files never take more than this in total, unfinished files included.
    """

    folder: Path
    max_bytes: int

    def trim(self) -> None:
        """Deletes blocks until the limit holds, which may be lower than that of an earlier start."""
        if self.folder.is_dir():
            with self._locked():
                self._count(self._free(0))

    def read(self, name: str, begin: int, end: int, num_bytes: int) -> bytes | None:
        """Some bytes of a block, which then counts as used; None if it is not here, or has another size than `num_bytes`."""
        try:
            with open(self.folder / name, "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != num_bytes:
                    return None
                os.utime(file.fileno())
                return os.pread(file.fileno(), end - begin, begin)
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """Tells whether a block is here."""
        return (self.folder / name).is_file()

    def put(self, name: str, content: bytes) -> None:
        """Stores a block, if the limit allows any block of its size. It replaces one of the same name.

        Raises:
            ConfigError: the folder is not writable, or the disk is full.
        """
        if len(content) > self.max_bytes:
            return
        path = self.folder / name
        with self._locked(), disk_full_errors(self.folder):
            path.unlink(missing_ok=True)
            # Counted before it is written: if this process dies, too much is counted, until the next listing.
            self._count(self._with_room_for(len(content)) + len(content))
            path.parent.mkdir(exist_ok=True)
            unfinished = temporary_path(path)
            try:
                unfinished.write_bytes(content)
                os.replace(unfinished, path)
            finally:
                unfinished.unlink(missing_ok=True)

    def num_bytes(self, identity: str) -> int:
        """Bytes of the blocks of a file that are here."""
        return sum(block.num_bytes for block in _blocks_in(self.folder / identity))

    @contextlib.contextmanager
    def downloading(self, name: str) -> Iterator[None]:
        """Waits while another thread or process of this machine downloads the block. The lock of a killed process is free."""
        with exclusive(writable_folder(self.folder) / f".lock-{zlib.crc32(name.encode()) % _NUM_LOCKS}"):
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with exclusive(writable_folder(self.folder) / ".lock"):
            yield

    def _with_room_for(self, num_bytes: int) -> int:
        """The bytes of all blocks, after some were deleted if that many more would exceed the limit."""
        try:
            counted = int(read_bytes(self.folder / ".size", SMALL))
        except (FileNotFoundError, ValueError):
            counted = self.max_bytes  # unknown
        return counted if counted + num_bytes <= self.max_bytes else self._free(num_bytes)

    def _free(self, num_bytes: int) -> int:
        """Lists the blocks, deletes the oldest so that `num_bytes` more fit, and returns the bytes of the others."""
        for leftover in self.folder.glob(f"*/*.{platform.node()}-*.tmp"):  # of killed processes: writers hold the lock
            leftover.unlink(missing_ok=True)
        blocks = sorted(block for folder in self.folder.iterdir() for block in _blocks_in(folder))
        total = sum(block.num_bytes for block in blocks)
        if total + num_bytes <= self.max_bytes:
            return total
        allowed = self.max_bytes - max(num_bytes, self.max_bytes // _SPARE)
        for block in blocks:
            if total <= allowed:
                break
            block.path.unlink(missing_ok=True)
            total -= block.num_bytes
            with contextlib.suppress(OSError):  # other blocks of the file are there
                block.path.parent.rmdir()
        return total

    def _count(self, num_bytes: int) -> None:
        (self.folder / ".size").write_text(f"{num_bytes:020d}")


def _blocks_in(folder: Path) -> list[_Block]:
    if not folder.is_dir():
        return []
    blocks = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                status = entry.stat()
                blocks.append(_Block(status.st_mtime_ns, status.st_size, Path(entry.path)))
    return blocks


BLOCKS = "blocks.crc32"
BLOCK_BYTES = 1 << 18  # see docs/design/0014
_HEADER = ("block_bytes", "num_bytes", "tokens_crc32")
_CONCURRENT_DOWNLOADS = 32
_MAX_AHEAD = 512  # blocks that wait to be read ahead
_PAUSE_S = 30.0  # without reading ahead, after a failure
_TRIES_IF_DAMAGED = 3  # it may be the transfer that is damaged


@dataclass(frozen=True)
class BlockSums:
    """The content of the file `BLOCKS`: one line of JSON, then the checksums.

    Attributes:
        block_bytes: size of each block; the last may be smaller.
        num_bytes: size of tokens.bin.
        tokens_crc32: CRC-32 of tokens.bin, which ties it to its `cache.json`.
        crc32: uint32 [blocks], CRC-32 of each block.
    """

    block_bytes: int
    num_bytes: int
    tokens_crc32: int
    crc32: np.ndarray

    @staticmethod
    def of_file(path: Path, tokens_crc32: int) -> "BlockSums":
        """Reads tokens.bin once."""
        crc32 = []
        with open_regular(path) as file:
            while block := file.read(BLOCK_BYTES):
                crc32.append(zlib.crc32(block))
        return BlockSums(BLOCK_BYTES, path.stat().st_size, tokens_crc32, np.array(crc32, "<u4"))

    @staticmethod
    def parse(raw: bytes, cache: Mapping[str, Any]) -> "BlockSums | None":
        """None if these are not the checksums of a cache. Args: cache: the content of its `cache.json`."""
        header, _, raw_sums = raw.partition(b"\n")
        try:
            fields = json.loads(header)
            sums = BlockSums(**{name: fields[name] for name in _HEADER}, crc32=np.frombuffer(raw_sums, "<u4"))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        is_complete = len(sums.crc32) == -(-sums.num_bytes // sums.block_bytes) and sums.header == header
        num_bytes = cache["num_tokens"] * np.dtype(cache["dtype"]).itemsize
        belongs = (sums.tokens_crc32, sums.num_bytes) == (cache["crc32"][TOKENS], num_bytes)
        return sums if is_complete and belongs else None

    @property
    def header(self) -> bytes:
        """The line of JSON. It identifies the tokens and the checksums."""
        fields = {name: getattr(self, name) for name in _HEADER}
        return json.dumps({**fields, "crc32": zlib.crc32(self.crc32.tobytes())}).encode()

    def to_bytes(self) -> bytes:
        return self.header + b"\n" + self.crc32.tobytes()


class TokenBlocks:
    """Tokens at a URL. Has the length and the slices of an array; several threads may read it.

    Attributes:
        url: the folder of the cache.
        identity: name of its folder in the mirror.
        num_bytes: size of all tokens.
    """

    def __init__(self, url: str, key: str, sums: BlockSums, dtype: np.dtype, mirror: BlockMirror):
        """Args: key: the configuration key of the URL, for messages."""
        self.url, self.num_bytes, self.mirror = url, sums.num_bytes, mirror
        self.identity = hashlib.sha256(f"{url} {sums.header.decode()}".encode()).hexdigest()[:16]
        self.dtype = dtype
        self._key, self._sums = key, sums
        self._fs, self._path = open_store(f"{url}/{TOKENS}", key)  # once: fsspec would open it anew in every thread
        self._verified: set[int] = set()  # blocks in the mirror whose checksum this process knows to be right
        self._waiting: set[int] = set()  # to be read ahead
        self._paused_until = 0.0
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return self.num_bytes // self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        """Consecutive tokens.

        Raises:
            ConfigError: the store cannot be read, or the mirror cannot be written.
            DamagedError: the tokens in the store are not those that were written.
        """
        start, stop, step = part.indices(len(self))
        assert step == 1, "tokens are read in order"
        begin, end = start * self.dtype.itemsize, stop * self.dtype.itemsize
        parts = [self._read(number, *within) for number, within in self._blocks_of(begin, end)]
        return np.frombuffer(b"".join(parts), self.dtype)

    def describe(self) -> str:
        """Its size, and how much of it is on this machine."""
        num_local_bytes = self.mirror.num_bytes(self.identity)
        return (
            f"{self.num_bytes / 1e9:,.3g} GB at {self.url}, read in blocks of {self._sums.block_bytes / 1e6:.3g} MB;"
            f" {num_local_bytes / 1e9:,.3g} GB of it in {self.mirror.folder} (at most"
            f" {self.mirror.max_bytes / 1e9:,.3g} GB)"
        )

    def fetch(self, starts: np.ndarray, length: int | np.ndarray) -> None:
        """Downloads the blocks of some ranges at once, as far as the mirror may hold them. Raises like slicing.

        Args:
            length: of all ranges, or of each.
        """
        missing = self._missing(starts, length)
        if len(missing) > 1 and len(missing) * self._sums.block_bytes <= self.mirror.max_bytes:
            list(_threads("blocks").map(lambda number: self._read(number, 0, 0), missing))

    def read_ahead(self, starts: np.ndarray, length: int | np.ndarray) -> None:
        """Starts to download the blocks of some ranges. What fails here is tried again when it is read."""
        for number in self._missing(starts, length):
            with self._guard:
                room = min(_MAX_AHEAD, self.mirror.max_bytes // (2 * self._sums.block_bytes))
                if number in self._waiting or len(self._waiting) >= room:
                    continue
                self._waiting.add(number)
            _threads("blocks-ahead").submit(self._read_in_advance, number)

    def _read_in_advance(self, number: int) -> None:
        try:
            if time.monotonic() > self._paused_until:
                self._read(number, 0, 0, in_advance=True)
        except ConfigError:
            self._paused_until = time.monotonic() + _PAUSE_S  # a process that ends does not wait for the others
        finally:
            with self._guard:
                self._waiting.discard(number)

    def _missing(self, starts: np.ndarray, length: int | np.ndarray) -> list[int]:
        """The blocks of some ranges of tokens that are not in the mirror, or not verified yet."""
        size, block = self.dtype.itemsize, self._sums.block_bytes
        first = starts * size // block
        last = np.minimum((starts + length) * size, self.num_bytes) - 1
        spans = zip(first.tolist(), (last // block).tolist(), strict=True)
        needed = sorted({number for begin, end in spans for number in range(begin, end + 1)})
        return [n for n in needed if n not in self._verified or not self.mirror.has(self._name(n))]

    def _blocks_of(self, begin: int, end: int) -> Iterable[tuple[int, tuple[int, int]]]:
        """The blocks of a range of bytes, and the range in each."""
        size = self._sums.block_bytes
        for number in range(begin // size, -(-end // size)):
            first = number * size
            yield number, (max(begin - first, 0), min(end - first, size))

    def _read(self, number: int, begin: int, end: int, *, in_advance: bool = False) -> bytes:
        """Some bytes of a block, which is downloaded first if the mirror does not have it; in advance, only tried once."""
        if (cached_bytes := self._from_mirror(number, begin, end)) is not None:
            return cached_bytes
        with self.mirror.downloading(self._name(number)):
            cached_bytes = self._from_mirror(number, begin, end)  # another thread or process may have been faster
            if cached_bytes is not None:
                return cached_bytes
            content = self._download(number, () if in_advance else WHILE_TRAINING_S)
            self.mirror.put(self._name(number), content)
            self._verified.add(number)
        return content[begin:end]

    def _from_mirror(self, number: int, begin: int, end: int) -> bytes | None:
        size = self._size(number)
        if number in self._verified:
            return self.mirror.read(self._name(number), begin, end, size)
        content = self.mirror.read(self._name(number), 0, size, size)
        if content is None or zlib.crc32(content) != self._sums.crc32[number]:
            return None
        self._verified.add(number)
        return content[begin:end]

    def _download(self, number: int, pauses_s: Sequence[float]) -> bytes:
        begin, size = number * self._sums.block_bytes, self._size(number)
        where, content = f"{self.url}/{TOKENS}", b""
        advice = (
            "Check the network and your credentials, and start again; or copy the cache to a local folder and use that"
        )
        error = lambda reason: ConfigError(f"{self._key}: cannot read {where} ({reason}). {advice}")  # noqa: E731
        for _ in range(_TRIES_IF_DAMAGED):
            with storage_errors(error):
                content = retried(lambda: self._fs.cat_file(self._path, start=begin, end=begin + size), pauses_s)
            if len(content) == size and zlib.crc32(content) == self._sums.crc32[number]:
                return content
        problem = "its checksum does not match" if len(content) == size else f"the store has {len(content):,} of them"
        raise TOKEN_CACHE.damaged(where, f"bytes {begin:,} to {begin + size:,}: {problem}")

    def _size(self, number: int) -> int:
        return min(self._sums.block_bytes, self.num_bytes - number * self._sums.block_bytes)

    def _name(self, number: int) -> str:
        return f"{self.identity}/{number:06d}"


@functools.cache
def _threads(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_CONCURRENT_DOWNLOADS, thread_name_prefix=name)
