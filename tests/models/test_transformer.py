"""Scanned or unrolled, checkpointed or not: the same numbers, the same layout, different programs."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.base import vocab_axis
from jaxlm.models.gpt2 import Gpt2Config

VARIANTS = [(scan, checkpoint) for scan in (True, False) for checkpoint in (True, False)]


def variant(config, scan, checkpoint):
    return dataclasses.replace(config, scan_layers=scan, gradient_checkpointing=checkpoint, num_layers=3)


def loss(model, inputs, key=None):
    return (model.logits(model.hidden(inputs, key=key).final).array ** 2).mean()


def test_variants_agree_and_share_one_layout(tiny, built, as_inputs):
    inputs = as_inputs(np.random.default_rng(0).integers(0, 40, size=(2, 16)))
    step = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    models = [built(variant(tiny, *v)) for v in VARIANTS]
    results = [(model, *step(model, inputs)) for model in models]
    model, value, gradient = results[0]
    paths = [(jax.tree_util.keystr(p), leaf.shape) for p, leaf in jax.tree_util.tree_leaves_with_path(model)]
    for other_model, other_value, other_gradient in results[1:]:
        assert paths == [
            (jax.tree_util.keystr(p), x.shape) for p, x in jax.tree_util.tree_leaves_with_path(other_model)
        ]
        np.testing.assert_allclose(other_value, value, rtol=1e-6)
        for ours, theirs in zip(
            jax.tree.leaves((model, gradient)), jax.tree.leaves((other_model, other_gradient)), strict=True
        ):
            np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-6)


def test_every_parameter_of_the_body_has_the_layers_in_front(tiny, built):
    model = built(variant(tiny, True, True))
    is_named = lambda x: isinstance(x, hax.NamedArray)  # noqa: E731
    leaves = jax.tree.leaves(model.body.layers, is_leaf=is_named)
    assert leaves
    assert all(is_named(leaf) and leaf.axes[0] == hax.Axis("layers", 3) for leaf in leaves)
    assert all(leaf.dtype == jnp.float32 for leaf in leaves)


@pytest.mark.parametrize(("scan", "checkpoint"), VARIANTS)
def test_the_program_is_what_was_asked_for(tiny, built, as_inputs, scan, checkpoint):
    inputs = as_inputs(np.zeros((2, 16), int))
    model = built(variant(tiny, scan, checkpoint))
    lowered = jax.jit(jax.grad(loss)).lower(model, inputs)
    hlo = lowered.compile().as_text()
    assert (" while(" in hlo) == scan
    # Per layer: the linear maps and two products of attention, forward and twice backward; recomputation does all
    # of the forward ones again but the last, whose result nothing in the backward pass needs. The head adds three.
    is_linear = lambda x: isinstance(x, hax.nn.Linear)  # noqa: E731
    a_layer = 2 + sum(map(is_linear, jax.tree.leaves(model.body.layers.stacked, is_leaf=is_linear)))
    assert hlo.count(" dot(") == (1 if scan else 3) * (3 * a_layer + (a_layer - 1 if checkpoint else 0)) + 3


def test_the_loop_stores_no_parameters_for_the_backward_pass(tiny, built, as_inputs):
    inputs = as_inputs(np.zeros((2, 16), int))
    for checkpoint in (True, False):
        model = built(variant(tiny, True, checkpoint))
        forward = next(e for e in jax.make_jaxpr(jax.grad(loss))(model, inputs).eqns if e.primitive.name == "scan")
        stored = [v.aval.shape for v in forward.outvars[forward.params["num_carry"] :]]
        parameters = {leaf.shape for leaf in jax.tree.leaves(model.body.layers)}
        assert stored
        assert not parameters & set(stored)
        if checkpoint:
            assert stored == [(3, 2, 16, 32)], "the input of each layer and nothing else"


def test_building_traces_without_computing_and_depends_on_the_key_only(tiny):
    shapes = jax.eval_shape(lambda key: tiny.build(vocab_axis(40), key=key), jax.random.key(0))
    model, again, other = (
        jax.jit(lambda key: tiny.build(vocab_axis(40), key=key))(jax.random.key(k)) for k in (0, 0, 1)
    )
    assert jax.tree.structure(shapes) == jax.tree.structure(model)
    for leaf, same, shape in zip(*map(jax.tree.leaves, (model, again, shapes)), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        np.testing.assert_array_equal(leaf, same)
    assert not np.array_equal(model.tokens.weight.array, other.tokens.weight.array)
    layers = model.body.layers.stacked.attn.q_proj.weight.array
    assert not np.array_equal(layers[0], layers[1])


def test_dropout_needs_a_key_and_differs_between_keys(built, as_inputs):
    config = Gpt2Config(seq_len=16, hidden_dim=32, num_layers=2, num_heads=4)
    inputs = as_inputs(np.zeros((2, 16), int))
    for field in ("embed_pdrop", "resid_pdrop", "attn_pdrop"):
        plain = built(config)
        dropping = built(dataclasses.replace(config, **{field: 0.5}))
        step = jax.jit(loss)
        assert step(dropping, inputs) == step(plain, inputs)
        values = {float(step(dropping, inputs, jax.random.key(k))) for k in (1, 2)} | {float(step(plain, inputs))}
        assert len(values) == 3, field
