"""Time as an input: what masked diffusion adds to the token embeddings of a sequence, by the fraction of hidden tokens.

Source: sinusoidal features of the noise level and an MLP as in Ho et al. 2020 (arXiv:2006.11239), appendix B; a last layer
that starts at zero as in Peebles and Xie 2023 (arXiv:2212.09748), section 3.2.
"""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NumTimeSteps, TimeFeatures
from jaxlm.models.linear import Linear

_TIME, _TIME_HIDDEN, _TIME_STEP = "time", "time_hidden", "time_step"
_SCALE = 1000.0  # of the fractions: the usual number of steps
_LONGEST = 10000.0  # period, in these steps


@dataclass(frozen=True)
class TimeEmbeddingConfig:
    """What tells the model how many tokens of a sequence are hidden.

    Attributes:
        type: `sinusoidal`: features of the mask fraction; `learned`: a row of a table for each of `num_time_steps` equal
            intervals of the fraction.
        dim: number of these features.
        num_time_steps: rows of the table.
    """

    type: Literal["sinusoidal", "learned"] = "sinusoidal"
    dim: TimeFeatures = 512
    num_time_steps: NumTimeSteps | None = None

    def check(self) -> None:
        """Raises `ConfigError` if the keys contradict each other."""
        if self.type == "sinusoidal" and self.dim % 2:
            raise ConfigError(f"model.time_embedding.dim: {self.dim} given, an even number expected: sines and cosines")
        if (self.type == "learned") != (self.num_time_steps is not None):
            given = self.num_time_steps or "nothing"
            fix = "a number of intervals expected" if self.type == "learned" else "where it has no effect. Remove it"
            raise ConfigError(
                f"model.time_embedding.num_time_steps: {given} given with type: {self.type}, {fix}, or set the other type"
            )


class TimeEmbedding(eqx.Module):
    """Features of the mask fraction, an MLP with one hidden layer, and a projection that starts at zero.

    Attributes:
        table: {time_step, time}; None for sines and cosines.
        up_proj: {time_hidden, time}.
        out_proj: {embed, time_hidden}, zero at first.
    """

    table: NamedArray | None
    up_proj: Linear
    out_proj: Linear

    @staticmethod
    def init(config: TimeEmbeddingConfig, Embed: Axis, *, key: jax.Array) -> "TimeEmbedding":
        Time, Hidden = Axis(_TIME, config.dim), Axis(_TIME_HIDDEN, config.dim)
        k_table, k_up = jax.random.split(key)
        table = None
        if config.num_time_steps is not None:
            table = hax.random.normal(k_table, (Axis(_TIME_STEP, config.num_time_steps), Time))
        up = Linear.init(Time, Hidden, std=config.dim**-0.5, key=k_up, use_bias=True)
        return TimeEmbedding(table, up, Linear(hax.zeros((Embed, Hidden)), None, Hidden, Embed))

    def __call__(self, mask_fractions: NamedArray) -> NamedArray:
        """{batch} to {batch, embed}, in the dtype of the parameters."""
        fractions_B = mask_fractions.rearrange((BATCH,)).array
        Time = self.up_proj.In
        assert isinstance(Time, Axis)
        if self.table is None:
            frequencies = _SCALE * _LONGEST ** (-jnp.arange(Time.size // 2) / (Time.size // 2))
            angles = fractions_B[:, None] * frequencies
            features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
        else:
            num_steps = self.table.axis_size(_TIME_STEP)
            # The row of an interval, of which the last one contains 1.
            rows = jnp.clip((fractions_B * num_steps).astype(jnp.int32), 0, num_steps - 1)
            features = self.table.rearrange((_TIME_STEP, Time)).array[rows]
        x = hax.named(features, (mask_fractions.resolve_axis(BATCH), Time))
        hidden = self.up_proj(self.up_proj.operand(x))
        return self.out_proj(hax.nn.silu(hidden))
