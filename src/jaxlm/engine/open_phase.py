"""A phase with everything that its loop needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxlm.data.base import Batches
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.control import Control
from jaxlm.engine.hooks import Hooks
from jaxlm.engine.metrics import AsyncMetrics
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.engine.step import StepReport
from jaxlm.engine.sync import FlagSync

Probe = Callable[[RunState, int], float]
"""The loss of a state on about this many batches of held-out data: the same ones each time, and on all processes."""


def no_probe(state: RunState, num_batches: int) -> float:
    """The probe of a phase without branches."""
    raise AssertionError("no controller of the phase branches")


@dataclass(frozen=True)
class OpenPhase:
    """A phase with everything that its loop needs.

    Attributes:
        train_step: (state, batch, flags) -> (state, report); the state is donated.
    """

    phase: Phase
    train_step: Callable[[RunState, Any, jax.Array], tuple[RunState, StepReport]]
    batches: Batches
    metrics: AsyncMetrics
    control: Control
    saver: Saver
    flag_sync: FlagSync
    clock: ActivityClock
    log: Callable[[str], None]
    hooks: Hooks = field(default_factory=Hooks)
    probe: Probe = no_probe

    def is_fixed(self, step: int) -> bool:
        """Tells whether something needs the state after this step: an evaluation, an export or a permanent checkpoint. It
        follows from the configuration alone."""
        return self.hooks.needs_state(step) or self.saver.is_permanent(step)
