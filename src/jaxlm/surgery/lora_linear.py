"""The linear layer with a low-rank adapter.

x {.., In} --- W (frozen) -------------------------------------+--- {.., Out}
           \\-- dropout -- A {rank, In} -- B {Out, rank} * scale --/
"""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import AxisSpec, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LORA
from jaxlm.core.products.float32_sums import shifted
from jaxlm.core.products.matmul import dot
from jaxlm.core.products.stored_weights import Weight
from jaxlm.models.layers import DropoutLayer, dropout
from jaxlm.models.linear import Linear
from jaxlm.models.remat import ADAPTED, checkpoint_name
from jaxlm.surgery.lora_init import SPLITS_WEIGHT, Init, as_bits, from_bits, split_weight
from jaxlm.surgery.low_rank import AdapterSize, LowRank


class LoraLinear(DropoutLayer, tree.Padded):
    """A linear layer with a low-rank adapter.

    Attributes:
        base: the original layer.
        a, b, scale, magnitude, layer, sizes: as in `LowRank`.
        dropout: dropout probability of the adapter's input.
        key: random key for dropout; None outside training.
        initial_a, initial_b: A and B at the start, if `init` has moved a part of the weight into them (`as_bits`). Exported
            adapters, which are for the weight before that, contain them.
    """

    base: Linear
    a: NamedArray
    b: NamedArray
    scale: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True, default=0.0)
    key: jax.Array | None = None
    magnitude: NamedArray | None = None
    layer: NamedArray | None = None
    sizes: tuple[AdapterSize, ...] = eqx.field(static=True, default=())
    initial_a: NamedArray | None = None
    initial_b: NamedArray | None = None

    @staticmethod
    def sized(
        base: Linear,
        sizes: Sequence[AdapterSize],
        *,
        dropout: float,
        use_dora: bool,
        key: jax.Array,
        init: Init = "default",
    ) -> "LoraLinear":
        """Adds an adapter that does not change the outputs. Args: sizes: one, or one for each layer."""
        new = LowRank.of(base.weight, base.In, base.Out, sizes, key=key, use_dora=use_dora)
        initial: tuple[NamedArray | None, ...] = (None, None)
        if init in SPLITS_WEIGHT:
            assert isinstance(base.weight, NamedArray), "stored weights are refused"
            weight, new = split_weight(base.weight, new, init)
            base, initial = dataclasses.replace(base, weight=weight), (as_bits(new.a), as_bits(new.b))
        return LoraLinear(base, new.a, new.b, new.scale, dropout, None, new.magnitude, new.layer, new.sizes, *initial)

    @property
    def change(self) -> LowRank:
        """What the adapter adds to the weight."""
        return LowRank(self.a, self.b, self.base.In, self.base.Out, self.scale, self.magnitude, self.layer, self.sizes)

    @property
    def exported_pair(self) -> tuple[NamedArray, NamedArray, int]:
        """A and B for the weight before `init` changed it, and how many of their ranks stand for one of the adapter's.

        s B A - s B0 A0 has twice the rank: [B, -B0] [A; A0], with the ranks of the two in turns.
        """
        if self.initial_a is None or self.initial_b is None:
            return self.a, self.b, 1
        a0, b0 = from_bits(self.initial_a), from_bits(self.initial_b)
        return _in_turns(self.a, a0), _in_turns(self.b, -b0), 2

    def __call__(self, inputs: NamedArray) -> NamedArray:
        """{.., In} to {.., Out}."""
        dropped = dropout(inputs, self.dropout, self.key)
        change = self.change
        low = dot(dot(dropped, change.inner, self.base.In), self.b, LORA) * change.scales
        if self.magnitude is not None:
            return self._with_magnitude(inputs, dropped, low)
        out = (self.base(inputs) + low).astype(inputs.dtype)
        return checkpoint_name(out, ADAPTED)

    def _with_magnitude(self, inputs: NamedArray, dropped: NamedArray, low: NamedArray) -> NamedArray:
        """W x + (f - 1) W x' + f low + bias, with the dropped inputs x' and f = magnitude / norm, as PEFT computes it."""
        linear = dataclasses.replace(self.base, bias=None)
        factor = checkpoint_name(self.change.factor(self.base.weight), ADAPTED)
        changed = checkpoint_name(linear(dropped) + low, ADAPTED)
        out = (changed * factor).rearrange(changed.axes)
        if self.key is not None:
            out = out + linear(inputs - dropped)
        if self.base.bias is not None:
            out = shifted(out, self.base.bias)
        return out.astype(inputs.dtype)

    def operand(self, x: NamedArray) -> NamedArray:
        """As `Linear.operand`."""
        return self.base.operand(x)

    def with_key(self, key: jax.Array) -> "LoraLinear":
        """Returns the layer with this dropout key, or unchanged if it has no dropout."""
        return dataclasses.replace(self, key=key) if self.dropout else self

    def for_part(self, number: jax.Array) -> "LoraLinear":
        return self if self.key is None else self.with_key(jax.random.fold_in(self.key, number))

    def padding(self) -> dict[str, int]:
        return self.change.padding()

    @property
    def In(self) -> AxisSpec:
        return self.base.In

    @property
    def Out(self) -> AxisSpec:
        return self.base.Out

    @property
    def weight(self) -> Weight:
        """The merged weight, which the loss reads if the head is adapted."""
        return self.merged().weight

    def merged(self) -> Linear:
        """Merges the adapter into a plain layer with the same output."""
        return dataclasses.replace(self.base, weight=self.change.applied(self.base.weight))


def _in_turns(first: NamedArray, second: NamedArray) -> NamedArray:
    """Both arrays in one of twice the rank: the first of each, the second of each, and so on."""
    at = first.axes.index(first.resolve_axis(LORA))
    both = jnp.stack([first.array.astype(jnp.float32), second.array], axis=at + 1)
    Rank = hax.Axis(LORA, 2 * first.axis_size(LORA))
    axes = tuple(Rank if axis.name == LORA else axis for axis in first.axes)
    return NamedArray(both.reshape([axis.size for axis in axes]), axes)
