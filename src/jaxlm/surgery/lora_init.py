"""How adapters start: from the weight that they change, or from the inputs of their layer.

Source: Meng et al. 2024, PiSSA: Principal Singular Values and Singular Vectors Adaptation (arXiv:2404.02948), equations 2
to 4. Büyükakyüz 2024, OLoRA: Orthonormal Low-Rank Adaptation (arXiv:2406.01775), algorithm 1. Paischer et al. 2024, Explained
Variance Adaptation (arXiv:2410.07170), section 3, with the same rank for all layers (rho = 1). Where the papers leave it
open, as PEFT has it (`peft/tuners/lora/layer.py`, `eva.py`): decompositions in float32, PiSSA divides the singular values by
the adapter's scale, OLoRA does not, and EVA centers the inputs.

    pissa   A = sqrt(S / scale) V^T, B = U sqrt(S / scale) of the largest singular values; the weight keeps the rest
    olora   A = the first rows of R, B = the first columns of Q, of the weight's QR decomposition; likewise
    eva     A = the principal components of the inputs, B = 0

Signs follow PEFT's EVA: the entry of each row of A with the largest absolute value is positive.
"""

from typing import Literal

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import LORA, axes_of
from jaxlm.surgery.input_moments import InputMoments
from jaxlm.surgery.layer_matrices import by_layer, flat, named
from jaxlm.surgery.low_rank import LowRank

Init = Literal["default", "pissa", "olora", "eva"]
SPLITS_WEIGHT = ("pissa", "olora")  # move a part of the weight into the adapter


def split_weight(weight: NamedArray, change: LowRank, init: str) -> tuple[NamedArray, LowRank]:
    """The weight without a part of low rank, and the change that is this part. They add up to the weight."""
    inputs, outputs, rank = axes_of(change.In), axes_of(change.Out), change.a.axis_size(LORA)
    stacked = tuple(axis for axis in weight.axes if axis not in (*inputs, *outputs))
    matrices = flat(weight, stacked, outputs, inputs)
    # A layer without an adapter has the scale 0. What becomes of it is cut off.
    scales = jnp.broadcast_to(jnp.asarray(getattr(change.scales, "array", change.scales)), matrices.shape[:1])

    def factors(matrix: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        if init == "pissa":
            u, s, vh = jnp.linalg.svd(matrix, full_matrices=False)
            root = jnp.sqrt(s[:rank] / scale)
            return _signed(root[:, None] * vh[:rank], u[:, :rank] * root)
        q, r = jnp.linalg.qr(matrix)
        return _signed(r[:rank], q[:, :rank])

    a, b = by_layer(factors, matrices, scales)
    change = change.with_values(*(named(new, old) for new, old in ((a, change.a), (b, change.b))))
    delta = (hax.dot(change.b, change.a, axis=LORA) * change.scales).rearrange(weight.axes)
    return (weight.astype(jnp.float32) - delta).astype(weight.dtype), change


def principal_components(moments: InputMoments, rank: int) -> tuple[jax.Array, jax.Array]:
    """The principal components of the inputs [layers, rank, in], by layer, and the share of the variance that each explains.

    Layers that are not stacked are one.
    """
    stacked = moments.count.axes
    inputs = tuple(axis for axis in moments.total.axes if axis not in stacked)
    others = tuple(axis for axis in moments.products.axes if axis not in moments.total.axes)
    count = moments.count.array.reshape(-1)
    total, products = flat(moments.total, stacked, inputs), flat(moments.products, stacked, inputs, others)

    def components(count: jax.Array, total: jax.Array, products: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean = total / count
        values, vectors = jnp.linalg.eigh(products / count - jnp.outer(mean, mean))
        values, rows = values[::-1], vectors.T[::-1]
        rows, _ = _signed(rows[:rank], rows[:rank].T)
        return rows, values[:rank] / jnp.sum(values)

    return by_layer(components, count, total, products)


def eva(change: LowRank, moments: InputMoments) -> LowRank:
    """The change, still zero, with the principal components of the inputs as A."""
    rows, _ = principal_components(moments, change.a.axis_size(LORA))
    return change.with_values(named(rows, change.a), change.b)


def as_bits(array: NamedArray) -> NamedArray:
    """Float32 values as integers, which neither train nor are rounded."""
    return NamedArray(jax.lax.bitcast_convert_type(array.array.astype(jnp.float32), jnp.int32), array.axes)


def from_bits(bits: NamedArray) -> NamedArray:
    """The inverse of `as_bits`."""
    return NamedArray(jax.lax.bitcast_convert_type(bits.array, jnp.float32), bits.axes)


def _signed(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = jnp.take_along_axis(a, jnp.argmax(jnp.abs(a), axis=1, keepdims=True), axis=1)
    signs = jnp.where(largest[:, 0] < 0, -1.0, 1.0)
    return a * signs[:, None], b * signs
