"""A folder of limited size with copies of blocks of remote files. The least recently used blocks are deleted first.

cache/blocks/<identity of the file>/<number of the block>
             .size    bytes that are counted against the limit, at least those that the blocks take
             .lock    held while a block is written or deleted

Several processes may share the folder. A block is complete or absent: it is renamed into place. Nothing is synced to disk:
if the machine crashes, a block may be left with a wrong checksum, and readers then replace it.
"""

import contextlib
import os
import platform
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxlm.core.safe_io import SMALL, exclusive, read_bytes, temporary_path
from jaxlm.data.cache.cache_dir import disk_full_errors, writable_folder

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
        """Whether a block is here."""
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
