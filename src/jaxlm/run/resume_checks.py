"""Whether a run that is already there is the same run, and what has changed about it since."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.config.decode import encode
from jaxlm.config.load import read_config
from jaxlm.config.run import RunConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first, same_on_all_processes
from jaxlm.engine.checkpoint.integrity import DamagedError
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.phases import Phase
from jaxlm.run.plan import Plan, plan_phases

# A checkpoint's file beside its configuration.
DATA_IDENTITY = "data.json"

# Keys of the model section that change how it is computed, not what it is.
_NOT_IDENTITY = ("gradient_checkpointing", "scan_layers", "attn_backend")


@dataclass(frozen=True)
class SavedRun:
    """What a run was last started with.

    Attributes:
        source: where that is written, for people.
        config: the configuration.
        data: what `data_identity` said; None where nothing has been trained yet.
    """

    source: str
    config: RunConfig
    data: Mapping[str, Any] | None


def load_saved_run(plan: Plan) -> SavedRun | None:
    """What this run's newest checkpoint, or else its log folder, was saved with."""
    for checkpoint in reversed(plan.checkpoints.checkpoints()):
        try:
            checkpoint.verify(below="run/")
        except DamagedError:
            continue  # it will be set aside; until then it must not be taken at its word
        with checkpoint.local("run") as folder:
            data = folder / DATA_IDENTITY
            return SavedRun(
                f"{checkpoint.place}/run/config.yaml",
                read_config(folder / "config.yaml"),
                json.loads(data.read_text()) if data.is_file() else None,
            )
    logged = plan.log_folder / "config.yaml"
    return SavedRun(str(logged), read_config(logged), None) if logged.is_file() else None


def check_same_run(plan: Plan) -> RunConfig | None:
    """Refuses to go on with another model or other data under the same name.

    Returns:
        The configuration that the run was last started with, or None for a new run.

    Raises:
        ConfigError: says which keys differ, and how to go on.
    """
    saved = load_saved_run(plan)
    if saved is None:
        return None
    differences = [
        *_differences("model", _model_identity(saved.config), _model_identity(plan.config)),
        *_data_differences(saved.data or {}, data_identity(plan)),
    ]
    if differences:
        raise ConfigError(
            f"the run '{plan.run_id}' exists already with another model or other data ({saved.source}):\n"
            + "\n".join(f"  {line}" for line in differences)
            + "\nGive this run a name of its own (--trainer.id NAME), or move the old one's folders away:"
            f" {plan.log_folder}, {plan.checkpoints.place}"
        )
    return saved.config


def check_cursor(cursor: Cursor, plan: Plan) -> Phase:
    """The phase that a checkpoint stands in, by the plan of today.

    Raises:
        ConfigError: the plan has no such place: phases or their lengths have been changed behind it.
    """
    phase = plan.phases[cursor.phase] if cursor.phase < len(plan.phases) else None
    if phase is None or phase.name != cursor.phase_name or not phase.start <= cursor.step <= phase.end:
        today = ", ".join(f"'{p.name}' from step {p.start} to {p.end}" for p in plan.phases)
        raise ConfigError(
            f"the newest checkpoint of '{plan.run_id}' stands at step {cursor.step} in phase '{cursor.phase_name}', which"
            f" the configuration does not lead through: {today}. Raise num_train_steps, or give the run another"
            " trainer.id"
        )
    return phase


def changed_stages(cursor: Cursor, position: Mapping[str, Any], phase: Phase, plan: Plan) -> list[str]:
    """A warning where `train_weights` changes by step, and the steps so far had other batch sizes than today's plan says.

    Args:
        position: of the phase's data, as the checkpoint has it.
    """
    weights, sizes, steps = plan.data[phase.index].train_weights, plan.batches.train, cursor.step - phase.start
    if not isinstance(weights, list) or len(weights) < 2:
        return []
    read, planned = int(position["examples"]), sizes.examples_between(phase.start, cursor.step)
    if read == planned:
        return []
    line = (
        f"warning: the first {steps} steps of phase '{phase.name}' have read {read:,} sequences; by today's"
        f" trainer.train_batch_size it would have been {planned:,}. So the stages of data.train_weights begin at other"
        " sequences than before, and windows may come twice or not at all. Name the sizes of the steps that are done, as in"
        f" trainer.train_batch_size: [{{start: 0, value: {read // max(steps, 1)}}},"
        f" {{start: {cursor.step}, value: {sizes.at(cursor.step).size}}}]"
    )
    return [line]


def config_changes(before: RunConfig, now: RunConfig, step: int) -> list[str]:
    """What is different from the last start, for people: changed keys, and what becomes of the learning rate."""
    lines = list(_differences("", _flat_config(before), _flat_config(now)))
    old, new = _schedule_at(before, step), _schedule_at(now, step)
    if old is not None and new is not None and old != new:
        lines.append(
            f"the learning-rate schedule spans steps {new[0]} to {new[1]} instead of {old[0]} to {old[1]}:"
            f" the next update takes {new[2]:.3g} instead of {old[2]:.3g}"
        )
    return lines


def _schedule_at(config: RunConfig, step: int) -> tuple[int, int, float] | None:
    """(first step, last step, learning rate of the next update) of the phase that a step belongs to."""
    phases, _ = plan_phases(config)
    phase = next((p for p in phases if step < p.end), phases[-1])
    if step < phase.start:
        return None
    return phase.start, phase.end, float(phase.optimizer.schedule(phase.num_steps)(step - phase.start))


def _model_identity(config: RunConfig) -> dict[str, Any]:
    return {k: v for k, v in encode(config.model).items() if k not in _NOT_IDENTITY}


def data_identity(plan: Plan) -> dict[str, Any]:
    """What each phase is trained on, by content: phase -> what `DataConfig.identity` says. Plain JSON."""
    return {phase.name: data.identity() for phase, data in zip(plan.phases, plan.data, strict=True)}


def check_same_data(plan: Plan, tokenizer_fingerprint: str) -> None:
    """Compares what the processes train on: each reads its own copy, and disks of their own may have other ones.

    Raises:
        ConfigError: it is not the same for all of them.
    """
    identity = json.dumps(main_first(lambda: data_identity(plan)), sort_keys=True)  # it may copy remote files
    if not same_on_all_processes(identity + tokenizer_fingerprint):
        raise ConfigError(
            "data: the processes of the run have different text, or different tokenizers: a copy on one of the machines is"
            " old or incomplete. Copy the same files to all of them, and remove data.cache_dir where it was made from"
            f" others. Here the tokenizer is {tokenizer_fingerprint[:12]} and the data {identity}"
        )


def _data_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs from the data of the phases that a checkpoint knows; phases may be added behind them."""
    return [
        line for name in before for line in _differences(f"data of phase '{name}'", before[name], now.get(name, {}))
    ]


def _flat_config(config: RunConfig) -> dict[str, Any]:
    return {k: v for k, v in encode(config).items() if k != "dry_run"}


def _differences(path: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(f"{path}.{key}".lstrip("."), before.get(key), now.get(key))
    elif before != now:
        yield f"{path}: {before} -> {now}"
