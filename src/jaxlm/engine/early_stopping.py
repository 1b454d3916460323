"""Ends a phase early, and has the checkpoint of its best evaluation pinned."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import from_main
from jaxlm.engine.activity import Activity
from jaxlm.engine.checkpoint.manager import BEST, Saver
from jaxlm.engine.outcome import Next
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.engine.until import UntilConfig


class Evaluations(Protocol):
    """The hook that runs the evaluations.

    Attributes:
        latest: metrics of the newest evaluation, by name.
    """

    latest: dict[str, float]

    def due(self, step: int) -> bool:
        """Whether evaluations run after this step."""
        ...

    def all_due(self, step: int) -> bool:
        """Whether all of them do."""
        ...


class EarlyStopping:
    """The hook that ends a phase. It runs after the evaluations and before exports."""

    activity = Activity.EVAL

    def __init__(self, until: UntilConfig, phase: Phase, evaluations: Evaluations, saver: Saver):
        self._until = until
        self._phase = phase
        self._evaluations = evaluations
        self._saver = saver

    def due(self, step: int) -> bool:
        return self._evaluations.due(step)

    def run(self, step: int, state: RunState) -> Next | None:
        until, value = self._until, self._value(step)
        if value is None:
            return None
        is_last = step == self._phase.end
        if (reason := until.reached(value)) is not None:
            return None if is_last else Next(step, None, reason)
        if until.patience is None:
            return None
        self._saver.settle()  # the checkpoint of the best evaluation may have failed
        best = until.after(self._saver.history.best, value, step)
        if best.step == step:
            self._saver.save_best(best)
        else:
            self._saver.history = replace(self._saver.history, best=best)
        if best.stale < until.patience and not is_last:
            return None
        reason = f"{until.metric} has not improved in {best.stale} evaluations" if best.stale >= until.patience else ""
        if best.step == step:
            return None if is_last else Next(step, None, reason)
        return Next(step, self._saver.history.pins.get(BEST), reason or "its last step is done")

    def _value(self, step: int) -> float | None:
        """The metric; None if its evaluation was not due. All processes use what process 0 found."""
        return from_main(lambda: self._measured(self._evaluations.latest, step))

    def _measured(self, latest: Mapping[str, float], step: int) -> float | None:
        if self._until.metric in latest:
            return float(latest[self._until.metric])
        if not self._evaluations.all_due(step):
            return None
        measured = ", ".join(sorted(latest)) or "nothing: there is no validation data. Set data.validation_urls"
        raise ConfigError(
            f"until.metric: '{self._until.metric}' given for phase '{self._phase.name}', but the evaluation after step"
            f" {step} measured {measured}"
        )
