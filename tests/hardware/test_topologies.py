"""Names of machines and the shapes of their tori."""

import math
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.hardware.topologies import CHIPS, parse_topology, torus


@pytest.mark.parametrize(
    ("text", "chip", "num_chips"), [("v5p-512", "v5p", 256), ("v5e-256", "v5e", 256), ("h100-64", "h100", 64)]
)
def test_names_count_chips_like_their_vendors(text, chip, num_chips):
    found = parse_topology(text)
    assert (found.chip.name, found.num_chips, found.name) == (chip, num_chips, text)


def test_the_benchmarks_count_chips_where_the_name_counts_cores():
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    named = re.findall(r"(\d+) chips \(`?((?:v\d[ep]?)-\d+)`?\)", text)
    assert ("512", "v5p-1024") in named, "as many chips as the published figure beside it is for"
    assert [int(chips) for chips, _ in named] == [parse_topology(name).num_chips for _, name in named]


@pytest.mark.parametrize("text", ["v5p", "v5p-", "v5p-7", "h100-0", "h99-8", "h100-100000", "v5e-512"])
def test_unknown_machines_are_refused(text):
    with pytest.raises(ConfigError, match=f"--topology {text}"):
        parse_topology(text)


@pytest.mark.parametrize(
    ("text", "name"), [("v5p-512", "v5:4x8x8"), ("v5p-8", "v5:1x2x2"), ("v5e-256", "v5e:16x16"), ("v4-128", "v4:4x4x4")]
)
def test_the_torus_is_the_most_even_one(text, name):
    assert parse_topology(text).compiler_name == name


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
