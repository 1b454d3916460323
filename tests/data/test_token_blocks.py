"""Token caches at a URL that are read in blocks, through a mirror that processes share.

The store is fsspec's memory file system, or a folder (`file://`) if other processes read it too.
"""

import dataclasses
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxlm.core.errors import ConfigError
from jaxlm.data.best_fit import BestFitConfig, BestFitSequences, pack_best_fit
from jaxlm.data.cache import token_blocks
from jaxlm.data.cache.artifacts import DamagedError
from jaxlm.data.cache.token_blocks import BlockMirror, BlockSums, TokenBlocks
from jaxlm.data.cache.token_cache import TOKENS, TokenCache
from jaxlm.data.mixture import Mixture, MixtureStage
from jaxlm.data.packing import PackedSequences, pack_documents
from jaxlm.data.shuffle import EraShuffle
from tests.data.helpers import numbered_cache

BLOCK = 256  # bytes: 128 tokens
SEQ_LEN = 24
LOCAL = numbered_cache(5000)
NUM_BLOCKS = -(-10_000 // BLOCK)
KEY = "data.cache_dir"


class Store(MemoryFileSystem):
    """Counts what is read, and fails or truncates as often as told."""

    read: ClassVar[list[tuple[int, int]]] = []
    trouble: ClassVar[float] = 0.0
    chooser: ClassVar[random.Random] = random.Random(0)

    def cat_file(self, path, start=None, end=None, **options):
        Store.read.append((start, end))
        if path not in self.store:
            raise FileNotFoundError(path)
        content = self.store[path].getvalue()[start:end]  # the file's position is shared by all threads
        if Store.chooser.random() < Store.trouble:
            if Store.chooser.random() < 0.5:
                raise OSError("the network is gone")
            content = content[:-1] if Store.chooser.random() < 0.5 else bytes(len(content))
        return content


@pytest.fixture
def url(monkeypatch) -> Iterator[str]:
    """A folder with the tokens of `LOCAL`."""
    fsspec.register_implementation("memory", Store, clobber=True)
    monkeypatch.setattr(token_blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(token_blocks, "WHILE_TRAINING_S", (0.0,) * 7)
    monkeypatch.setattr(Store, "read", [])
    monkeypatch.setattr(Store, "trouble", 0.0)
    monkeypatch.setattr(Store, "chooser", random.Random(0))
    name = "/token_blocks"
    Store().pipe_file(f"{name}/{TOKENS}", LOCAL.tokens.tobytes())
    yield f"memory:/{name}"
    if Store().exists(name):
        Store().rm(name, recursive=True)
    fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)


def sums(folder: Path) -> BlockSums:
    folder.mkdir(exist_ok=True)
    (folder / TOKENS).write_bytes(LOCAL.tokens.tobytes())
    return BlockSums.of_file(folder / TOKENS, 0)


def opened(url: str, folder: Path, max_blocks: int = NUM_BLOCKS) -> TokenCache:
    mirror = BlockMirror(folder / "blocks", max_blocks * BLOCK)
    blocks = TokenBlocks(url, KEY, sums(folder), np.dtype(np.uint16), mirror)
    return dataclasses.replace(LOCAL, tokens=blocks, blocks=blocks)


def stored(folder: Path) -> int:
    """Bytes of all blocks in the mirror, unfinished ones included."""
    with BlockMirror(folder / "blocks", 0)._locked():
        return sum(path.stat().st_size for path in (folder / "blocks").glob("*/*"))


@pytest.mark.slow
@pytest.mark.parametrize("max_documents", [None, 0, "best fit"])
@pytest.mark.parametrize("shuffle", [False, True, EraShuffle(10)])
@pytest.mark.parametrize("max_blocks", [0, 3, NUM_BLOCKS])
def test_rows_equal_those_of_a_local_cache_in_every_order(url, tmp_path, max_blocks, shuffle, max_documents):
    def mixture(cache: TokenCache) -> Mixture:
        if max_documents == "best fit":
            config = BestFitConfig(buffer_size=10, refill_size=4)
            rows = BestFitSequences(cache, SEQ_LEN, config, pack_best_fit(cache.offsets, SEQ_LEN + 1, config))
            return Mixture({"": rows}, [MixtureStage(0, (1,))], seed=3, shuffle=shuffle)
        packed = None if max_documents is None else pack_documents(cache, SEQ_LEN, max_documents=max_documents)
        return Mixture({"": PackedSequences(cache, SEQ_LEN, packed)}, [MixtureStage(0, (1,))], seed=3, shuffle=shuffle)

    here, there = mixture(LOCAL), mixture(opened(url, tmp_path, max_blocks))
    for first in range(0, 2 * len(here.examples_of(0)), 64):  # two epochs
        rows = first + np.arange(64)
        there.read_ahead(rows + 64)
        expected, found = here.read(rows), there.read(rows)
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
        assert stored(tmp_path) <= max_blocks * BLOCK


def test_only_the_blocks_that_rows_need_are_read(url, tmp_path):
    cache = opened(url, tmp_path)
    starts = np.array([0, 10, 2000, 4990])
    np.testing.assert_array_equal(cache.read(starts, SEQ_LEN), LOCAL.read(starts, SEQ_LEN))
    assert sorted(Store.read) == [(0, 256), (3840, 4096), (9728, 9984), (9984, 10_000)]
    cache.read(starts, SEQ_LEN)
    opened(url, tmp_path).read(starts, SEQ_LEN)  # the next start
    assert len(Store.read) == 4
    assert stored(tmp_path) == 3 * BLOCK + 16


def test_rows_read_in_order_download_each_block_once_even_if_few_fit(url, tmp_path):
    cache = opened(url, tmp_path, max_blocks=3)
    for start in range(0, 5000, SEQ_LEN):
        cache.read(np.array([start]), SEQ_LEN + 1)
    assert len(Store.read) == NUM_BLOCKS


def test_what_was_read_ahead_is_there(url, tmp_path):
    cache = opened(url, tmp_path)
    assert cache.blocks is not None
    cache.blocks.read_ahead(np.array([0, 1000, 2000]), SEQ_LEN)
    while cache.blocks._waiting:
        threading.Event().wait(0.01)
    assert len(Store.read) == 3
    cache.read(np.array([0, 1000, 2000]), SEQ_LEN)
    assert len(Store.read) == 3


def test_the_blocks_that_were_used_least_recently_leave(url, tmp_path):
    cache = opened(url, tmp_path, max_blocks=3)
    for block in (0, 1, 2, 0, 3):
        cache.read(np.array([block * 128]), SEQ_LEN)
    Store.read.clear()
    cache.read(np.array([0]), SEQ_LEN)
    assert not Store.read
    cache.read(np.array([128]), SEQ_LEN)
    assert Store.read == [(256, 512)]
    BlockMirror(tmp_path / "blocks", BLOCK).trim()  # a later start with a lower limit
    assert stored(tmp_path) <= BLOCK


def test_failures_and_damaged_transfers_are_repeated(url, tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "trouble", 0.05)
    for number in range(10):
        cache = opened(url, tmp_path / str(number))
        np.testing.assert_array_equal(cache.tokens[0:5000], LOCAL.tokens)
    assert len(Store.read) > 10 * NUM_BLOCKS + 5


def test_damage_is_one_message(url, tmp_path, monkeypatch):
    path = f"{url.partition(':/')[2]}/{TOKENS}"
    content = Store().cat_file(path)
    Store().pipe_file(path, content[:300])
    cache = opened(url, tmp_path / "a")
    cache.read(np.array([0]), SEQ_LEN)
    with pytest.raises(DamagedError, match=rf"{url}/{TOKENS}: bytes 256 to 512: the store has 44 of them\. Delete"):
        cache.read(np.array([128]), SEQ_LEN)
    Store().pipe_file(path, content[:300] + b"x" + content[301:])
    with pytest.raises(DamagedError, match=r"bytes 256 to 512: its checksum does not match\. Delete the folder memory"):
        opened(url, tmp_path / "b").read(np.array([0, 128]), SEQ_LEN)
    monkeypatch.setattr(Store, "trouble", 1.0)
    monkeypatch.setattr(Store.chooser, "random", lambda: 0.1)
    with pytest.raises(
        ConfigError, match=rf"{KEY}: cannot read {url}/{TOKENS} \(OSError: the network is gone\)\. Check"
    ):
        opened(url, tmp_path / "c").read(np.array([0]), SEQ_LEN)
    Store().rm_file(path)
    with pytest.raises(ConfigError, match=rf"{KEY}: cannot read {url}/{TOKENS} \("):
        opened(url, tmp_path / "d").read(np.array([0]), SEQ_LEN)


def test_a_damaged_block_in_the_mirror_is_replaced(url, tmp_path):
    opened(url, tmp_path).read(np.array([0, 128]), SEQ_LEN)
    first, second = sorted((tmp_path / "blocks").glob("*/*"))
    first.write_bytes(bytes(BLOCK))
    second.write_bytes(b"")
    Store.read.clear()
    starts = np.array([0, 128])
    np.testing.assert_array_equal(opened(url, tmp_path).read(starts, SEQ_LEN), LOCAL.read(starts, SEQ_LEN))
    assert len(Store.read) == 2


# Forks of one process, of which the first two kill themselves.
PROCESSES = f"""
import os, signal, sys, traceback
from pathlib import Path
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from jaxlm.data.cache import token_blocks
from jaxlm.data.cache.token_blocks import BlockSums, TokenBlocks

BLOCK, folder = {BLOCK}, Path(sys.argv[1])
token_blocks.BLOCK_BYTES = BLOCK
cat_file = LocalFileSystem.cat_file


def read(max_blocks, seed, dies_in):
    mirror = token_blocks.BlockMirror(folder / "blocks", max_blocks * BLOCK)
    sums = BlockSums.of_file(folder / "tokens.bin", 0)
    blocks = TokenBlocks(f"file://{{folder}}", "key", sums, np.dtype(np.uint16), mirror)
    num_read = []

    def reading(self, path, start, end):
        num_read.append(start)
        if dies_in == "download" and len(num_read) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return cat_file(self, path, start, end)

    def replacing(*paths):
        os.kill(os.getpid(), signal.SIGKILL)

    LocalFileSystem.cat_file = reading
    if dies_in == "write":
        token_blocks.os.replace = replacing
    rng = np.random.default_rng(seed)
    largest = 0
    for start in rng.permutation(np.arange(0, 5000, 20)).tolist():
        blocks.fetch(np.array([start, (start + 999) % 5000]), 20)
        assert blocks[start:start + 20].tolist() == list(range(start, min(start + 20, 5000)))
        with mirror._locked():
            largest = max(largest, sum(path.stat().st_size for path in mirror.folder.glob("*/*")))
    (folder / f"read-{{seed}}").write_text(f"{{largest}} {{len(num_read)}}")


def start(max_blocks, seed, dies_in=""):
    child = os.fork()
    if child:
        return child
    try:
        read(max_blocks, seed, dies_in)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def end(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def said(seed):
    return tuple(map(int, (folder / f"read-{{seed}}").read_text().split()))


unfinished = lambda: list((folder / "blocks").glob("*/*.tmp"))
for dies_in in ("download", "write"):
    assert end(start(5, 0, dies_in)) == -signal.SIGKILL, dies_in
assert unfinished()
both = [start(5, seed) for seed in (1, 2)]  # far less than they read
assert [*map(end, both)] == [0, 0]
assert all(said(seed)[0] <= 5 * BLOCK for seed in (1, 2)), "the limit of the mirror"
assert not unfinished()
both = [start(100, seed) for seed in (3, 4)]
assert [*map(end, both)] == [0, 0]
downloads = said(3)[1] + said(4)[1]
assert downloads + 5 >= {NUM_BLOCKS} >= downloads, "no block twice"
"""


@pytest.mark.slow
def test_processes_share_the_mirror_and_may_be_killed(tmp_path):
    sums(tmp_path)
    command = [sys.executable, "-c", PROCESSES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
