"""Norms against automatic differentiation of their formulas in float64."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.tracing import tracing
from jaxlm.models.norms import LayerNorm, RMSNorm, UnweightedLayerNorm, UnweightedRMSNorm

Batch, Pos, Embed = hax.Axis("batch", 3), hax.Axis("position", 5), hax.Axis("embed", 16)
EPS = 1e-3


def pulled(run, d_out, *given):
    """The value, and the gradients by what is given."""
    out, vjp = jax.vjp(run, *given)
    return out, vjp(jnp.asarray(d_out, jnp.float32))


def formula(kind, x, weight, bias):
    x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    out = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
    return out if bias is None else out + bias


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias"])
def test_values_and_gradients_match_the_definition(kind):
    rng = np.random.default_rng(0)
    x, d_out = rng.normal(size=(2, 3, 5, 16))
    weight, bias = rng.normal(size=(2, 16))
    bias = bias if kind == "layer" else None
    name = lambda a: hax.named(jnp.asarray(a, jnp.float32), Embed)  # noqa: E731

    def run(x, weight, bias=None):
        norm = (
            RMSNorm(name(weight), EPS)
            if kind == "rms"
            else LayerNorm(name(weight), None if bias is None else name(bias), EPS)
        )
        return norm(hax.named(x, (Batch, Pos, Embed))).array

    given = tuple(jnp.asarray(a, jnp.float32) for a in (x, weight, bias) if a is not None)
    out, gradients = jax.jit(lambda *given: pulled(run, d_out, *given))(*given)
    np.testing.assert_allclose(out, formula(kind.split()[0], x, weight, bias), rtol=1e-5, atol=1e-5)
    for number, gradient in enumerate(gradients):
        np.testing.assert_allclose(gradient, numerical(kind, [x, weight, bias], number, d_out), rtol=1e-4, atol=1e-5)

    u = rng.normal(size=x.shape)
    ahead, behind = (numerical(kind, [x + h * u, weight, bias], 0, d_out) for h in (1e-3, -1e-3))
    with tracing(twice_differentiable=True):
        gradient = jax.grad(lambda x: jnp.sum(run(x, *given[1:]) * d_out.astype(np.float32)))
        along = jax.jit(lambda x, u: jax.jvp(gradient, (x,), (u,))[1])(given[0], jnp.asarray(u, jnp.float32))
    np.testing.assert_allclose(along, (ahead - behind) / 2e-3, rtol=1e-3, atol=1e-4)


def numerical(kind, given, number, d_out, h=1e-5):
    """Central differences in float64."""
    gradient = np.zeros_like(given[number])
    for place in np.ndindex(gradient.shape):
        sides = []
        for sign in (1, -1):
            moved = [None if a is None else a.copy() for a in given]
            moved[number][place] += sign * h
            sides.append((formula(kind.split()[0], *moved) * d_out).sum())
        gradient[place] = (sides[0] - sides[1]) / (2 * h)
    return gradient


@pytest.mark.parametrize(
    ("norm", "num_rows"), [(RMSNorm.init(Embed, EPS), 1), (LayerNorm.init(Embed, EPS, use_bias=False), 2)]
)
def test_saves_only_the_input_and_row_statistics(norm, num_rows):
    x = hax.ones((Batch, Pos, Embed)).astype(jnp.bfloat16)
    _, vjp = jax.vjp(lambda x: norm(x).array, x)
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(vjp)]
    rows = [((3, 5, 1), jnp.dtype(jnp.float32))] * num_rows
    assert sorted(map(str, shapes)) == sorted(map(str, [((3, 5, 16), x.dtype), ((16,), jnp.dtype(jnp.float32)), *rows]))


@pytest.mark.parametrize("unweighted", [UnweightedRMSNorm, UnweightedLayerNorm])
def test_a_norm_without_parameters(unweighted):
    x, d_out = np.random.default_rng(0).normal(size=(2, 3, 5, 16))
    kind = "layer" if unweighted is UnweightedLayerNorm else "rms"
    run = lambda x: unweighted(Embed, EPS)(hax.named(x, (Batch, Pos, Embed))).array  # noqa: E731
    out, (gradient,) = jax.jit(lambda x: pulled(run, d_out, x))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(out, formula(kind, x, 1.0, None), rtol=1e-5, atol=1e-5)
    expected = numerical(kind, [x, np.ones(16), None], 0, d_out)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_model_without_norm_weights_is_one_whose_norm_weights_are_1(tiny_llama, built, as_inputs):
    inputs = as_inputs([[3, 1, 4, 1, 5, 9, 2, 6]])
    config = dataclasses.replace(tiny_llama, hybrid_norm=True, input_embedding_norm=True)
    ones = lambda path, leaf: hax.ones(leaf.axes) if "norm" in path else leaf  # noqa: E731
    weighted = tree.map_leaves(ones, built(config))
    others = {path: leaf for path, leaf in tree.leaves(weighted) if "norm" not in path}
    plain = built(dataclasses.replace(config, use_layer_norm_weight=False))
    assert [path for path, _ in tree.leaves(plain)] == list(others)
    plain = tree.map_leaves(lambda path, _: others[path], plain)
    final = jax.jit(lambda model: model.hidden(inputs).final.array)
    np.testing.assert_array_equal(final(plain), final(weighted))


def test_axes_in_any_order():
    x = hax.random.normal(jax.random.key(0), (Embed, Batch, Pos))
    norm = LayerNorm.init(Embed, EPS, use_bias=True)
    out = norm(x)
    assert out.axes == x.axes
    np.testing.assert_array_equal(out.array, norm(x.rearrange((Batch, Pos, Embed))).rearrange(x.axes).array)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "scaled"), [("hybrid_norm", ("o_proj", "down_proj")), ("input_embedding_norm", ("tokens",))]
)
def test_a_norm_after_a_layer_hides_the_size_of_its_weights(tiny_llama, built, as_inputs, key, scaled):
    inputs = as_inputs([[3, 1, 4, 1, 5, 9, 2, 6]])

    @jax.jit
    def of(model, factor):
        larger = lambda path, leaf: leaf * factor if any(name in path for name in scaled) else leaf  # noqa: E731
        return tree.map_leaves(larger, model).hidden(inputs).final.array

    hidden = lambda config, factor: np.asarray(of(built(config), factor))  # noqa: E731
    plain = dataclasses.replace(tiny_llama, layer_norm_epsilon=0.0)
    normed = dataclasses.replace(plain, **{key: True})
    np.testing.assert_allclose(hidden(normed, 7.0), hidden(normed, 1.0), rtol=1e-3, atol=1e-4)
    assert np.abs(hidden(plain, 7.0) - hidden(plain, 1.0)).max() > 0.1
