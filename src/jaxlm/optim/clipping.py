"""Clipping what an optimizer is about to add, rather than the gradient."""

from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import optax

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.optim.rolling import RollingWindow

_SMALLEST_SPREAD = 1e-6


def clip_by_rms(most: float) -> optax.GradientTransformation:
    """Scales every parameter's update, layer by layer, down to a root mean square of `most`.

    Source: Shazeer and Stern 2018, Adafactor (arXiv:1804.04235), section 6; of the update with its momentum.

    Raises:
        ConfigError: not above 0.
    """
    if not most > 0:
        raise ConfigError(f"optimizer.update_rms_clipping: {most} given, null or more than 0 expected")

    def clipped(update: Any) -> Any:
        if not tree.is_named(update):
            return update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(jnp.square(update))) / most)
        within = tuple(axis for axis in update.axes if axis.name != LAYERS)
        square = hax.mean(hax.square(update), within) if within else hax.square(update)
        return update / hax.maximum(hax.sqrt(square) / most, 1.0)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(clipped, updates, is_leaf=tree.is_named), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)


@dataclass(frozen=True)
class ClipUpdateNorm:
    """Scales an update down to what the norms of the last ones make plausible: their mean and some of their spread.

    Attributes:
        rolling_interval_length: of how many steps; nothing is clipped before half as many.
        sigma_factor: standard deviations above the mean.
    """

    rolling_interval_length: int = 128
    sigma_factor: float = 3.0

    def __post_init__(self):
        if self.rolling_interval_length < 4 or not self.sigma_factor > 0:
            raise ConfigError(
                f"optimizer.clip_update_norm: rolling_interval_length {self.rolling_interval_length}, sigma_factor"
                f" {self.sigma_factor} given; 4 steps and more, and more than 0, expected"
            )

    def build(self) -> optax.GradientTransformation:
        """The window holds norms from before the clipping, so that it cannot close in on itself."""

        def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
            norm = optax.global_norm(updates)
            limit = state.mean() + self.sigma_factor * jnp.maximum(state.deviation(), _SMALLEST_SPREAD)
            ready = state.count >= self.rolling_interval_length // 2
            scale = jnp.where(ready & (norm > limit), limit / norm, 1.0)
            return jax.tree.map(lambda u: (u * scale).astype(u.dtype), updates), state.with_(norm)

        def init_fn(params: Any) -> Any:
            return RollingWindow.empty(self.rolling_interval_length)

        return optax.GradientTransformation(init_fn, update_fn)
