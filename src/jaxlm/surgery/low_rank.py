"""A low-rank change of a weight, W + scale * B A, and DoRA's magnitudes.

Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1. Liu et al. 2024, DoRA: Weight-Decomposed Low-Rank Adaptation
(arXiv:2402.09353), equation 5: every output has a magnitude m that trains, W' = m (W + scale * B A) / ||W + scale * B A||
with the norm over the inputs. Its section 4.3: the norm gets no gradient.

If ranks differ between the layers of a stack, all arrays have the largest rank. Entries beyond a layer's rank are zero in A
and in B. They are never read, so their gradient is zero and most optimizers leave them zero; some that mix rows (`kron`) do
not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS, LORA, axes_of
from jaxlm.core.products.stored_weights import Weight


@dataclass(frozen=True)
class AdapterSize:
    """Rank and scale of one adapter. Rank 0 means no adapter."""

    rank: int
    scale: float


class LowRank(tree.Padded):
    """scale * B A, and DoRA's magnitudes if there are any.

    Attributes:
        a: {layers, lora_rank, *In}; without `layers` if the weight is not stacked.
        b: {layers, *Out, lora_rank}, likewise.
        scale: multiplier of B A.
        magnitude: {layers, *Out}, likewise; None without DoRA.
        layer: int32 {layers}, the index of each layer into `sizes`; None if all layers have the same rank and scale.
        sizes: of all layers.
    """

    a: NamedArray
    b: NamedArray
    In: AxisSpec = eqx.field(static=True)
    Out: AxisSpec = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    magnitude: NamedArray | None = None
    layer: NamedArray | None = None
    sizes: tuple[AdapterSize, ...] = eqx.field(static=True, default=())

    @staticmethod
    def of(
        weight: Weight,
        In: AxisSpec,
        Out: AxisSpec,
        sizes: Sequence[AdapterSize],
        *,
        key: jax.Array,
        starts: Literal["a", "b"] = "a",
        use_dora: bool = False,
    ) -> "LowRank":
        """A change that is initially zero.

        Args:
            sizes: one, or one for each layer.
            starts: `a` starts uniform within +-1/sqrt(fan in) and B as zero; `b` starts as N(0, 1) and A as zero.
        """
        rank = max(size.rank for size in sizes)
        Rank, inputs, outputs = Axis(LORA, rank), axes_of(In), axes_of(Out)
        stacked = tuple(axis for axis in weight.axes if axis not in (*inputs, *outputs))
        if starts == "a":
            bound = 1.0 / math.sqrt(hax.axis_size(inputs))
            a = hax.random.uniform(key, (*stacked, Rank, *inputs), minval=-bound, maxval=bound)
            b = hax.zeros((*stacked, *outputs, Rank))
        else:
            a, b = hax.zeros((*stacked, Rank, *inputs)), hax.random.normal(key, (*stacked, *outputs, Rank))
        layer = None
        if len(set(sizes)) > 1:
            (Layers,) = stacked
            layer = hax.arange(Layers, dtype=jnp.int32)
            ranks = NamedArray(jnp.asarray([size.rank for size in sizes]), (Layers,))
            a, b = (_within(array, ranks) for array in (a, b))
        new = LowRank(a, b, In, Out, sizes[0].scale, None, layer, tuple(sizes) if layer is not None else ())
        if not use_dora:
            return new
        magnitude = new.norms(weight)
        if layer is not None:  # a layer without an adapter has no magnitudes either
            magnitude = (magnitude * (new.ranks > 0)).rearrange(magnitude.axes)
        return eqx.tree_at(lambda it: it.magnitude, new, magnitude, is_leaf=lambda x: x is None)

    def with_values(self, a: NamedArray, b: NamedArray) -> "LowRank":
        """The change with other values of A and B, which are cut off at the rank of their layer."""
        if self.layer is not None:
            a, b = (_within(array, self.ranks) for array in (a, b))
        return eqx.tree_at(lambda it: (it.a, it.b), self, (a, b))

    @property
    def scales(self) -> float | NamedArray:
        """The multiplier of B A, or that of each layer."""
        return self.scale if self.layer is None else self._by_layer([size.scale for size in self.sizes], self.a.dtype)

    @property
    def inner(self) -> NamedArray:
        """A, without what is beyond the rank of its layer."""
        return self.a if self.layer is None else _within(self.a, self.ranks)

    @property
    def ranks(self) -> NamedArray:
        """The rank of each layer, if they differ."""
        return self._by_layer([size.rank for size in self.sizes], jnp.int32)

    def applied(self, weight: Weight) -> NamedArray:
        """The changed weight, in its dtype."""
        dtype = weight.dtype if isinstance(weight, NamedArray) else self.a.dtype
        exact = weight if isinstance(weight, NamedArray) else weight.floats(dtype)
        delta = hax.dot(self.b, self.inner, axis=LORA) * self.scales
        changed = exact + delta.rearrange(exact.axes).astype(dtype)
        if self.magnitude is None:
            return changed
        return (changed * self.factor(weight)).rearrange(exact.axes).astype(dtype)

    def factor(self, weight: Weight) -> NamedArray:
        """What DoRA multiplies the outputs of the changed weight by, magnitude / norm, in float32 {layers, *Out}."""
        assert self.magnitude is not None
        norms = self.norms(weight)
        known = norms > 0
        if self.layer is not None:
            known = known & (self.ranks > 0)
        known = known.rearrange(norms.axes)
        magnitude = self.magnitude.rearrange(norms.axes).astype(jnp.float32)
        return hax.where(known, magnitude / hax.where(known, norms, 1.0), 1.0)

    def norms(self, weight: Weight) -> NamedArray:
        """||W + scale * B A|| over the inputs, in float32 {layers, *Out}, without a gradient."""
        exact = weight.astype(jnp.float32) if isinstance(weight, NamedArray) else weight.floats(jnp.float32)
        exact, a, b = jax.lax.stop_gradient((exact, self.inner.astype(jnp.float32), self.b.astype(jnp.float32)))
        changed = exact + (hax.dot(b, a, axis=LORA) * self.scales).rearrange(exact.axes)
        return hax.sqrt(hax.sum(changed * changed, axis=self.In))

    def padding(self) -> dict[str, int]:
        ranks = [size.rank for size in self.sizes]
        arrays = [
            leaf for leaf in (self.a, self.b, self.magnitude) if leaf is not None
        ]  # frozen or masked leaves are None
        # A part of a stack does not know which of the layers it has.
        if not ranks or not arrays or arrays[0].axis_size(LAYERS) != len(ranks):
            return {}
        inputs, outputs = (hax.axis_size(spec) for spec in (self.In, self.Out))
        unused = sum(max(ranks) - rank for rank in ranks)
        return {"a": unused * inputs, "b": unused * outputs, "magnitude": ranks.count(0) * outputs}

    def _by_layer(self, values: Sequence[float], dtype) -> NamedArray:
        assert self.layer is not None
        return NamedArray(jnp.asarray(values, dtype)[self.layer.array], self.layer.axes)


def _within(array: NamedArray, ranks: NamedArray) -> NamedArray:
    """An array of adapters with zeros beyond the rank of each layer."""
    Rank = array.resolve_axis(LORA)
    used = hax.arange(Rank) < ranks.broadcast_axis(Rank)
    return hax.where(used.broadcast_to(array.axes), array, 0)
