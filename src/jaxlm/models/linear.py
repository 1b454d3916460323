"""Linear maps between named axes."""

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, AxisSpec, NamedArray


class Linear(eqx.Module):
    """{..., *In} to {..., *Out}.

    Not haliax's own: that one multiplies its weight by a constant on every call, and the product, once more the size of
    the weight, would be kept for the backward pass.

    Attributes:
        weight: {*Out, *In}.
        bias: {*Out}.
    """

    weight: NamedArray
    bias: NamedArray | None
    In: AxisSpec = eqx.field(static=True)
    Out: AxisSpec = eqx.field(static=True)

    @staticmethod
    def init(In: AxisSpec, Out: AxisSpec, *, std: float, key: jax.Array, use_bias: bool = False) -> "Linear":
        """N(0, std) weights and, if asked for, zero biases."""
        weight = hax.random.normal(key, hax.concat_axis_specs(Out, In)) * std
        return Linear(weight, hax.zeros(Out) if use_bias else None, In, Out)

    def __call__(self, x: NamedArray) -> NamedArray:
        """{..., *In} to {..., *Out}."""
        out = hax.auto_sharded(hax.dot(x, self.weight, axis=self.In))
        return out if self.bias is None else out + self.bias


class ExpertLinear(eqx.Module):
    """A linear map for each expert; `jaxlm.models.grouped` takes rows through them.

    Attributes:
        weight: {experts, In, Out}, as grouped products read it.
    """

    weight: NamedArray
    In: Axis = eqx.field(static=True)
    Out: Axis = eqx.field(static=True)

    @staticmethod
    def init(Expert: Axis, In: Axis, Out: Axis, *, std: float, key: jax.Array) -> "ExpertLinear":
        """N(0, std) weights."""
        return ExpertLinear(hax.random.normal(key, (Expert, In, Out)) * std, In, Out)
