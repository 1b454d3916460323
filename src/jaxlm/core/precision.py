"""The dtypes that parameters are stored and computed in (`trainer.mp`), and loss scaling for float16.

Source of loss scaling: Micikevicius et al. 2018, Mixed Precision Training (arXiv:1710.03740), section 3.2; grown and shrunk
as in the same group's later libraries. The scale is a power of two, so in any dtype with room for it scaling changes no bit.
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
    """A factor on the loss before the backward pass, taken out of the gradient after it."""

    @property
    @abc.abstractmethod
    def guards(self) -> tuple[StepGuard, ...]:
        """What follows the steps to choose the factor."""

    @abc.abstractmethod
    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        """The loss times the factor."""

    @abc.abstractmethod
    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        """The gradient without it."""


@dataclass(frozen=True)
class Unscaled(LossScale):
    """No factor, and nothing is computed."""

    @property
    def guards(self) -> tuple[StepGuard, ...]:
        """None."""
        return ()

    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        """The loss itself."""
        return loss

    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        """The gradient itself."""
        return gradient


class ScaleState(eqx.Module):
    """The factor, and what the next one depends on.

    Attributes:
        scale: float32, a power of two.
        good_steps: int32, finite steps since it last changed.
    """

    scale: jax.Array
    good_steps: jax.Array


@dataclass(frozen=True)
class DynamicLossScale(LossScale, StepGuard):
    """Halves the factor after a step that is not finite, and doubles it after so many that were.

    Attributes:
        initial: the first factor.
        growth_interval: finite steps in a row before it is doubled.
        smallest, largest: it stays between them.
    """

    name: ClassVar[str] = "loss_scale"

    initial: float = 2.0**15
    growth_interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    @property
    def guards(self) -> tuple[StepGuard, ...]:
        """Itself."""
        return (self,)

    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        return loss * slots[self.name].scale

    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        inverse = 1 / slots[self.name].scale
        return jax.tree.map(lambda g: (g * inverse).astype(g.dtype), gradient)

    def init_slot(self) -> ScaleState:
        return ScaleState(jnp.asarray(self.initial, jnp.float32), jnp.zeros((), jnp.int32))

    def judge(self, slot: ScaleState, stats: StepStats) -> Verdict:
        """Never leaves out a step that is finite."""
        good_steps = slot.good_steps + 1
        grows = good_steps >= self.growth_interval
        grown = jnp.where(grows, jnp.minimum(slot.scale * 2, self.largest), slot.scale)
        halved = jnp.maximum(slot.scale / 2, self.smallest)
        after = ScaleState(
            scale=jnp.where(stats.finite, grown, halved),
            good_steps=jnp.where(stats.finite & ~grows, good_steps, 0),
        )
        return Verdict(jnp.asarray(True), after, {"train/loss_scale": slot.scale})


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
        params: of parameters, gradients and optimizer state at rest.
        compute: of matrix products and activations. Norms, softmax and the loss are float32 in any case.
        loss_scale: keeps small gradients from vanishing; float16 needs one.
    """

    params: jnp.dtype
    compute: jnp.dtype
    loss_scale: LossScale = field(default_factory=Unscaled)

    def to_params(self, tree: T) -> T:
        """Floating-point leaves in the dtype that parameters rest in."""
        return _cast(tree, self.params)

    def to_compute(self, tree: T) -> T:
        """Floating-point leaves in the compute dtype."""
        return _cast(tree, self.compute)

    @property
    def wide(self) -> "Precision":
        """The same with float32 in the place of a compute dtype that needs its loss scaled: second derivatives are taken
        along directions as long as the square root of a model's size, and float16 ends at 65,504."""
        if isinstance(self.loss_scale, Unscaled):
            return self
        return Precision(self.params, jnp.dtype(jnp.float32))

    def __str__(self) -> str:
        scaled = "" if isinstance(self.loss_scale, Unscaled) else ", dynamic loss scale"
        return f"params {self.params.name}, compute {self.compute.name}{scaled}"


def _cast(tree: T, dtype) -> T:
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def parse_precision(text: str) -> Precision:
    """Reads `f32`, `bf16` or `p=f32,c=bfloat16[,o=bfloat16]` (long names `params`, `compute`, `output` too).

    Compute defaults to params; computing in float16 brings dynamic loss scaling with it. The output dtype may be
    written, as configurations of other programs do, but only as the compute dtype: the loss reads hidden states in the
    compute dtype and works in float32.

    Raises:
        ConfigError: an unknown part or dtype, parameters in float16, or an output dtype that would have no effect.
    """
    parts = text.split(",") if "=" in text else [f"params={text}", f"compute={text}"]
    found: dict[str, jnp.dtype] = {}
    for part in parts:
        name, _, value = part.strip().partition("=")
        if name not in _PARTS:
            raise ConfigError(
                f"trainer.mp: '{text}' has the part '{name}'. Allowed: p=, c=, o= (params, compute, output)"
            )
        found[_PARTS[name]] = _dtype(value.strip(), text)
    params = found.get("params", jnp.dtype(jnp.float32))
    compute = found.get("compute", params)
    if found.get("output", compute) != compute:
        raise ConfigError(
            f"trainer.mp: '{text}' asks for another output than compute dtype, which would have no effect: hidden"
            f" states stay in the compute dtype and the loss works in float32. Leave `o=` out or set it to {compute.name}"
        )
    if params == jnp.float16:
        raise ConfigError(
            f"trainer.mp: '{text}' keeps parameters in float16, where small updates and the optimizer's epsilon vanish."
            " Use 'p=f32,c=float16'"
        )
    return Precision(params, compute, DynamicLossScale() if compute == jnp.float16 else Unscaled())


def _dtype(name: str, text: str) -> jnp.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"trainer.mp: '{text}' has the dtype '{name}'. Allowed: {', '.join(_DTYPES)}")
    dtype = jnp.dtype(_DTYPES[name])
    if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ConfigError(f"trainer.mp: '{text}' needs 64-bit arrays: set JAX_ENABLE_X64=1 in the environment")
    return dtype
