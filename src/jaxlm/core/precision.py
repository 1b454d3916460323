"""Mixed precision: storage and compute dtypes (`trainer.mp`), and loss scaling for float16.

Source of loss scaling: Micikevicius et al. 2018, Mixed Precision Training (arXiv:1710.03740), section 3.2; the scale is
adjusted as in the same group's later libraries. It is a power of two, so scaling is exact unless it overflows or underflows.
"""

import abc
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import StepGuard, StepStats, Verdict

T = TypeVar("T")


class LossScale(abc.ABC):
    """Scales the loss before the backward pass, and unscales the gradient after it."""

    @property
    @abc.abstractmethod
    def guards(self) -> tuple[StepGuard, ...]:
        """Guards that track the steps to adjust the scale."""

    @abc.abstractmethod
    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        """The loss multiplied by the scale."""

    @abc.abstractmethod
    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        """The gradient divided by the scale."""


@dataclass(frozen=True)
class Unscaled(LossScale):
    """No loss scaling."""

    @property
    def guards(self) -> tuple[StepGuard, ...]:
        return ()

    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        return loss

    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        return gradient


class ScaleState(eqx.Module):
    """State of dynamic loss scaling.

    Attributes:
        scale: float32, a power of two.
        good_steps: int32, number of finite steps since the scale last changed.
    """

    scale: jax.Array
    good_steps: jax.Array


@dataclass(frozen=True)
class DynamicLossScale(LossScale, StepGuard):
    """Halves the scale after a non-finite step, and doubles it after `growth_interval` finite steps in a row.

    Attributes:
        initial: initial scale.
        growth_interval: number of consecutive finite steps before the scale is doubled.
        smallest, largest: limits of the scale.
    """

    name: ClassVar[str] = "loss_scale"
    reasons: ClassVar[tuple[str, ...]] = ("the loss scale {train/loss_scale:g} may be too large and is halved",)

    initial: float = 2.0**15
    growth_interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    @property
    def guards(self) -> tuple[StepGuard, ...]:
        return (self,)

    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        return loss * slots[self.name].scale

    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        inverse = 1 / slots[self.name].scale
        return jax.tree.map(lambda g: (g * inverse).astype(g.dtype), gradient)

    def init_slot(self) -> ScaleState:
        return ScaleState(jnp.asarray(self.initial, jnp.float32), jnp.zeros((), jnp.int32))

    def judge(self, slot: ScaleState, stats: StepStats) -> Verdict:
        """Updates the scale. Never skips a finite step."""
        reason = jnp.where(stats.finite, 0, 1)
        good_steps = slot.good_steps + 1
        grows = good_steps >= self.growth_interval
        grown = jnp.where(grows, jnp.minimum(slot.scale * 2, self.largest), slot.scale)
        halved = jnp.maximum(slot.scale / 2, self.smallest)
        after = ScaleState(
            scale=jnp.where(stats.finite, grown, halved),
            good_steps=jnp.where(stats.finite & ~grows, good_steps, 0),
        )
        return Verdict(reason, after, {"train/loss_scale": slot.scale})


_DTYPES = {
    "f32": jnp.float32,
    "float32": jnp.float32,
    "full": jnp.float32,
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "f16": jnp.float16,
    "float16": jnp.float16,
    "half": jnp.float16,
    "f64": jnp.float64,
    "float64": jnp.float64,
}
_PARTS = {"p": "params", "params": "params", "c": "compute", "compute": "compute", "o": "output", "output": "output"}


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    Attributes:
        params: dtype of stored parameters, gradients and optimizer state.
        compute: dtype of matrix products and activations. Norms, softmax and the loss are always float32.
        loss_scale: loss scaling, which float16 needs to keep small gradients from underflowing.
    """

    params: jnp.dtype
    compute: jnp.dtype
    loss_scale: LossScale = field(default_factory=Unscaled)

    def cast_to_params(self, tree: T) -> T:
        """Casts floating-point leaves to the parameter dtype."""
        return _cast(tree, self.params)

    def cast_to_compute(self, tree: T) -> T:
        """Casts floating-point leaves to the compute dtype."""
        return _cast(tree, self.compute)

    @property
    def for_second_derivatives(self) -> "Precision":
        """The same precision, but with float32 compute if the compute dtype needs loss scaling.

        The random directions of second derivatives have a norm of about the square root of the number of
        parameters, and float16 overflows at 65,504.
        """
        if isinstance(self.loss_scale, Unscaled):
            return self
        return Precision(self.params, jnp.dtype(jnp.float32))

    def __str__(self) -> str:
        scaled = "" if isinstance(self.loss_scale, Unscaled) else ", dynamic loss scale"
        return f"params {self.params.name}, compute {self.compute.name}{scaled}"


def _cast(tree: T, dtype) -> T:
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def parse_precision(text: str) -> Precision:
    """Parses `f32`, `bf16` or `p=f32,c=bfloat16[,o=bfloat16]`. The long names `params`, `compute`, `output` work too.

    Compute defaults to params. A float16 compute dtype turns on dynamic loss scaling. The output dtype is accepted for
    compatibility with other programs, but must equal the compute dtype: the loss reads hidden states in the compute dtype
    and computes in float32. Float16 parameters are an error.
    """
    parts = text.split(",") if "=" in text else [f"params={text}", f"compute={text}"]
    dtypes: dict[str, jnp.dtype] = {}
    for part in parts:
        name, _, value = part.strip().partition("=")
        if name not in _PARTS:
            raise ConfigError(
                f"trainer.mp: '{text}' has the part '{name}'. Allowed: p=, c=, o= (params, compute, output)"
            )
        dtypes[_PARTS[name]] = _dtype(value.strip(), text)
    params = dtypes.get("params", jnp.dtype(jnp.float32))
    compute = dtypes.get("compute", params)
    if dtypes.get("output", compute) != compute:
        raise ConfigError(
            f"trainer.mp: '{text}' sets an output dtype that differs from the compute dtype, which would have no effect:"
            " hidden states stay in the compute dtype and the loss is computed in float32. Remove `o=` or set it to"
            f" {compute.name}"
        )
    if params == jnp.float16:
        raise ConfigError(
            f"trainer.mp: '{text}' stores parameters in float16, where small updates and the optimizer's epsilon"
            " underflow. Use 'p=f32,c=float16'"
        )
    return Precision(params, compute, DynamicLossScale() if compute == jnp.float16 else Unscaled())


def _dtype(name: str, text: str) -> jnp.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"trainer.mp: '{text}' has the dtype '{name}'. Allowed: {', '.join(_DTYPES)}")
    dtype = jnp.dtype(_DTYPES[name])
    if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ConfigError(f"trainer.mp: '{text}' needs 64-bit arrays. Set JAX_ENABLE_X64=1 in the environment")
    return dtype
