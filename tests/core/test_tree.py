"""Leaves by path: listing, selecting, splitting, changing modules."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError

Embed, Mlp = hax.Axis("embed", 3), hax.Axis("mlp", 5)


class Pair(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear
    many: tuple
    count: jax.Array
    kind: str = eqx.field(static=True, default="pair")


@pytest.fixture
def pair() -> Pair:
    up = hnn.Linear(hax.ones((Mlp, Embed)), hax.zeros(Mlp), Embed, Mlp)
    down = hnn.Linear(hax.ones((Embed, Mlp)), None, Mlp, Embed)
    return Pair(up, down, (jnp.zeros(2), {"inner": hax.ones(Embed)}), jnp.arange(4))


PATHS = ["up.weight", "up.bias", "down.weight", "many.0", "many.1.inner", "count"]


def test_paths_use_python_attribute_syntax(pair):
    assert [path for path, _ in tree.leaves(pair)] == PATHS


def test_leaves_are_whole_named_arrays(pair):
    assert tree.is_named(dict(tree.leaves(pair))["up.weight"])
    assert tree.num_parameters(pair) == 15 + 5 + 15 + 2 + 3  # integers are not parameters


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (["weight$"], {"up.weight", "down.weight"}),
        (["^up"], {"up.weight", "up.bias"}),
        (["bias", r"many\.\d"], {"up.bias", "many.0", "many.1.inner"}),
        ([".*"], set(PATHS) - {"count"}),
    ],
)
def test_select_and_partition(pair, patterns, chosen):
    mask = tree.select(pair, patterns)
    assert {path for path, yes in tree.leaves(mask) if yes} == chosen
    inside, outside = tree.partition(pair, mask)
    assert {path for path, _ in tree.leaves(inside)} == chosen
    assert {path for path, _ in tree.leaves(outside)} == set(PATHS) - chosen


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("wieght", "'wieght' matches no parameter. Closest names: up.weight"),
        ("count", "no parameter"),
        ("(", "not a valid regular"),
    ],
)
def test_patterns_that_select_nothing(pair, pattern, message):
    with pytest.raises(ConfigError) as caught:
        tree.select(pair, [pattern])
    assert message in str(caught.value)


def test_replace_leaves(pair):
    arrays = {path: tree.raw(leaf) + 1 for path, leaf in tree.leaves(pair)}
    after = tree.replace_leaves(pair, arrays)
    assert after.up.weight.axes == pair.up.weight.axes
    assert jnp.array_equal(after.down.weight.array, jnp.full((3, 5), 2.0))
    assert jnp.array_equal(after.count, jnp.arange(4) + 1)


def test_map_modules_changes_only_what_matches(pair):
    doubled = tree.map_modules(pair, hnn.Linear, "^down", lambda m: eqx.tree_at(lambda l: l.weight, m, m.weight * 2))
    assert jnp.array_equal(doubled.down.weight.array, 2 * pair.down.weight.array)
    assert doubled.up is pair.up


def test_map_modules_lists_the_available_modules(pair):
    with pytest.raises(ConfigError, match=r"matches no Linear layer\. Closest names: down, up"):
        tree.map_modules(pair, hnn.Linear, "dwn", lambda module: module)
