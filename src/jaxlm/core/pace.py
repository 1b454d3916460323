"""How far each part of a model moves in a step, where that is for the objective to say."""

from collections.abc import Mapping

import equinox as eqx
import jax


class Pace(eqx.Module):
    """Describes how the update of a step differs from what the optimizer computes.

    Attributes:
        factors: float32 {layers} by the path of the parameter: the factor of the update of each layer. Where it is 0, the
            parameter and its optimizer state stay as they are, to the bit. Other parameters have the factor 1.
        position: int32, number of updates since the optimizer and its schedule were last reset; 0 resets them. None never
            resets them.
    """

    factors: Mapping[str, jax.Array]
    position: jax.Array | None = None
