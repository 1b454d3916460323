"""The controllers of each phase, the metrics that they need, and when phases may begin if one before them ends early."""

from collections.abc import Sequence

from jaxlm.controllers.base import Controller, PhaseFacts
from jaxlm.controllers.early_stopping import BadStreak, EarlyStopping, Finished, UntilConfig
from jaxlm.core import guards
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import beyond
from jaxlm.core.values.logged import EVAL_PREFIX
from jaxlm.data.config import DataConfig
from jaxlm.engine.phases import Phase
from jaxlm.plan.run_config import PhaseConfig, RunConfig


def earliest_starts(config: RunConfig, phases: Sequence[Phase]) -> list[int]:
    """The first step that each phase may have: one before it may end early by `until`, or because its objective has nothing
    left to train. A controller of a user's own may end it earlier still."""
    starts = [0]
    for phase in phases:
        start, end = starts[-1], starts[-1] + phase.end - phase.start
        until = config.phases[phase.index].until if config.phases else None
        if (until := until or config.trainer.until) is not None:
            end = min(end, _first_end(until, start, config.trainer.steps_per_eval))
        starts.append(end if phase.objective.facts.pacing is None else start + 1)
    return starts[:-1]


def _first_end(until: UntilConfig, start: int, steps_per_eval: int) -> int:
    """The first step at which `until` may end a phase, if evaluations of metrics that are not finite count as well."""
    is_at_once = until.below is not None or until.above is not None
    num_evals = 1 if is_at_once or until.patience is None else until.patience
    return (start // steps_per_eval + num_evals) * steps_per_eval


_MAX_LISTED = 12  # metrics in a message


def phase_controllers(config: RunConfig, phase: PhaseConfig, index: int) -> tuple[Controller, ...]:
    """The controllers of a phase. Raises `ConfigError` if one is invalid, or they do not go together."""
    trainer, optimizer, data = config.trainer, phase.optimizer or config.optimizer, [phase.data or config.data]
    objective = phase.objective or config.objective
    known = objective.facts
    facts = PhaseFacts(
        **vars(optimizer.facts),
        has_validation=data[0].has_validation,
        is_annotated=known.annotation_key is not None,
        reports_teacher_loss=known.reports_teacher_loss,
    )
    until, path = (trainer.until, "trainer.until") if phase.until is None else (phase.until, f"phases.{index}.until")
    made: list[Controller] = [BadStreak(optimizer.facts.rewind_rule, trainer.crash_after_skipped)]
    if known.pacing is not None:
        made.append(Finished(known.pacing.finished_metric))
    if until is not None:
        check_metric(until.metric, f"{path}.metric", config, data, phase.name)
        made.append(EarlyStopping(until))
    written, path = (
        (trainer.controllers, "trainer.controllers")
        if phase.controllers is None
        else (phase.controllers, f"phases.{index}.controllers")
    )
    for number, section in enumerate(written):
        try:
            controller = section.build(facts)
        except ConfigError as error:
            raise ConfigError(f"{path}.{number} (phase '{phase.name}'): {error}") from error
        for key, metric in controller.metrics.items():
            check_metric(metric, f"{path}.{number}.{key.rpartition('.')[2]}", config, data, phase.name)
        for earlier in made:
            if earlier.name == controller.name:
                raise ConfigError(f"{path}.{number}: another controller is called '{controller.name}' too. Remove one")
            if both := sorted(earlier.controls().keys() & controller.controls().keys()):
                raise ConfigError(
                    f"{path}.{number}: {controller.name} sets the control '{both[0]}', and so does {earlier.name}. Remove one"
                )
        if unknown := sorted(controller.controls().keys() - set(guards.KNOWN)):
            raise ConfigError(
                f"{path}.{number}: {controller.name} sets the control '{unknown[0]}', which no step reads. The controls are:"
                f" {', '.join(guards.KNOWN)}"
            )
        made.append(controller)
    return tuple(made)


def controller_notes(config: RunConfig, phases: Sequence[Phase]) -> list[str]:
    """Lists what of controllers, and of what optimizers measure for them, has no effect."""
    written = [phase.controllers for phase in config.phases] or [None]
    shared = [phase for phase, controllers in zip(phases, written, strict=True) if controllers is None]
    sections = [("trainer.controllers", config.trainer.controllers, shared)]
    for phase, controllers in zip(phases, written, strict=True):
        sections.append((f"phases.{phase.index}.controllers", controllers or [], [phase]))
    notes = []
    for path, controllers, users in sections:
        spans = [range(phase.start + 1, phase.end + 1) for phase in users]
        steps = " and ".join(f"{span.start} to {span.stop - 1}" for span in spans)
        if controllers and not spans:
            notes.append(f"{path}: no effect, because each phase has controllers of its own")
        for number, section in enumerate(controllers if spans else []):
            if lines := [*beyond(section, max(map(len, spans))), *section.without_effect(spans)]:
                notes.append(f"{path}.{number}: no effect in steps {steps}: {'; '.join(lines)}")
    moving = [phase.optimizer for phase in phases if guards.NOWCAST in phase.controls]
    for phase in phases:
        if phase.optimizer.facts.nowcast_window is not None and phase.optimizer not in moving:
            notes.append(
                f"optimizer.nowcast of phase '{phase.name}': no controller moves the weights, so it only costs memory. Give"
                " the orchestrator a section nowcast and mode: active, or, in a new run, remove it"
            )
    return notes


def objective_notes(config: RunConfig, phases: Sequence[Phase]) -> list[str]:
    """Notes what has no effect in objectives, because it waits for more steps than their phases have."""
    users: dict[str, list[Phase]] = {}
    for phase, own in zip(phases, config.phases or [None], strict=True):
        is_shared = own is None or own.objective is None
        users.setdefault("objective" if is_shared else f"phases.{phase.index}.objective", []).append(phase)
    notes = []
    for path, those in users.items():
        steps = " and ".join(f"{phase.start + 1} to {phase.end}" for phase in those)
        if lines := beyond(those[0].objective, max(phase.end - phase.start for phase in those)):
            notes.append(f"{path}: no effect in steps {steps}: {'; '.join(lines)}")
    return notes


def check_metric(
    metric: str, key: str, config: RunConfig, data: Sequence[DataConfig], phase: str | None = None
) -> None:
    """Raises `ConfigError` if a metric of evaluations is given that none of them measures. Others are not checked.

    Args:
        key: dotted path of the key that names it.
        data: the data that may have validation data.
        phase: name of the phase in which it is needed; None for any.
    """
    if not metric.startswith(EVAL_PREFIX):
        return
    if not config.evals:
        raise ConfigError(f"{key}: '{metric}' given, but evals is empty. Add an evaluation")
    evals = [evaluation for evaluation in config.evals if phase is None or evaluation.scope.includes(phase)]
    names = {id(evaluation): evaluation.metrics.names for evaluation in evals}
    ends = lambda name: f"/{metric}".endswith(f"/{name}")  # noqa: E731
    measuring = [e for e in evals if (metric_names := names[id(e)]) is None or any(map(ends, metric_names))]
    if not measuring:
        known = [f"{EVAL_PREFIX}{name}" for metric_names in names.values() for name in metric_names or ()]
        shown = ", ".join([*known[:_MAX_LISTED], *(["..."] if len(known) > _MAX_LISTED else [])])
        of_phase = f" in phase '{phase}'" if len(evals) < len(config.evals) else ""
        raise ConfigError(
            f"{key}: '{metric}' given, but no evaluation measures it{of_phase}. The section evals measures"
            f" {shown or 'nothing'}"
        )
    if all(evaluation.scope.validation for evaluation in measuring) and not any(
        section.has_validation for section in data
    ):
        raise ConfigError(
            f"{key}: '{metric}' given, but there is no validation data to measure it on. Set data.validation_urls, or"
            " data.num_validation_sequences to hold some of the training data out"
        )
