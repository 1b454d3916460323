"""Products in fp8 against their definition in float64 NumPy: quantized with `ml_dtypes`, multiplied exactly."""

import functools
import json
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.products.fp8 import E4M3, E5M2, Fp8, fp8_product, has_fp8_products, to_fp8
from jaxlm.core.products.matmul import dot
from jaxlm.core.tracing import tracing

GOLDEN = json.loads((Path(__file__).parents[1] / "vectors" / "fp8.json").read_text())
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
RECIPES = [Fp8("tensorwise"), Fp8("rowwise")]
every_recipe = pytest.mark.parametrize("fp8", RECIPES, ids=lambda fp8: fp8.recipe)


def stands_for(x, summed: tuple[int, ...], dtype, fp8: Fp8) -> np.ndarray:
    """The numbers that an array's fp8 form stands for, in float64."""
    x = np.asarray(x).astype(np.float32)
    maximum = np.abs(x).max(axis=summed if fp8.recipe == "rowwise" else None, keepdims=True)
    scale = (LARGEST[dtype] / np.maximum(maximum.astype(np.float64), 1e-12)).astype(np.float32)
    if fp8.recipe == "rowwise":
        scale = np.exp2(np.floor(np.log2(scale))).astype(np.float32)
    saturated = np.clip(x * scale, -LARGEST[dtype], LARGEST[dtype])
    return saturated.astype(dtype).astype(np.float64) / scale


def problem(dtype, seed: int = 0):
    """Inputs [3, 5, 4, 8], a weight [6, 2, 4, 8] and a gradient [3, 5, 6, 2], with rows of very different sizes."""
    rng = np.random.default_rng(seed)
    shapes = (3, 5, 4, 8), (6, 2, 4, 8), (3, 5, 6, 2)
    sizes = (np.exp(rng.normal(0, 1, (*shape[:2], 1, 1))) for shape in shapes)
    return tuple(jnp.asarray(rng.normal(size=s) * size, dtype) for s, size in zip(shapes, sizes, strict=True))


def test_scales_are_those_of_the_golden_vectors():
    fp8 = RECIPES[0]
    assert {name: float(jnp.finfo(name).max) for name in GOLDEN["largest"]} == GOLDEN["largest"]
    maximum = fp8.maximum(jnp.asarray([1.0, -GOLDEN["maximum"], 2.0], jnp.bfloat16), ())
    scale = fp8.scale(maximum)
    assert (float(scale[0]), float(1 / scale[0])) == (GOLDEN["scale"], GOLDEN["inverse"])
    assert float(fp8.scale(jnp.zeros(()))) == pytest.approx(448 / GOLDEN["smallest_maximum"], rel=1e-7)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda dtype: dtype.dtype.name)
def test_numbers_are_rounded_once_to_the_nearest_and_saturate(dtype):
    rng = np.random.default_rng(0)
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    middle = ((every[1:] + every[:-1]) / 2).astype(np.float32)  # ties
    near = [np.nextafter(middle, to) for to in (np.float32(-np.inf), np.float32(np.inf))]
    large = np.float32([1e3, 1e5, -1e9, 3e38])
    x = np.concatenate([every, middle, *near, large, rng.normal(size=5000).astype(np.float32)])
    one = jnp.ones((), jnp.float32)
    found = jax.jit(lambda x: to_fp8(x, one, dtype).values)(jnp.asarray(x))
    expected = np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), expected.view(np.uint8))


@functools.partial(jax.jit, static_argnums=3)
def products(x, w, d, fp8):
    """The product, and its gradients with respect to x and w."""
    out, back = jax.vjp(lambda x, w: fp8_product(x, w, 2, fp8), x, w)
    return out, *back(d)


@every_recipe
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.dtype.name)
def test_the_three_products_are_those_of_the_quantized_arrays(fp8, dtype):
    x, w, d = problem(dtype)
    found = products(x, w, d, fp8)
    gradient = E4M3 if fp8.recipe == "rowwise" else E5M2
    by_inputs = stands_for(x, (2, 3), E4M3, fp8), stands_for(w, (2, 3), E4M3, fp8)
    by_outputs = stands_for(d, (2, 3), gradient, fp8), stands_for(w, (0, 1), E4M3, fp8)
    by_rows = stands_for(d, (0, 1), gradient, fp8), stands_for(x, (0, 1), E4M3, fp8)
    expected = (
        np.einsum("abij,opij->abop", *by_inputs),
        np.einsum("abop,opij->abij", *by_outputs),
        np.einsum("abop,abij->opij", *by_rows),
    )
    rtol = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-10}[jnp.dtype(dtype).name]
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == dtype
        got = np.asarray(got).astype(np.float64)
        # A sum that cancels has the rounding of its terms.
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=1e-6 * np.abs(wanted).max())


