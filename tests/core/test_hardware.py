"""Caches as Linux lists them, and the block sizes that follow from them."""

import os

import jax
import pytest

from jaxlm.core import devices as hardware
from jaxlm.core.devices import Caches, caches, read_caches, rows_in_half
from jaxlm.models import chunked_loss
from jaxlm.models.attention.backends import blockwise

MIB = 2**20
EPYC = [("1", "Data", "48K", "0"), ("1", "Instruction", "32K", "0"), ("2", "Unified", "1024K", "0")]


def listed(root, core, entries):
    """Writes a core's caches as Linux lists them."""
    for number, values in enumerate(entries):
        folder = root / f"cpu{core}" / "cache" / f"index{number}"
        folder.mkdir(parents=True)
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
            (folder / name).write_text(f"{value}\n")
    return root


@pytest.mark.parametrize(
    ("entries", "cores", "expected"),
    [
        ([*EPYC, ("3", "Unified", "32768K", "0-1")], {0, 1}, Caches(MIB, 32 * MIB)),
        # Two threads share a core's cache, if the process may use both.
        ([("2", "Unified", "1280K", "0,32"), ("3", "Unified", "54M", "0-63")], range(64), Caches(640 * 1024, 54 * MIB)),
        ([("2", "Unified", "1280K", "0,32"), ("3", "Unified", "54M", "0-63")], {0, 1}, Caches(1280 * 1024, 54 * MIB)),
        ([("2", "Unified", "4096K", "0-3,8")], {0, 1, 8}, Caches(4 * MIB // 3, None)),
        ([("2", "Unified", "2M", "0"), ("4", "Unified", "1G", "0-7")], {0}, Caches(2 * MIB, 1024 * MIB)),
    ],
)
def test_caches_are_read(tmp_path, entries, cores, expected):
    assert read_caches(listed(tmp_path, 0, entries), cores) == expected


def test_the_first_core_that_the_process_may_use_counts(tmp_path):
    for core, size in ((0, "2048K"), (4, "512K")):
        listed(tmp_path, core, [("2", "Unified", size, str(core))])
    assert read_caches(tmp_path, {4, 5}) == Caches(MIB // 2, None)


def test_without_the_files_only_the_level_2_size_comes_from_sysconf(tmp_path, monkeypatch):
    known = {"SC_LEVEL2_CACHE_SIZE": 2 * MIB, "SC_LEVEL3_CACHE_SIZE": 384 * MIB}
    monkeypatch.setattr(os, "sysconf", known.__getitem__)
    assert read_caches(tmp_path, {0}) == Caches(2 * MIB, None)
    known["SC_LEVEL2_CACHE_SIZE"] = 0  # as on ARM
    assert read_caches(tmp_path, {0}) == Caches()

    def unknown(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    assert read_caches(tmp_path, {0}) == Caches()
    damaged = [("two", "Unified", "1024K", "0"), ("2", "Unified", "large", "0"), ("3", "Unified", "8192K", "?")]
    assert read_caches(listed(tmp_path, 0, damaged), {0}) == Caches()


def test_several_processes_have_the_same_blocks(monkeypatch):
    monkeypatch.setattr(hardware, "_own_caches", lambda: Caches(4 * MIB, 256 * MIB))
    assert caches() == Caches(4 * MIB, 256 * MIB)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert caches() == Caches()


@pytest.mark.parametrize(
    ("level2", "last_level", "chunk_tokens", "block"),
    [
        (1, 32, 512, 128),  # AMD EPYC of the fourth and fifth generation: the sizes of every CPU before
        (1.25, 54, 512, 128),  # Intel Xeon, Ice Lake
        (2, 105, 1024, 256),  # Intel Xeon, Sapphire Rapids
        (0.5, 16, 256, 64),  # AMD EPYC of the second generation
        (0.25, 4, 128, 64),
        (16, 512, 2048, 512),
        (None, None, 512, 128),
    ],
)
def test_blocks_by_cache(monkeypatch, level2, last_level, chunk_tokens, block):
    found = Caches(*(None if size is None else int(size * MIB) for size in (level2, last_level)))
    for module in (chunked_loss, blockwise):
        monkeypatch.setattr(module, "caches", lambda: found)
    assert chunked_loss.default_chunk_tokens("cpu") == chunk_tokens
    assert blockwise.default_attention_block("cpu") == block
    assert (chunked_loss.default_chunk_tokens("gpu"), blockwise.default_attention_block("gpu")) == (8192, 128)


@pytest.mark.parametrize("cache", [100, 4096, 1_000_000, 32 * MIB, 33 * MIB + 1])
@pytest.mark.parametrize("bytes_per_row", [1, 48, 4096])
def test_rows_take_at_most_half_of_a_cache_and_more_than_a_quarter(cache, bytes_per_row):
    rows = rows_in_half(cache, bytes_per_row)
    assert rows & (rows - 1) == 0
    if 2 * bytes_per_row <= cache:
        assert cache / 4 < rows * bytes_per_row <= cache / 2
    else:
        assert rows == 1
