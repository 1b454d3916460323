"""Weights in four bits against bitsandbytes' numbers, ml_dtypes' rounding and the formats' definitions."""

import functools
import json
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.products.dynamic_map import dynamic_map
from jaxlm.core.products.four_bit import NF4_TABLE, FourBitWeight, MXFP4Weight, NF4Weight, NVFP4Weight
from jaxlm.core.products.matmul import dot
from jaxlm.core.products.stored_weights import HalfWeight
from tests.tiers import one_of

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "nf4.json").read_text())
KINDS = {"nf4": NF4Weight, "nvfp4": NVFP4Weight, "mxfp4": MXFP4Weight}


def weight(seed: int, *axes: Axis) -> hax.NamedArray:
    values = np.random.default_rng(seed).standard_normal([axis.size for axis in axes])
    return hax.named(jnp.asarray(values, jnp.float32), axes)


def matrix(values: Any, shape: tuple[int, int]) -> tuple[hax.NamedArray, Axis, Axis]:
    Out, In = Axis("out", shape[0]), Axis("in", shape[1])
    return hax.named(jnp.asarray(values, jnp.float32).reshape(shape), (Out, In)), In, Out


def bits(stored: FourBitWeight) -> float:
    return 8 * sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(stored)) / stored.size


def flat(array: hax.NamedArray) -> np.ndarray:
    return np.asarray(array.array).reshape(-1)


def relative_error(stored: FourBitWeight, exact: hax.NamedArray) -> float:
    return float(np.linalg.norm(flat(stored.floats(jnp.float32)) - flat(exact)) / np.linalg.norm(flat(exact)))


def is_bitsandbytes(made: dict[str, Any]) -> None:
    """Codes and absmax are those of bitsandbytes; so are scale codes, where bitsandbytes takes the closest number."""
    exact, In, Out = matrix(made["weight"], made["shape"])
    plain, twice = jax.jit(lambda w: [NF4Weight.of(w, In, Out, double_quant=twice) for twice in (False, True)])(exact)
    num_bytes = exact.size // 2  # of an odd number of codes, the last byte has another filling
    for stored in (plain, twice):
        np.testing.assert_array_equal(flat(stored.codes)[:num_bytes], made["codes"][:num_bytes])
    np.testing.assert_array_equal(flat(plain.scales()), np.float32(made["absmax"]))
    scales: Any = twice.absmax
    np.testing.assert_allclose(flat(scales.mean), [made["scale_mean"]], rtol=1e-6)
    np.testing.assert_allclose(flat(scales.maxima), made["scale_maxima"], rtol=1e-5)
    differs = flat(scales.codes) != made["scale_codes"]
    assert differs.mean() <= 0.01 or differs.sum() <= 1
    largest = np.repeat(flat(scales.maxima), 256)[: len(differs)]
    assert np.all(np.abs(flat(twice.scales()) - flat(plain.scales())) <= 0.0071 * largest + 1e-9)  # half of 0.9 / 64
    same = np.repeat(~differs, 64)[: exact.size]
    np.testing.assert_allclose(flat(twice.floats(jnp.float32))[same], np.float32(made["floats"])[same], atol=1e-7)


def test_the_tables_are_those_of_bitsandbytes():
    np.testing.assert_array_equal(NF4_TABLE, np.float32(VECTORS["table"]))
    np.testing.assert_array_equal(dynamic_map(True), np.float32(VECTORS["scale_table"]))
    printed = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]
    printed += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1]
    np.testing.assert_allclose(NF4_TABLE, printed, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: str(case["shape"]))
def test_codes_and_absmax_are_those_of_bitsandbytes(case):
    is_bitsandbytes(case)


@pytest.mark.parametrize("shape", [(256, 512), (96, 80), (33, 7)], ids=str)
def test_other_weights_have_the_codes_of_bitsandbytes(shape):
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    from tests.vectors.make_nf4 import case

    is_bitsandbytes(case(shape, 7))