@every_recipe
def test_the_error_is_that_of_three_or_two_bits(fp8):
    """So that the test above is not one of a product that is not quantized, or quantized twice."""
    x, w, d = (np.asarray(a, np.float32) for a in problem(jnp.bfloat16))
    exact = (
        np.einsum("abij,opij->abop", x, w),
        np.einsum("abop,opij->abij", d, w),
        np.einsum("abop,abij->opij", d, x),
    )
    for got, wanted in zip(products(x, w, d, fp8), exact, strict=True):
        error = np.linalg.norm(np.asarray(got) - wanted) / np.linalg.norm(wanted)
        assert 0.005 < error < 0.1


def test_a_rows_size_does_not_change_other_rows_of_the_recipe_rowwise():
    x, w, d = problem(jnp.float32)
    larger = x.at[0, 0].multiply(2**24)
    product = lambda x, recipe: products(x, w, d, Fp8(recipe))[0]  # noqa: E731
    rest = lambda out: np.asarray(out)[1:]  # noqa: E731
    np.testing.assert_array_equal(rest(product(larger, "rowwise")), rest(product(x, "rowwise")))
    assert np.abs(rest(product(larger, "tensorwise"))).max() < np.abs(rest(product(x, "tensorwise"))).max() / 2


@every_recipe
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values_stay_non_finite(fp8, value):
    x, w, d = problem(jnp.bfloat16)
    out, _, of_w = products(x.at[1, 1, 1, 1].set(value), w, d, fp8)
    gradients = products(x, w, d.at[0, 0, 0, 0].set(value), fp8)[1:]
    assert not any(np.isfinite(np.asarray(a, np.float32)).all() for a in (out, of_w, *gradients))


@every_recipe
def test_zeros_are_zeros(fp8):
    zeros = (jnp.zeros_like(a) for a in problem(jnp.bfloat16))
    assert all((np.asarray(a, np.float32) == 0).all() for a in products(*zeros, fp8))


@pytest.mark.slow
def test_only_training_multiplies_in_fp8_and_not_for_second_derivatives():
    Row, In, Out = Axis("row", 4), Axis("in", 32), Axis("out", 16)
    rng = np.random.default_rng(0)
    x, w = (hax.named(jnp.asarray(rng.normal(size=(a.size, In.size)), jnp.float32), (a, In)) for a in (Row, Out))
    plain = dot(x, w, In)
    np.testing.assert_array_equal(dot(x, w, In, RECIPES[0]).array, plain.array)
    with tracing(quantized_products=True):
        assert not np.array_equal(dot(x, w, In, RECIPES[0]).array, plain.array)
        assert dot(x, w, In, RECIPES[0]).axes == plain.axes
        np.testing.assert_array_equal(dot(x, w, In).array, plain.array)
        with tracing(twice_differentiable=True):
            np.testing.assert_array_equal(dot(x, w, In, RECIPES[0]).array, plain.array)


@pytest.mark.parametrize(
    ("capability", "expected"), [("8.0", False), ("8.9", True), ("9.0", True), ("10.0", True), ("gfx942", False)]
)
def test_devices_with_products_in_fp8(capability, expected):
    class Device:
        compute_capability = capability

    assert has_fp8_products(Device()) is expected
    assert not has_fp8_products(jax.devices("cpu")[0])


def test_numpy_rounds_as_the_reference_does():
    """The values that `ml_dtypes` is trusted for above: ties to even, and the largest numbers."""
    assert [float(v) for v in np.float32([17, 19, 448]).astype(ml_dtypes.float8_e4m3fn)] == [16, 20, 448]
    assert [float(v) for v in np.float32([9, 11, 57344]).astype(ml_dtypes.float8_e5m2)] == [8, 12, 57344]
