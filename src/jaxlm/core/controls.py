"""Controls: numbers that the compiled step reads from the state, so that they change between steps without compiling again.

A `Controller` (`controllers/`) declares and sets them; the engine keeps them in `state.slots["controls"]` as float32 scalars.
"""

from collections.abc import Mapping
from typing import Any

SLOT = "controls"

LR_SCALE = "lr_scale"
"""Multiplies the learning rate of all updates, and so the decoupled weight decay."""

STRATEGY = "strategy"
"""The row of the table of a portfolio of optimizers that makes the updates (`optim/portfolio/`)."""
NOWCAST = "nowcast"
"""How many steps ahead the weights are extrapolated, once (`optim/portfolio/`); 0 does not."""

KNOWN = (LR_SCALE, STRATEGY, NOWCAST)
"""The controls that a step reads."""


def scaled(learning_rate: Any, controls: Mapping[str, Any]) -> Any:
    """The learning rate that applies, given the scheduled one. Traceable."""
    return learning_rate * controls[LR_SCALE] if LR_SCALE in controls else learning_rate
