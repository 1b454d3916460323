"""When phases may begin, because a phase before them may end early."""

from collections.abc import Sequence

from jaxlm.controllers.early_stopping import UntilConfig
from jaxlm.engine.phases import Phase
from jaxlm.plan.run_config import RunConfig


def earliest_starts(config: RunConfig, phases: Sequence[Phase]) -> list[int]:
    """The first step that each phase may have: one before it may end early by `until`, or because its objective has nothing
    left to train. A controller of a user's own may end it earlier still."""
    starts = [0]
    for phase in phases:
        start, end = starts[-1], starts[-1] + phase.end - phase.start
        until = config.phases[phase.index].until if config.phases else None
        if (until := until or config.trainer.until) is not None:
            end = min(end, _first_end(until, start, config.trainer.steps_per_eval))
        starts.append(end if phase.objective.finished_metric is None else start + 1)
    return starts[:-1]


def _first_end(until: UntilConfig, start: int, steps_per_eval: int) -> int:
    """The first step at which `until` may end a phase, if evaluations of metrics that are not finite count as well."""
    is_at_once = until.below is not None or until.above is not None
    num_evals = 1 if is_at_once or until.patience is None else until.patience
    return (start // steps_per_eval + num_evals) * steps_per_eval
