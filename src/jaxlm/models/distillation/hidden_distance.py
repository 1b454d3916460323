"""How far a model's residual stream is from a teacher's, layer by layer.

Source: Jiao et al. 2020, TinyBERT (arXiv:1909.10351), section 3.1: each layer of the student learns from one of the
teacher's, at equal steps. Distances are relative to the size of the teacher's stream, which grows from layer to layer.
"""

from collections.abc import Sequence

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import EMBED
from jaxlm.core.errors import ConfigError
from jaxlm.models.base import Hidden, Inputs, LanguageModel, layer_tap
from jaxlm.models.distillation.layerwise import layer_body


def with_streams(
    model: LanguageModel, inputs: Inputs, what: str, *, key: jax.Array | None = None
) -> tuple[Hidden, tuple[NamedArray, ...]]:
    """The model's output, and the residual stream {batch, position, embed} after each layer.

    Args:
        what: names the model in errors.
        key: for dropout; None means no dropout.
    """
    taps = [layer_tap(layer) for layer in range(layer_body(model, "residual", what).num_layers)]
    hidden = model.hidden(inputs, taps=taps, key=key)
    return hidden, tuple(hidden.taps[tap] for tap in taps)


def hidden_distance(own: Sequence[NamedArray], theirs: Sequence[NamedArray], mask: NamedArray) -> jax.Array:
    """The sum over tokens of `mask` times |s - t|^2 / |t|^2, averaged over the layers of the model. Scalar, float32.

    The last layers are compared with each other, and the others with those at the same fraction of the depth.

    Args:
        own, theirs: {batch, position, embed} of each layer. The teacher's has no gradient.
        mask: {batch, position}.
    """
    widths = [streams[0].axis_size(EMBED) for streams in (own, theirs)]
    if widths[0] != widths[1]:
        raise ConfigError(
            f"objective.hidden: the model's residual stream is {widths[0]} wide and the teacher's {widths[1]}, so they cannot"
            " be compared. Set objective.hidden: 0"
        )
    total = jnp.zeros((), jnp.float32)
    for layer, stream in enumerate(own, start=1):
        target = theirs[-(-layer * len(theirs) // len(own)) - 1].rearrange(stream.axes)
        target = jax.lax.stop_gradient(target).astype(jnp.float32)
        squares = [hax.sum(a * a, EMBED) for a in (stream.astype(jnp.float32) - target, target)]
        total += hax.sum(hax.where(mask != 0, mask * squares[0] / hax.maximum(squares[1], 1e-12), 0.0)).scalar()
    return total / len(own)
