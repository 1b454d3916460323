"""Limits on the optimizer's updates, rather than on the gradients: clipping, and cautious updates."""

from dataclasses import dataclass
from typing import Annotated, Any

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval

from jaxlm.core import tree
from jaxlm.core.axes import STACKED_LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFloat
from jaxlm.optim.rolling import RollingWindow

_MIN_STD = 1e-6


def clip_by_rms(max_rms: float) -> optax.GradientTransformation:
    """Scales each parameter's update in each layer down to a root mean square of at most `max_rms`.

    Source: Shazeer and Stern 2018, Adafactor (arXiv:1804.04235), section 6; applied to the update including momentum.
    """
    if not max_rms > 0:
        raise ConfigError(f"optimizer.update_rms_clipping: {max_rms} given, null or a number above 0 expected")

    def clipped(update: Any) -> Any:
        if not tree.is_named(update):
            return update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(jnp.square(update))) / max_rms)
        axes = tuple(axis for axis in update.axes if axis.name not in STACKED_LAYERS)
        square = hax.mean(hax.square(update), axes) if axes else hax.square(update)
        return update / hax.maximum(hax.sqrt(square) / max_rms, 1.0)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(clipped, updates, is_leaf=tree.is_named), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)


def cautious(direction: optax.GradientTransformation, enabled: bool) -> optax.GradientTransformation:
    """Drops the elements of an update that point against the gradient, and scales up the rest of each parameter's layer.

    Source: Liang et al. 2024, Cautious Optimizers (arXiv:2411.16085), algorithm 1. The state is that of `direction`.
    """
    if not enabled:
        return direction

    def masked(update: Any, gradient: Any) -> Any:
        agrees = (update * gradient > 0) * 1.0
        if not tree.is_named(update):
            return update * agrees * update.size / (jnp.sum(agrees) + 1)
        axes = tuple(axis for axis in update.axes if axis.name not in STACKED_LAYERS)
        size, count = hax.axis_size(axes), hax.sum(agrees, axes) if axes else agrees
        return (update * agrees * (size / (count + 1))).astype(update.dtype)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moved, state = direction.update(updates, state, params)
        return jax.tree.map(masked, moved, updates, is_leaf=tree.is_named), state

    return optax.GradientTransformation(direction.init, update_fn)


@dataclass(frozen=True)
class ClipUpdateNorm:
    """Scales an update down to the mean norm of recent updates plus a multiple of their standard deviation.

    Attributes:
        rolling_interval_length: number of recent steps to compare with. Nothing is clipped before half of them have run.
        sigma_factor: the limit is this many standard deviations above the mean.
    """

    rolling_interval_length: Annotated[int, Interval(ge=4, le=1_000_000)] = 128
    sigma_factor: PositiveFloat = 3.0

    def build(self) -> optax.GradientTransformation:
        """The gradient transformation.

        Its window stores norms before clipping: clipped norms would lower the limit further and further.
        """

        def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
            norm = optax.global_norm(updates)
            limit = state.mean() + self.sigma_factor * jnp.maximum(state.std(), _MIN_STD)
            ready = state.count >= self.rolling_interval_length // 2
            scale = jnp.where(ready & (norm > limit), limit / norm, 1.0)
            return jax.tree.map(lambda u: (u * scale).astype(u.dtype), updates), state.push(norm)

        def init_fn(params: Any) -> Any:
            return RollingWindow.empty(self.rolling_interval_length)

        return optax.GradientTransformation(init_fn, update_fn)
