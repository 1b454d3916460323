"""What runs between the steps of a phase."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxlm.core.values.logged import Activity
from jaxlm.engine.state import RunState


class Hook(Protocol):
    """Runs between steps. A hook reads the state and never changes it."""

    @property
    def activity(self) -> Activity:
        """The activity that its time counts as."""
        ...

    def due(self, step: int) -> bool:
        """Tells whether to run after this step. All processes must return the same."""
        ...

    def run(self, step: int, state: RunState) -> None:
        """Runs after `step`. All steps up to this one have been logged."""
        ...


class Evaluations(Hook, Protocol):
    """The hook that runs the evaluations.

    Attributes:
        latest: metrics of the newest evaluation, by name; only on process 0.
    """

    latest: dict[str, float]

    def all_due(self, step: int) -> bool:
        """Tells whether all evaluations run after this step."""
        ...

    def run_at_early_end(self, step: int, state: RunState) -> None:
        """As `run`, on the weights with which the phase ends early. Limits are judged as at the end of a phase."""
        ...


@dataclass(frozen=True)
class Hooks:
    """Lists what runs between the steps of a phase, in this order.

    Attributes:
        first: run before the evaluations.
        evaluations: after them, the controllers decide what follows; None measures nothing.
        exports: run last. The exports and the evaluations also run on the weights with which a phase ends early.
    """

    first: Sequence[Hook] = ()
    evaluations: Evaluations | None = None
    exports: Sequence[Hook] = ()

    def due(self, step: int, since: int | None = None) -> list[Hook]:
        """The hooks to run after this step. Args: since: also those that were due after a step that follows this one."""
        steps = (step,) if since is None else range(since + 1, step + 1)
        return [hook for hook in (*self.first, *self._with_state) if any(map(hook.due, steps))]

    def needs_state(self, step: int) -> bool:
        """Tells whether an evaluation or an export runs after this step."""
        return any(hook.due(step) for hook in self._with_state)

    @property
    def _with_state(self) -> tuple[Hook, ...]:
        return (*(() if self.evaluations is None else (self.evaluations,)), *self.exports)