@pytest.mark.slow
def test_nf4_of_normal_weights():
    """Zeros stay, quantizing twice changes no code, and the error is that of a table for the normal distribution."""
    exact, In, Out = matrix(np.random.default_rng(0).standard_normal((512, 2048)), (512, 2048))
    exact = hax.named(exact.array.at[3, :100].set(0), exact.axes)
    of, floats_of = (
        jax.jit(lambda exact: NF4Weight.of(exact, In, Out)),
        jax.jit(lambda stored: stored.floats(jnp.float32)),
    )
    stored = of(exact)
    floats = floats_of(stored)
    assert not np.asarray(floats.array)[3, :100].any()
    np.testing.assert_array_equal(flat(of(floats).codes), flat(stored.codes))
    blocks = flat(exact).reshape(-1, 64)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 7
    even = np.round(blocks / np.where(scale > 0, scale, 1)) * scale
    assert relative_error(stored, exact) < 0.095 < np.linalg.norm(even - blocks) / np.linalg.norm(blocks)
    assert bits(stored) == pytest.approx(4.127, abs=0.001)
    plain = jax.eval_shape(lambda: NF4Weight.of(exact, In, Out, double_quant=False))
    assert bits(plain) == 4.5


@pytest.mark.slow
def test_nvfp4_is_what_ml_dtypes_rounds_to():
    exact, In, Out = matrix(np.random.default_rng(1).standard_normal((64, 256)) * 0.02, (64, 256))
    exact = hax.named(exact.array.at[3, :32].set(0).at[5].multiply(1e-6), exact.axes)
    stored = jax.jit(lambda exact: NVFP4Weight.of(exact, In, Out))(exact)
    blocks = flat(exact).reshape(-1, 16)
    scale = np.float32(np.abs(blocks).max() / np.float32(6 * 448))
    in_e4m3 = (np.abs(blocks).max(axis=1) / np.float32(6) / scale).astype(ml_dtypes.float8_e4m3fn)
    by_block = (in_e4m3.astype(np.float32) * scale)[:, None]
    scaled = np.clip(blocks / np.where(by_block > 0, by_block, np.inf), -6, 6)
    expected = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * by_block
    np.testing.assert_allclose(flat(stored.floats(jnp.float32)), expected.reshape(-1), rtol=1e-6, atol=0)
    np.testing.assert_array_equal(flat(stored.block_scales), in_e4m3.view(np.uint8))
    low_bits_first = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(-1, 2)
    np.testing.assert_array_equal(flat(stored.codes) & 7, low_bits_first[:, 0] & 7)
    assert bits(stored) == pytest.approx(4.5, abs=0.01)
    normal, In, Out = matrix(np.random.default_rng(0).standard_normal((512, 2048)), (512, 2048))
    assert relative_error(jax.jit(lambda normal: NVFP4Weight.of(normal, In, Out))(normal), normal) <= 0.097


@pytest.mark.slow
def test_mxfp4_keeps_what_is_in_mxfp4_and_rounds_the_rest_as_ml_dtypes():
    """Of all codes with all scales but those whose numbers float32 has not, or not as normal ones."""
    codes = np.random.default_rng(0).integers(0, 16, (251, 64)).astype(np.uint8)
    codes[:, :16] = np.arange(16)
    table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    kept, In, Out = matrix(table[codes] * 2.0 ** (np.arange(2, 253.0)[:, None] - 127), codes.shape)
    for block, largest in ((0, 1.5), (32, 0.5)):  # blocks whose largest number is not 6
        small = np.where(np.abs(table[codes[:128, block:][:, :32]]) > largest, 0, 1)
        kept = hax.named(kept.array.at[:128, block : block + 32].multiply(small), kept.axes)
    stored, floats = jax.jit(lambda w: (s := MXFP4Weight.of(w, In, Out), s.floats(jnp.float32)))(kept)
    np.testing.assert_array_equal(flat(floats), flat(kept))
    assert bits(stored) == 4.25
    exact, In, Out = matrix(np.random.default_rng(1).standard_normal((64, 256)) * 0.02, (64, 256))
    exact = hax.named(exact.array.at[3, :32].set(0).at[5].multiply(1e-6), exact.axes)
    stored, floats = jax.jit(lambda w: (s := MXFP4Weight.of(w, In, Out), s.floats(jnp.float32)))(exact)
    blocks = flat(exact).reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    scale = np.where(largest > 0, 2 ** (np.floor(np.log2(np.maximum(largest, 1e-30))) - 2), 1)
    expected = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    np.testing.assert_array_equal(flat(floats), expected.astype(np.float32).reshape(-1))


