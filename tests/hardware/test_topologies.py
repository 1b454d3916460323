"""Names of machines and the shapes of their tori."""

import math
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.hardware.topologies import CHIPS, parse_topology, torus


@pytest.mark.parametrize(
    ("text", "chip", "num_chips"),
    [("v5p-512", "v5p", 256), ("v5e-256", "v5e", 256), ("h100-64", "h100", 64), ("tpu7x-128", "tpu7x", 128)],
)
def test_names_count_chips_like_their_vendors(text, chip, num_chips):
    found = parse_topology(text)
    assert (found.chip.name, found.num_chips, found.name) == (chip, num_chips, text)


def test_the_benchmarks_count_chips_where_the_name_counts_cores():
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    named = re.findall(r"(\d+) chips \(`?((?:v\d[ep]?)-\d+)`?\)", text)
    assert ("512", "v5p-1024") in named, "as many chips as the published figure beside it is for"
    assert [int(chips) for chips, _ in named] == [parse_topology(name).num_chips for _, name in named]


@pytest.mark.parametrize(
    "text", ["v5p", "v5p-", "v5p-7", "h100-0", "h99-8", "h100-100000", "v5e-512", "tpu7x-7", "tpu7x-20000"]
)
def test_unknown_machines_are_refused(text):
    with pytest.raises(ConfigError, match=f"--topology {text}"):
        parse_topology(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("v5p-512", "v5:4x8x8"),
        ("v5p-8", "v5:1x2x2"),
        ("v5e-256", "v5e:16x16"),
        ("v4-128", "v4:4x4x4"),
        ("tpu7x-128", "tpu7x:4x4x4"),
    ],
)
def test_the_torus_is_the_most_even_one(text, name):
    assert parse_topology(text).compiler_name == name


def test_the_two_chiplets_of_a_chip_share_what_the_data_sheet_says_of_it():
    """TPU7x: 2,307 TFLOP/s, 192 GiB, 7,380 GB/s, and links of 600 GB/s in each direction."""
    chip, size = CHIPS["tpu7x"], parse_topology("tpu7x-128").size
    figures = (chip.peak, chip.memory, chip.memory_bandwidth, chip.link_bandwidth)
    assert [2 * figure for figure in figures] == [2307e12, 192 * 2**30, 7380e9, 600e9]
    assert (size, parse_topology("v5p-128").size) == ("64 chips of 2 devices", "64 chips")


def test_every_power_of_two_has_a_torus():
    for dimensions in (2, 3):
        for exponent in range(13):
            assert math.prod(torus(2**exponent, dimensions)) == 2**exponent
    with pytest.raises(ConfigError, match="do not form a torus"):
        torus(7, 3)


def test_links_are_slower_between_domains():
    topology = parse_topology("h100-64")
    assert topology.bandwidth(8) == 9 * topology.bandwidth(64)
    assert parse_topology("v5p-512").bandwidth(256) == CHIPS["v5p"].link_bandwidth


def test_every_chip_has_a_peak():
    assert all(chip.peak > 1e14 for chip in CHIPS.values())


@pytest.mark.parametrize(
    ("name", "hosts"), [("h100-64", (8, 8)), ("h100-4", (1, 4)), ("h100-12", (1, 12)), ("v5p-512", (1, 256))]
)
def test_hosts_have_the_size_of_a_domain(name, hosts):
    assert parse_topology(name).hosts == hosts


@pytest.mark.parametrize(
    ("chip", "dtype", "share"), [("h100", "float32", 0.5), ("h100", "bfloat16", 1), ("v5p", "float32", 1)]
)
def test_float32_is_half_as_fast_on_gpus(chip, dtype, share):
    assert CHIPS[chip].peak_of(jnp.dtype(dtype)) == share * CHIPS[chip].peak
