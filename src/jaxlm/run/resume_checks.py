"""Checks that a resumed run is the same run, and lists what changed since its last start."""

import json
from collections.abc import Collection, Iterator, Mapping
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
from jaxlm.run.references import references_identity

# Files in a checkpoint's `run/` folder, next to config.yaml.
DATA_IDENTITY = "data.json"
# Only written by runs that have references.
REFERENCES_IDENTITY = "refs.json"

# Keys of the model section that change how the model is computed, but not the model.
_NOT_IDENTITY = ("gradient_checkpointing", "scan_layers", "attn_backend", "pad_vocab_to_multiple_of")


@dataclass(frozen=True)
class SavedRun:
    """Configuration and data that a run was last started with.

    Attributes:
        source: path of the saved configuration, for messages.
        data: the saved result of `data_identity`; None if there is no checkpoint yet.
        references: the saved result of `references_identity`; empty if there is no checkpoint yet, or no reference.
    """

    source: str
    config: RunConfig
    data: Mapping[str, Any] | None
    references: Mapping[str, Any]


def load_saved_run(plan: Plan) -> SavedRun | None:
    """The configuration in this run's newest undamaged checkpoint, or else in its log folder; None for a new run.

    The log folder's file may be damaged: without a checkpoint, nothing that it says would have to be kept.
    """
    for checkpoint in reversed(plan.checkpoints.checkpoints()):
        try:
            checkpoint.verify(below="run/")
        except DamagedError:
            continue  # it will be set aside later
        with checkpoint.local("run") as folder:
            data, references = folder / DATA_IDENTITY, folder / REFERENCES_IDENTITY
            return SavedRun(
                f"{checkpoint.location}/run/config.yaml",
                read_config(folder / "config.yaml"),
                json.loads(data.read_text()) if data.is_file() else None,
                json.loads(references.read_text()) if references.is_file() else {},
            )
    logged = plan.log_folder / "config.yaml"
    try:
        return SavedRun(str(logged), read_config(logged), None, {}) if logged.is_file() else None
    except ConfigError:
        return None


def check_same_run(plan: Plan) -> RunConfig | None:
    """Refuses to resume a run with another model, other data or other references. Phases may be added.

    Returns:
        The configuration that the run was last started with; None for a new run.
    """
    saved = load_saved_run(plan)
    if saved is None:
        return None
    models = (_encode_without(config.model, _NOT_IDENTITY) for config in (saved.config, plan.config))
    data = data_identity(plan)
    differences = list(_differences("model", *models))
    for phase, identity in (saved.data or {}).items():
        differences += _differences(f"data of phase '{phase}'", identity, data.get(phase, {}))
    references = references_identity(plan)
    for name, identity in saved.references.items():
        differences += _differences(f"refs.{name}", identity, references.get(name, {}))
    if differences:
        raise ConfigError(
            f"the run '{plan.run_id}' already exists with another model, other data or other references ({saved.source}):\n"
            + "\n".join(f"  {line}" for line in differences)
            + "\nSet another ID for this run (--trainer.id NAME), or move the folders of the existing run away:"
            f" {plan.log_folder}, {plan.checkpoints.location}"
        )
    return saved.config


def check_cursor(cursor: Cursor, plan: Plan) -> Phase:
    """The phase of a checkpoint in the current plan. Raises `ConfigError` if it has none because phases were changed."""
    phase = plan.phases[cursor.phase] if cursor.phase < len(plan.phases) else None
    if phase is None or phase.name != cursor.phase_name or not phase.start <= cursor.step <= phase.end:
        phases = ", ".join(f"'{p.name}' from step {p.start} to {p.end}" for p in plan.phases)
        raise ConfigError(
            f"the newest checkpoint of '{plan.run_id}' is at step {cursor.step} of phase '{cursor.phase_name}', but the"
            f" configuration has no such step: its phases are {phases}. Increase num_train_steps, or set another trainer.id"
        )
    return phase


def changed_stages(cursor: Cursor, position: Mapping[str, Any], phase: Phase, plan: Plan) -> list[str]:
    """Warns if `train_weights` has stages and the batch sizes of the steps so far differ from the current configuration.

    Args:
        position: data position of the checkpoint.
    """
    weights, sizes, steps = plan.data[phase.index].train_weights, plan.batches.train, cursor.step - phase.start
    if not isinstance(weights, list) or len(weights) < 2:
        return []
    read = int(position["examples"]) - int(position.get("skipped", 0))
    planned = sizes.examples_between(phase.start, cursor.step)
    if read == planned:
        return []
    line = (
        f"warning: the first {steps} steps of phase '{phase.name}' read {read:,} sequences, but with the current"
        f" trainer.train_batch_size they would have read {planned:,}. The stages of data.train_weights therefore start at"
        " different sequences than before, and some sequences may be repeated or skipped. To avoid this, include the batch"
        f" sizes of past steps: trainer.train_batch_size: [{{start: 0, value: {read // max(steps, 1)}}},"
        f" {{start: {cursor.step}, value: {sizes.at(cursor.step).size}}}]"
    )
    return [line]


def config_changes(before: RunConfig, now: RunConfig, step: int) -> list[str]:
    """Messages about changes since the last start: changed keys, and their effect on the learning rate."""
    lines = list(_differences("", _encode_without(before, ["dry_run"]), _encode_without(now, ["dry_run"])))
    old, new = _schedule_at(before, step), _schedule_at(now, step)
    if old is not None and new is not None and old != new:
        lines.append(
            f"the learning-rate schedule now spans steps {new[0]} to {new[1]} instead of {old[0]} to {old[1]}:"
            f" the next learning rate is {new[2]:.3g} instead of {old[2]:.3g}"
        )
    return lines


def _schedule_at(config: RunConfig, step: int) -> tuple[int, int, float] | None:
    """(first step, last step, learning rate of the next update) of the phase that contains a step."""
    phases, _ = plan_phases(config)
    phase = next((p for p in phases if step < p.end), phases[-1])
    if step < phase.start:
        return None
    return phase.start, phase.end, float(phase.optimizer.schedule(phase.num_steps)(step - phase.start))


def _encode_without(config: Any, keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in encode(config).items() if key not in keys}


def data_identity(plan: Plan) -> dict[str, Any]:
    """Phase name -> `DataConfig.identity`, which identifies its training data by content. Plain JSON."""
    return {phase.name: data.identity() for phase, data in zip(plan.phases, plan.data, strict=True)}


def check_same_data(plan: Plan, tokenizer_fingerprint: str) -> None:
    """Checks that all processes have the same data, tokenizer and references, since each may read its own copy."""
    if not same_on_all_processes(json.dumps(references_identity(plan), sort_keys=True)):
        raise ConfigError(
            "refs: the files of a reference are not the same on all processes, so the copy on some machine is outdated or"
            " incomplete. Copy the same files to all machines"
        )
    identity = json.dumps(main_first(lambda: data_identity(plan)), sort_keys=True)  # it may copy remote files
    if not same_on_all_processes(identity + tokenizer_fingerprint):
        raise ConfigError(
            "data: the data or the tokenizer is not the same on all processes, so the copy on some machine is outdated or"
            " incomplete. Copy the same files to all machines, and delete data.cache_dir where it was built from other"
            f" files. On this process the tokenizer is {tokenizer_fingerprint[:12]} and the data is {identity}"
        )


def _differences(path: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(f"{path}.{key}".lstrip("."), before.get(key), now.get(key))
    elif before != now:
        yield f"{path}: {before} -> {now}"