Layers, Heads, Size, Embed = Axis("layers", 3), Axis("heads", 5), Axis("head_size", 8), Axis("embed", 64)


INPUTS = {"embed": (Embed,), "heads": (Heads, Size), "odd": (Axis("embed", 33),)}
PADDED = [(kind, "odd") for kind in KINDS]
OTHERS = [(kind, inputs) for kind in KINDS for inputs in ("embed", "heads")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "inputs"), [*PADDED, *one_of(OTHERS, but=2)])
def test_layers_are_quantized_one_by_one(kind, inputs):
    inputs = INPUTS[inputs]
    outputs = (Heads, Size) if len(inputs) == 1 else (Embed,)
    exact, x = weight(1, Layers, *outputs, *inputs), weight(2, Axis("batch", 4), *inputs)

    @jax.jit
    def computed(exact, x):
        stored, alone = (KINDS[kind].of(each, inputs, outputs) for each in (exact, exact["layers", 1]))
        merged = stored.flatten_axes(outputs, "flat_out").flatten_axes(inputs, "flat_in")
        back = merged.unflatten_axis("flat_in", inputs).unflatten_axis("flat_out", outputs)
        floats = [each.floats(jnp.float32) for each in (stored, merged, alone)]
        return stored, merged, back, alone, floats, dot(x, alone, inputs)

    stored, merged, back, alone, (floats, of_merged, of_alone), product = computed(exact, x)
    assert (stored.axes, stored.size) == (exact.axes, exact.size)
    second = jax.tree.map(lambda leaf: leaf["layers", 1], stored, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), second, alone)
    np.testing.assert_allclose(flat(floats["layers", 1]), flat(of_alone), rtol=1e-6)
    np.testing.assert_allclose(product.array, hax.dot(x, of_alone, axis=inputs).array, atol=1e-5)
    assert [axis.name for axis in merged.axes] == ["layers", "flat_out", "flat_in"]
    np.testing.assert_array_equal(flat(of_merged), flat(floats))
    assert back.axes == stored.axes
    jax.tree.map(np.testing.assert_array_equal, back, stored)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_weights(dtype):
    exact = weight(0, Heads, Size, Embed)
    stored = HalfWeight(exact.astype(dtype))
    error = np.abs(flat(stored.floats(jnp.float32)) - flat(exact))
    assert np.all(error <= np.abs(flat(exact)) * 2.0**-8)
    assert np.sqrt(np.mean(error**2) / np.mean(flat(exact) ** 2)) <= 2e-3
    x = weight(1, Axis("batch", 4), Embed)
    out = dot(x, stored, Embed)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out.array, hax.dot(x, stored.floats(jnp.float32), axis=Embed).array, atol=1e-5)


@pytest.mark.slow
def test_the_backward_pass_keeps_the_stored_form():
    """What is saved for it has the size of the codes, not that of the floats."""
    exact = weight(0, Heads, Size, Embed)
    stored = jax.jit(lambda exact: NF4Weight.of(exact, Embed, (Heads, Size)))(exact)
    x = weight(1, Axis("batch", 4), Embed)
    out, pull = jax.vjp(lambda x: dot(x, stored, Embed), x)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pull)) < exact.array.nbytes / 2
    expected = hax.dot(out, stored.floats(jnp.float32), axis=(Heads, Size))
    np.testing.assert_allclose(pull(out)[0].rearrange(expected.axes).array, expected.array, rtol=1e-5, atol=1e-5)
