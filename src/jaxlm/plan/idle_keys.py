"""Keys of objectives and controllers that have no effect in phases as long as theirs.

A run that is shortened for a try has such keys, so they are noted and not refused.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlm.core import controls
from jaxlm.core.field_types import phase_steps_of
from jaxlm.engine.phases import Phase
from jaxlm.plan.run_config import RunConfig


def idle_keys(config: RunConfig, phases: Sequence[Phase]) -> list[str]:
    """What of objectives and controllers, and of what optimizers measure for controllers, has no effect."""
    notes = []
    for path, objective, users in _sections("objective", "objective", config.objective, config, phases):
        if users:
            notes += _note(path, _beyond(objective, _longest(users)), users)
    for path, controllers, users in _sections(
        "controllers", "trainer.controllers", config.trainer.controllers, config, phases
    ):
        if controllers and not users:
            notes.append(f"{path}: no effect, because each phase has controllers of its own")
        for number, section in enumerate(controllers if users else []):
            lines = [*_beyond(section, _longest(users)), *section.without_effect(_spans(users))]
            notes += _note(f"{path}.{number}", lines, users)
    moving = [phase.optimizer for phase in phases if controls.NOWCAST in phase.controls]
    for phase in phases:
        if phase.optimizer.nowcast_window is not None and phase.optimizer not in moving:
            notes.append(
                f"optimizer.nowcast of phase '{phase.name}': no controller moves the weights, so it only costs memory. Give"
                " the orchestrator a section nowcast and mode: active, or, in a new run, remove it"
            )
    return notes


def _sections(
    key: str, path: str, shared: Any, config: RunConfig, phases: Sequence[Phase]
) -> list[tuple[str, Any, list[Phase]]]:
    """Path, value and users of a key that phases may have of their own, the shared one first."""
    own = [getattr(phase, key) for phase in config.phases] or [None]
    users = [phase for phase, one in zip(phases, own, strict=True) if one is None]
    theirs = [(f"phases.{phase.index}.{key}", one, [phase]) for phase, one in zip(phases, own, strict=True)]
    return [(path, shared, users), *(entry for entry in theirs if entry[1] is not None)]


def _beyond(section: Any, num_steps: int, prefix: str = "") -> list[str]:
    """The keys of a section, and of those in it that are not as by default, that wait for more than `num_steps` steps."""
    values = {name: getattr(section, name) for name in phase_steps_of(type(section))}
    lines = [f"{prefix}{name}: {value}" for name, value in values.items() if (value or 0) > num_steps]
    for field in dataclasses.fields(section):
        value, default = getattr(section, field.name), field.default_factory
        if dataclasses.is_dataclass(value) and (default is dataclasses.MISSING or value != default()):
            lines += _beyond(value, num_steps, f"{prefix}{field.name}.")
    return lines


def _note(path: str, lines: Sequence[str], users: Sequence[Phase]) -> list[str]:
    steps = " and ".join(f"{span.start} to {span.stop - 1}" for span in _spans(users))
    return [f"{path}: no effect in steps {steps}: {'; '.join(lines)}"] if lines else []


def _spans(users: Sequence[Phase]) -> list[range]:
    return [range(phase.start + 1, phase.end + 1) for phase in users]


def _longest(users: Sequence[Phase]) -> int:
    return max(map(len, _spans(users)))
