"""Parts of a model that fill in hidden tokens by themselves, each in texts of which a certain share is hidden.

    blocks        embeddings -> the layers of one stack -> final norm, head             (DiffusionBlocks)
    suffixes      embeddings -> a stack and all stacks after it -> final norm, head     (time as depth)

The last stack has the texts with the fewest hidden tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from jaxlm.core.axes import BATCH
from jaxlm.core.errors import ConfigError

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
    """Whether one of the parts, the one for the most hidden tokens, has all layers."""
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
