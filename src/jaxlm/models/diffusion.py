"""What masked diffusion adds to a model: the time as an input, and parts that fill in hidden tokens by themselves.

The time, which is the fraction of hidden tokens, is added to the token embeddings of a sequence (`TimeEmbedding`).

Each part fills in texts of which a certain share is hidden (`Denoiser`). The last stack has the texts with the fewest
hidden tokens:

    blocks        embeddings -> the layers of one stack -> final norm, head             (DiffusionBlocks)
    suffixes      embeddings -> a stack and all stacks after it -> final norm, head     (time as depth)

Source: sinusoidal features of the noise level and an MLP as in Ho et al. 2020 (arXiv:2006.11239), appendix B; a last layer
that starts at zero as in Peebles and Xie 2023 (arXiv:2212.09748), section 3.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NumTimeSteps, TimeFeatures
from jaxlm.core.parameters import DeclaresParameters, Parameter, matrix
from jaxlm.core.rules import Rules, needs, only
from jaxlm.models.linear import Linear

Parts = Literal["blocks", "suffixes"]


@dataclass(frozen=True)
class Denoiser:
    """Layers that fill in hidden tokens, between the embeddings and the final norm.

    Attributes:
        max_fraction: the largest share of hidden tokens that they are for.
        first, stop: numbers of the first of them, and of the layer after the last.
    """

    max_fraction: float
    first: int
    stop: int


def denoisers_of(stacks: Sequence[Sequence[int]], max_fractions: Sequence[float], parts: Parts) -> tuple[Denoiser, ...]:
    """The denoisers of a model, from the last stack of layers to the first. A single stack is divided into equal parts.

    Args:
        stacks: the numbers of each stack's layers.
        max_fractions: of each denoiser, ascending.

    Raises:
        ConfigError: the model has another number of stacks, and not a single one that divides into that many equal parts.
    """
    count, num_layers = len(max_fractions), sum(map(len, stacks))
    if len(stacks) == 1 and num_layers % count == 0:
        starts = [number * num_layers // count for number in range(count)]
    elif len(stacks) == count:
        starts = [layers[0] for layers in stacks]
        if any(tuple(layers) != tuple(range(layers[0], layers[-1] + 1)) for layers in stacks):
            raise ConfigError(
                "the layers of this model's stacks alternate, so no stack can run by itself. Train it as a whole"
            )
    else:
        what = f"{len(stacks)} stacks" if len(stacks) > 1 else f"one stack of {num_layers} layers"
        raise ConfigError(
            f"{count} parts given, but the model has {what}. Give one for each stack, or, for a single stack, a number that"
            " divides its layers"
        )
    stops = [*starts[1:], num_layers] if parts == "blocks" else [num_layers] * count
    from_the_head = zip(max_fractions, reversed(starts), reversed(stops), strict=True)
    return tuple(Denoiser(*part) for part in from_the_head)


def check_is_whole(denoisers: Sequence[Denoiser]) -> None:
    """Raises `ConfigError` if a model with these parts is not one that runs all of its layers, as other programs would."""
    if denoisers and not runs_whole(denoisers):
        raise ConfigError(
            f"this model is {len(denoisers)} blocks of layers, of which each denoises alone (surgery denoisers, objective"
            " diffusion_blocks). transformers would run them one after the other, which is another model. It cannot be"
            " exported"
        )


def runs_whole(denoisers: Sequence[Denoiser]) -> bool:
    """Tells whether one of the parts, the one for the most hidden tokens, has all layers."""
    return (denoisers[-1].first, denoisers[-1].stop) == (0, denoisers[0].stop)


def needed(denoisers: Sequence[Denoiser], mask_range: tuple[float, float] | None) -> Sequence[Denoiser]:
    """Those of the denoisers that texts need. Args: mask_range: smallest and largest share of hidden tokens; None for any.

    At the largest share of a denoiser, where a range begins, the next one computes the text: it is the one that trains there.
    """
    if mask_range is None:
        return denoisers
    low, high = np.asarray(mask_range, np.float32)
    limits = np.asarray([0.0, *(denoiser.max_fraction for denoiser in denoisers[:-1]), np.inf], np.float32)
    is_single = low == high
    return [
        denoiser
        for denoiser, lower, upper in zip(denoisers, limits, limits[1:], strict=False)
        if lower < high and (low <= upper if is_single else low < upper)
    ]


def routed(
    denoisers: Sequence[Denoiser], mask_fractions: NamedArray, run: Callable[[Denoiser], NamedArray]
) -> NamedArray:
    """For each row, the output of the denoiser for its share of hidden tokens: the first whose limit is not below it, or the
    last.

    Denoisers that no row needs do not run. The others run for all rows, and again in the backward pass: what they keep for it
    would be kept of every denoiser, also of those that do not run.

    Args:
        mask_fractions: float32 {batch}.
        run: a denoiser -> {batch, ...}.
    """
    fractions_B = mask_fractions.rearrange((BATCH,)).array
    limits = jnp.asarray([denoiser.max_fraction for denoiser in denoisers[:-1]], fractions_B.dtype)
    number_B = jnp.sum(fractions_B[:, None] > limits, axis=1)
    shape = jax.eval_shape(lambda: run(denoisers[0]))
    result = NamedArray(jnp.zeros(shape.array.shape, shape.array.dtype), shape.axes)
    for number, denoiser in enumerate(denoisers):
        is_row_B = number_B == number
        runs = jax.checkpoint(lambda denoiser=denoiser: run(denoiser).rearrange(shape.axes))
        out = jax.lax.cond(jnp.any(is_row_B), runs, lambda result=result: result)
        place = [axis.name for axis in shape.axes].index(BATCH)
        chosen = is_row_B.reshape([-1 if at == place else 1 for at in range(len(shape.axes))])
        result = hax.auto_sharded(NamedArray(jnp.where(chosen, out.array, result.array), shape.axes))
    return result


_TIME, _TIME_HIDDEN, _TIME_STEP = "time", "time_hidden", "time_step"
_SCALE = 1000.0  # of the fractions: the usual number of steps
_LONGEST = 10000.0  # period, in these steps


@dataclass(frozen=True)
class TimeEmbeddingConfig:
    """Configures the embedding that tells the model how many tokens of a sequence are hidden.

    Attributes:
        type: `sinusoidal`: features of the mask fraction; `learned`: a row of a table for each of `num_time_steps` equal
            intervals of the fraction.
        dim: number of these features.
        num_time_steps: rows of the table.
    """

    type: Literal["sinusoidal", "learned"] = "sinusoidal"
    dim: TimeFeatures = 512
    num_time_steps: NumTimeSteps | None = None
    key_rules: ClassVar[Rules] = (
        only("num_time_steps", when="type", is_="learned"),
        needs("num_time_steps", when="type", is_="learned"),
    )

    def check(self) -> None:
        """Raises `ConfigError` for an odd number of sines and cosines."""
        if self.type == "sinusoidal" and self.dim % 2:
            raise ConfigError(f"model.time_embedding.dim: {self.dim} given, an even number expected: sines and cosines")


class TimeEmbedding(DeclaresParameters):
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

    def parameters(self) -> dict[str, Parameter]:
        if self.table is None:
            return {}
        Steps, Time = self.table.axes
        return {"table": matrix([Steps], [Time])}
