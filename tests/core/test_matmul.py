"""The matrix product, and int8 weights against their definition in NumPy."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import PartitionSpec

from jaxlm.core.products.matmul import arranged, array_specs, dot, einsum
from jaxlm.core.products.stored_weights import Int8Weight, StoredArray

Batch, Heads, Size, Embed = Axis("batch", 5), Axis("heads", 3), Axis("head_size", 4), Axis("embed", 16)


def named(seed: int, *axes: Axis, dtype=jnp.float32) -> hax.NamedArray:
    values = np.random.default_rng(seed).normal(size=[axis.size for axis in axes])
    return hax.named(jnp.asarray(values, dtype), axes)


def by_definition(weight: np.ndarray, inputs: tuple[int, ...]) -> np.ndarray:
    """What a weight becomes: each output channel has 255 evenly spaced values, from minus to plus its maximum."""
    scale = np.abs(weight).max(axis=inputs, keepdims=True) / 127
    return np.round(weight / np.where(scale > 0, scale, 1)) * scale


@pytest.mark.parametrize(("x", "weight"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_a_product_is_computed_in_the_dtype_of_its_weight(x, weight):
    found = dot(named(0, Batch, Embed, dtype=x), named(1, Heads, Embed, dtype=weight), Embed)
    assert found.dtype == weight
    inputs, weights = (named(s, a, Embed, dtype=d).array for s, a, d in ((0, Batch, x), (1, Heads, weight)))
    exact = np.asarray(inputs, weight).astype(np.float64) @ np.asarray(weights, np.float64).T
    np.testing.assert_allclose(
        found.array.astype(jnp.float32), exact, rtol=2e-2 if weight == "bfloat16" else 1e-5, atol=2e-2
    )


@pytest.mark.slow
def test_int8_weights_are_their_definition():
    weight = named(1, Heads, Size, Embed)
    weight = hax.named(
        weight.array.at[1, 2].set(0).at[2, 1].multiply(1e4), weight.axes
    )  # a channel of zeros, a large one
    stored = Int8Weight.of(weight, Embed)
    expected = by_definition(np.asarray(weight.array, np.float64), (2,))
    assert (stored.values.dtype, stored.scale.dtype) == (jnp.int8, jnp.float32)
    assert (stored.axes, stored.size) == (weight.axes, weight.size)
    assert {axis.name for axis in stored.scale.axes} == {"heads", "head_size"}
    np.testing.assert_allclose(stored.floats(jnp.float32).array, expected, rtol=1e-6)
    x = named(2, Batch, Embed)
    products = np.einsum("be,hse->bhs", np.asarray(x.array, np.float64), expected)
    found = dot(x, stored, Embed)
    assert found.axes == (Batch, Heads, Size)
    np.testing.assert_allclose(found.array, products, rtol=1e-5, atol=1e-4)
    flat = stored.flatten_axes((Heads, Size), "out").flatten_axes(Embed, "in")
    np.testing.assert_array_equal(dot(x.rename({"embed": "in"}), flat, "in").array, found.array.reshape(5, 12))
    back = flat.unflatten_axis("in", Embed).unflatten_axis("out", (Heads, Size))
    np.testing.assert_array_equal(back.floats(jnp.float32).array, stored.floats(jnp.float32).array)


def test_the_scale_is_not_rounded_to_the_dtype_of_the_inputs():
    """Integers up to 127 are exact in bfloat16, so only the inputs and the result are rounded."""
    weight, x = named(1, Heads, Embed), named(2, Batch, Embed, dtype=jnp.bfloat16)
    found = dot(x, Int8Weight.of(weight, Embed), Embed)
    exact = np.asarray(x.array, np.float64) @ by_definition(np.asarray(weight.array, np.float64), (1,)).T
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.array.astype(jnp.float32), exact, rtol=2.0**-8, atol=1e-5)


def test_int8_weights_of_experts_are_multiplied_without_names():
    Experts = Axis("experts", 6)
    weight, x = named(1, Experts, Embed, Heads), named(2, Batch, Embed).array
    raw = arranged(Int8Weight.of(weight, Embed), ("experts", "embed", "heads"))
    assert isinstance(raw, StoredArray)
    assert raw.shape == (6, 16, 3)
    fourth = jax.tree.map(lambda a: a[3], raw)
    expected = by_definition(np.asarray(weight.array, np.float64), (1,))
    np.testing.assert_allclose(raw.floats(jnp.float32), expected, rtol=1e-6)
    np.testing.assert_allclose(einsum("ri,io->ro", x, fourth), np.asarray(x) @ expected[3], rtol=1e-5, atol=1e-5)
    specs = array_specs(raw, PartitionSpec("data", "model", None))
    assert (specs.values, specs.scale) == (PartitionSpec("data", "model", None), PartitionSpec("data", None, None))


def test_gradients_pass_through_an_int8_weight_to_its_inputs():
    weight, x = Int8Weight.of(named(1, Heads, Embed), Embed), named(2, Batch, Embed)
    by_int8, by_floats = (
        jax.grad(lambda x, w=w: hax.sum(hax.square(dot(x, w, Embed))).scalar())(x)
        for w in (weight, weight.floats(jnp.float32))
    )
    np.testing.assert_allclose(by_int8.array, by_floats.array, rtol=1e-5, atol=1e-5)
