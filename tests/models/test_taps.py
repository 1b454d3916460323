"""Taps: the residual stream at named places, with and without a cache, in one stack and in several."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.gemma2 import Gemma2Config
from jaxlm.interop.hf.families.llama import LlamaConfig

SIZES = {"seq_len": 32, "hidden_dim": 32, "num_heads": 4, "intermediate_dim": 48, "num_kv_heads": 2}
GEMMA2 = Gemma2Config(**SIZES, num_layers=5, head_dim=8, sliding_window=3)
LLAMA = LlamaConfig(**SIZES, num_layers=3)


def split(model, layer):
    return eqx.tree_at(lambda m: m.body, model, model.body.split_at(layer))


@pytest.mark.slow
def test_every_tap_is_the_output_of_the_layers_below_it(built, as_inputs):
    """A tap equals the last layer's output of a model that ends there, and does not change the others."""
    model, inputs = built(GEMMA2), as_inputs(np.random.default_rng(0).integers(0, 40, size=(2, 32)))
    run = eqx.filter_jit(lambda m, taps: m.hidden(inputs, taps=taps))
    names = ("embedding", *(f"layer_{i}" for i in range(5)), "final")
    found = run(model, names)
    assert found.taps.keys() == set(names)
    np.testing.assert_allclose(found.final.array, run(model, ()).final.array, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.taps["final"].array, found.final.array)
    for name in ("embedding", "layer_1", "layer_4"):  # of one kind of layer, and of the other
        np.testing.assert_allclose(run(model, (name,)).taps[name].array, found.taps[name].array, rtol=1e-5, atol=1e-5)
    halves = run(split(model, 2), names).taps
    for name in names:
        np.testing.assert_allclose(halves[name].array, found.taps[name].array, rtol=1e-5, atol=1e-5)
    for first, second in itertools.pairwise(names):
        assert np.abs(found.taps[first].array - found.taps[second].array).max() > 1e-2


@pytest.mark.slow
def test_taps_with_a_cache_are_those_without(built, as_inputs):
    model = split(built(LLAMA), 1)
    inputs, names = as_inputs(np.random.default_rng(0).integers(0, 40, size=(2, 12))), ("layer_0", "layer_1", "final")
    run = eqx.filter_jit(lambda m, inputs, cache, taps: m.hidden(inputs, cache=cache, taps=taps))
    expected = run(model, inputs, None, names).taps
    part = lambda of: jax.tree.map(lambda a: a["position", of], inputs, is_leaf=tree.is_named)  # noqa: E731
    empty = model.init_cache(inputs.tokens.resolve_axis("batch"), 16, jnp.float32)
    cache = run(model, part(slice(0, 9)), empty, ()).cache
    found = run(model, part(slice(9, 12)), cache, names).taps
    for name in names:
        later = expected[name]["position", 9:12].array
        np.testing.assert_allclose(found[name].array, later, rtol=1e-5, atol=1e-5)


def test_unknown_taps_are_refused(built, as_inputs):
    model = built(LLAMA)
    with pytest.raises(
        ConfigError, match=r"taps: 'layer_3' given, but this model has: embedding, layer_0, layer_1, layer_2, final"
    ):
        model.hidden(as_inputs(np.zeros((2, 4), int)), taps=("layer_3",))
