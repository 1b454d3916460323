"""Checks that a resumed run is the same run, and lists what changed since its last start."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.errors import ConfigError, bounded
from jaxlm.core.hashing import check_same_files, note
from jaxlm.core.precision import parse_precision
from jaxlm.core.redaction import without_secrets
from jaxlm.core.runtime import from_main, main_first
from jaxlm.core.safe_io import read_bytes
from jaxlm.data.base import TRAIN
from jaxlm.data.tokenizer.chat_template import CONVERSATIONS
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jaxlm.engine.checkpoint.manifest import Cursor, DamagedError
from jaxlm.engine.checkpoint.store import Checkpoint
from jaxlm.engine.phases import Phase
from jaxlm.interop.hf.source_folder import SourceFolder
from jaxlm.observe.environment import computing
from jaxlm.plan.load_config import as_run_config, read_config
from jaxlm.plan.plan import Plan, initial_model, plan_phases
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.choices import own_modules
from jaxlm.reading.decode import dump, encode
from jaxlm.reading.effects import CONTENT, HARMLESS, OWN, ROUNDING, Effect, effect_of, follows
from jaxlm.session.compilation.options import StepOptions, step_options
from jaxlm.session.init_from import InitFrom, expected_cursor
from jaxlm.session.references import references_identity
from jaxlm.session.source import source_files

# Files in a checkpoint's `run/` folder, next to config.yaml.
DATA_IDENTITY = "data.json"
# Only written by runs that have references.
REFERENCES_IDENTITY = "refs.json"
RENDERING = "rendering.json"
ENVIRONMENT = "environment.json"
EVALUATED = "evaluated.json"

_MODEL, _DATA, _TOKENIZER, _REFS = "model", "data", "tokenizer", "refs"


@dataclass(frozen=True)
class SavedRun:
    """Describes what a run was last started with.

    Attributes:
        source: path of the saved configuration, for messages.
        data: the saved result of `data_identity`; None if there is no checkpoint yet.
        references: the saved result of `references_identity`; empty if there is no checkpoint yet, or no reference.
        environment: the saved result of `computing_facts`; empty if there is no checkpoint yet.
        tokenizer: fingerprint of the saved tokenizer; None if there is no checkpoint yet.
        rendering: the saved result of `rendering`; empty if there is no checkpoint yet.
        allowed: name of `trainer.allow_changes` -> what has changed, for each that allowed something.
    """

    source: str
    config: RunConfig
    data: Mapping[str, Any] | None = None
    references: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str | None = None
    rendering: Mapping[str, Any] = field(default_factory=dict)
    allowed: Mapping[str, Sequence[str]] = field(default_factory=dict)


def load_saved_run(plan: Plan) -> SavedRun | None:
    """Reads what is in this run's newest undamaged checkpoint, or else in its log folder; None for a new run.

    The log folder's file may be damaged: without a checkpoint, nothing that it says would have to be kept.
    """
    for checkpoint in reversed(plan.checkpoints.checkpoints()):
        try:
            checkpoint.verify(below="run/")
            return _read_saved_run(checkpoint)
        except DamagedError:
            continue  # it will be set aside later
        except (ConfigError, OSError):
            if checkpoint.name in plan.checkpoints.names():
                raise
            return load_saved_run(plan)  # another start of this run is at work, and has replaced the checkpoint
    logged = plan.log_folder / "config.yaml"
    try:
        return SavedRun(str(logged), read_config(logged)) if logged.is_file() else None
    except ConfigError:
        return None


def _read_saved_run(checkpoint: Checkpoint) -> SavedRun:
    with checkpoint.local("run") as folder:
        return SavedRun(
            f"{checkpoint.location}/run/config.yaml",
            read_config(folder / "config.yaml"),
            _read_json(folder / DATA_IDENTITY),
            _read_json(folder / REFERENCES_IDENTITY) or {},
            _read_json(folder / ENVIRONMENT) or {},  # earlier versions did not save it
            load_tokenizer(str(folder / "tokenizer"), of_run=True).fingerprint,
            _read_json(folder / RENDERING) or {},  # earlier versions did not save it
        )


def run_files(plan: Plan, of_data: Tokenizer, tokenizer: Tokenizer, source: SourceFolder) -> dict[str, bytes]:
    """Returns the files in the folder `run/` of every checkpoint.

    Args:
        of_data, tokenizer, source: `tokenizer`, `saved_tokenizer` and `source` of the run.
    """
    texts = {
        "config.yaml": dump(as_run_config(plan.config)),
        DATA_IDENTITY: json.dumps(data_identity(plan)),
        RENDERING: json.dumps(rendering(plan, of_data)),
        ENVIRONMENT: json.dumps(computing_facts(plan.config, step_options(plan)), indent=1),
        **source_files(source),
    }
    if plan.refs:
        texts[REFERENCES_IDENTITY] = json.dumps(references_identity(plan))
    files = {name: text.encode() for name, text in texts.items()}
    return files | {f"tokenizer/{name}": content for name, content in tokenizer.files().items()}


def _read_json(path: Path) -> Any:
    return json.loads(read_bytes(path)) if path.is_file() else None


def check_same_run(plan: Plan) -> SavedRun | None:
    """Refuses to resume a run with another model, or with other data or references that `trainer.allow_changes` does not
    allow. Phases may be added.

    Returns:
        What the run was last started with; None for a new run.
    """
    saved = load_saved_run(plan)
    if saved is None:
        return None
    changed: dict[str, list[str]] = {_MODEL: [], _DATA: [], _TOKENIZER: [], _REFS: []}
    models = (_encode_without(model, ()) for model in (initial_model(saved.config), plan.model))
    for line in _differences(_MODEL, *models):
        # What a key states a smaller effect for changes how the model is computed, but not the model.
        if effect_of(type(plan.model), line.partition(":")[0].removeprefix(f"{_MODEL}.")) is OWN:
            changed[_MODEL].append(line)
    data = data_identity(plan)
    # A phase that the configuration no longer has reads no other data. Whether the run can go on without it, `check_cursor`
    # says.
    kept = {phase: identity for phase, identity in (saved.data or {}).items() if phase in data}
    for phase, identity in kept.items():
        for line in _differences(f"data of phase '{phase}'", identity, data[phase]):
            is_tokenizer = line.startswith(f"data of phase '{phase}'.tokenizer")
            changed[_TOKENIZER if is_tokenizer else _DATA].append(line)
    references = references_identity(plan)
    for name, identity in saved.references.items():
        changed[_REFS] += _differences(f"refs.{name}", identity, references.get(name, {}))
    return _allowed(plan, saved, changed)


def rendering(plan: Plan, tokenizer: Tokenizer) -> dict[str, Any]:
    """Phase -> source -> what records become tokens with, beside the tokenizer's vocabulary, such as its chat template."""
    return {
        phase.name: {
            source.name: dict(source.encoder(tokenizer).cache_key())
            for source in data.corpus.sources
            if source.has(TRAIN)
        }
        for phase, data in zip(plan.phases, plan.data, strict=True)
    }


def check_same_tokenizer(plan: Plan, saved: SavedRun, tokenizer: Tokenizer) -> SavedRun:
    """Refuses to resume with a tokenizer or a chat template of other content, such as a tokenizer that was trained again."""
    if saved.tokenizer is None or _TOKENIZER in saved.allowed:
        return saved
    now, lines = rendering(plan, tokenizer), []
    for phase, data in zip(plan.phases, plan.data, strict=True):
        keys = now[phase.name]
        # Checkpoints without it are of version 1.
        of_version_1 = {name: {k: v for k, v in key.items() if k != CONVERSATIONS} for name, key in keys.items()}
        first = of_version_1 if not saved.rendering and phase.name in (saved.data or {}) else keys
        before = saved.rendering.get(phase.name, first)
        for source in data.corpus.sources:
            if source.name in keys:
                keys[source.name] = source.rendering(TRAIN, tokenizer, before.get(source.name))
        lines += _differences(f"data of {phase.name}", before, keys)
    if saved.tokenizer != tokenizer.fingerprint:
        lines.insert(0, f"tokenizer: {saved.tokenizer[:12]} -> {tokenizer.fingerprint[:12]}")
    return _allowed(plan, saved, {_TOKENIZER: lines}) if lines else saved


def _allowed(plan: Plan, saved: SavedRun, changed: Mapping[str, Sequence[str]]) -> SavedRun:
    """The saved run with the changes that are allowed. Raises `ConfigError` for the others."""
    allowed = plan.config.trainer.allow_changes
    refused = {name: lines for name, lines in changed.items() if lines and name not in allowed}
    if refused:
        advice = ""
        if _MODEL not in refused:
            names = ", ".join(refused)
            advice = f" If you mean to go on with them, allow it: --trainer.allow_changes '[{names}]'."
        raise ConfigError(
            f"the run '{plan.run_id}' already exists with another model, other data, another tokenizer or other references"
            f" ({saved.source}):\n"
            + "\n".join(f"  {line}" for lines in refused.values() for line in lines)
            + f"\n{advice.strip()}{' ' if advice else ''}Set another ID for this run (--trainer.id NAME), or move the folders"
            f" of the existing run away: {plan.log_folder}, {plan.checkpoints.location}"
        )
    return replace(saved, allowed={**saved.allowed, **{name: lines for name, lines in changed.items() if lines}})


def check_cursor(cursor: Cursor, plan: Plan) -> Phase:
    """The phase of a checkpoint in the current plan. Raises `ConfigError` if it has none because phases were changed."""
    phase = plan.phases[cursor.phase] if cursor.phase < len(plan.phases) else None
    if phase is None or phase.name != cursor.phase_name or not phase.start <= cursor.step <= phase.end:
        phases = ", ".join(f"'{p.name}' from step {p.start} to {p.end}" for p in plan.phases)
        is_missing = phase is None or phase.name != cursor.phase_name
        raise ConfigError(
            f"the newest checkpoint of '{plan.run_id}' is at step {cursor.step} of phase '{cursor.phase_name}', but the"
            f" configuration has no such step: its phases are {phases}. {_remedy(plan, is_missing)}, or set another"
            " trainer.id"
        )
    return phase


def _remedy(plan: Plan, is_missing: bool) -> str:
    """Says what gives a configuration the step of a checkpoint. Args: is_missing: whether it has not even its phase."""
    preset = plan.config.preset
    if preset is not None and preset.phase_keys:
        keys = ", ".join(f"preset.{key}" for key in preset.phase_keys)
        return f"Set what decides about them ({keys}, or the list phases) as it was"
    return "Give phases the one of the checkpoint in its place" if is_missing else "Increase num_train_steps"


def changed_stages(cursor: Cursor, position: Mapping[str, Any], phase: Phase, plan: Plan) -> list[str]:
    """Warns if `train_weights` has stages and the batch sizes of the steps so far differ from the current configuration.

    Args:
        position: data position of the checkpoint.
    """
    weights, sizes = plan.data[phase.index].train_weights, plan.batches.of(phase)
    if not isinstance(weights, list) or len(weights) < 2:
        return []
    read = int(position["examples"]) - int(position.get("skipped", 0))
    # A rollout reads the prompts of all its mini-batches at once.
    until = int(position.get("rollout", {}).get("end", cursor.step))
    steps, planned = until - phase.start, sizes.examples_between(phase.start, until)
    if read == planned:
        return []
    line = (
        f"warning: the first {steps} steps of phase '{phase.name}' read {read:,} sequences, but with the current"
        f" trainer.train_batch_size they would have read {planned:,}. The stages of data.train_weights therefore start at"
        " different sequences than before, and some sequences may be repeated or skipped. To avoid this, include the batch"
        f" sizes of past steps: trainer.train_batch_size: [{{start: 0, value: {read // max(steps, 1)}}},"
        f" {{start: {until}, value: {sizes.at(until).size}}}]"
    )
    return [line]


def changes(saved: SavedRun, now: RunConfig, options: StepOptions, step: int, num_sequences: int) -> list[str]:
    """One line for each difference from the last start, with its effect.

    Args:
        options: of the training step.
        num_sequences: sequences of training data that the current phase has read.
    """
    return [
        *config_changes(saved, now, step),
        *_content_changes(saved, now, num_sequences),
        *_environment_changes(saved.environment, computing_facts(now, options)),
    ]


def config_changes(saved: SavedRun, now: RunConfig, step: int) -> list[str]:
    """The changed keys, and their effect on the learning rate."""
    lines = []
    for line in _differences(
        "", *(_encode_without(as_run_config(config), ["dry_run"]) for config in (saved.config, now))
    ):
        effect = effect_of(RunConfig, line.partition(":")[0])
        lines.append(f"{line} ({_BY_PERMISSION if effect is CONTENT and saved.allowed else effect})")
    old, new = _schedule_at(saved.config, step), _schedule_at(now, step)
    if old is not None and new is not None and old != new:
        spans = f"the learning-rate schedule now spans steps {new[0]} to {new[1]} instead of {old[0]} to {old[1]}"
        before, after = f"{old[2]:.3g}", f"{new[2]:.3g}"
        rates = f"is {after} instead of {before}" if before != after else f"stays {after}"
        lines.append(f"{spans}: the next learning rate {rates}")
    return lines


_BY_PERMISSION = Effect("changes what follows", "allowed by trainer.allow_changes")


def _content_changes(saved: SavedRun, now: RunConfig, num_sequences: int) -> Iterator[str]:
    for lines in saved.allowed.values():
        for line in lines:
            yield f"{line} ({_BY_PERMISSION})"
    if _DATA in saved.allowed:
        yield (
            f"data position: the run goes on after sequence {num_sequences:,} of the phase, counted in the order of the new"
            " data as if it had been there from the start. Of several sources, each continues after its share of these, by"
            " data.train_weights, also one that is new. Sequences of the earlier data may come again or never"
        )
    if _TOKENIZER in saved.allowed:
        yield "tokenizer: the embeddings were trained for the tokens of the earlier one"
    for name in now.trainer.allow_changes:
        if name not in saved.allowed:
            yield f"trainer.allow_changes: '{name}' allowed nothing, because nothing of it has changed. Remove it"


def read_evaluated(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """Phase -> name -> digests of what evaluations had read until a checkpoint; empty for those of earlier versions."""
    with checkpoint.local("run") as folder:
        return _read_json(folder / EVALUATED) or {}


def evaluated_changes(run_files: dict[str, bytes], phase: str, now: dict[str, str]) -> list[str]:
    """One line for each file of which a phase's evaluations read another content than before. Puts `now` in `run_files`."""
    known = json.loads(run_files.get(EVALUATED, b"{}"))
    before = known.get(phase, {})
    run_files[EVALUATED] = json.dumps(known | {phase: before | now}).encode()
    lines = _differences("", {name: before.get(name, digests) for name, digests in now.items()}, now)
    return [f"{line} ({effect_of(RunConfig, 'evals')})" for line in lines]


_XLA_OPTIONS, _BLOCK_SIZES = "XLA options", "block sizes"
_CODE = follows("the code may compute different numbers from here")
FACTS: dict[str, Effect] = {
    "jaxlm": _CODE,
    "commit of jaxlm": Effect("harmless", "a change of the source is listed under jaxlm"),
    "module": _CODE,
    "Python": HARMLESS,
    **dict.fromkeys(("jax", "jaxlib", "haliax", "equinox", "optax", "libtpu"), ROUNDING),
    **dict.fromkeys(("backend", "devices", "processor", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "variables"), ROUNDING),
    "precision": follows("numbers have a different precision from here"),
    **dict.fromkeys(("jax options", _XLA_OPTIONS, _BLOCK_SIZES), ROUNDING),
}
"""What another fact about what computes means for a run; `module` stands for each module of the user's own."""
# Of CPUs, before they followed from the caches and checkpoints contained them.
_FIRST_BLOCK_SIZES = "loss_chunk_tokens=512, attention_block=128"


def effect_of_fact(name: str) -> Effect:
    """The effect of a changed fact about what computes. Raises `KeyError` if it has none."""
    return FACTS[name if name in FACTS else name.partition(" ")[0]]


def computing_facts(config: RunConfig, options: StepOptions) -> dict[str, str]:
    """Lists what computes the numbers of a run, with the user's own modules that the configuration names.

    Args:
        options: of the training step.
    """
    return {**computing_numbers(config), **dict(zip((_XLA_OPTIONS, _BLOCK_SIZES), options.texts, strict=True))}


def computing_numbers(config: RunConfig) -> dict[str, str]:
    """Lists what computes the numbers of a run, without the options of its program."""
    precision = parse_precision(config.trainer.mp, jax.devices()[0])
    return {**computing(own_modules(config)), **({"precision": str(precision)} if precision.reason else {})}


def _environment_changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    if before and now[_BLOCK_SIZES]:
        before = {_BLOCK_SIZES: _FIRST_BLOCK_SIZES, **before}
    for name in now if before else ():
        if before.get(name, "") != now[name]:  # earlier versions did not save all of them
            yield f"{name}: {before.get(name) or 'none'} -> {now[name] or 'none'} ({effect_of_fact(name)})"


def _schedule_at(config: RunConfig, step: int) -> tuple[int, int, float] | None:
    """(first step, last step, learning rate of the next update) of the phase that contains a step."""
    phases, _ = plan_phases(config)
    phase = next((p for p in phases if step < p.end), phases[-1])
    if step < phase.start:
        return None
    return phase.start, phase.end, float(phase.optimizer.schedule(phase.num_steps)(step - phase.first_scheduled))


def _encode_without(config: Any, keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in without_secrets(encode(config)).items() if key not in keys}


def data_identity(plan: Plan) -> dict[str, Any]:
    """Phase name -> `DataConfig.identity`, which identifies its training data by content. Plain JSON."""
    return {phase.name: data.identity() for phase, data in zip(plan.phases, plan.data, strict=True)}


def check_same_data(plan: Plan, tokenizer_fingerprint: str) -> None:
    """Checks that all processes have the same data, tokenizer and references, since each may read its own copy."""
    note("data.tokenizer", tokenizer_fingerprint)
    for name, identity in references_identity(plan).items():
        note(f"refs.{name}", json.dumps(identity, sort_keys=True))
    for phase, identity in main_first(lambda: data_identity(plan)).items():  # it may copy remote files
        note(f"data of phase '{phase}'", json.dumps(identity, sort_keys=True))
    check_same_files()


def _differences(path: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(f"{path}.{key}".lstrip("."), before.get(key), now.get(key))
    elif _are_entries(before, now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from _differences(f"{path}.{index}", *pair)
    elif before != now:
        yield bounded(f"{path}: {before} -> {now}")


def _are_entries(before: Any, now: Any) -> bool:
    """Tells whether two lists have sections, each of the same type as the one in its place."""
    if not (isinstance(before, list) and isinstance(now, list) and len(before) == len(now)):
        return False
    pairs = zip(before, now, strict=True)
    return all(
        isinstance(old, Mapping) and isinstance(new, Mapping) and old.get("type") == new.get("type")
        for old, new in pairs
    )


# References that a run no longer reads: only phases that it has left, or surgeries of phases that it has entered, did.
#
# Their files may be gone. What identifies them is taken from the checkpoint instead.


def with_past_references(plan: Plan) -> Plan:
    """The plan, with the identities of the references that the run has probably left behind. All processes call this."""
    cursor = expected_cursor(plan)

    def identities() -> dict[str, dict[str, str]]:
        names = _past(plan, cursor)
        saved = load_saved_run(plan) if names else None
        return {name: dict({} if saved is None else saved.references.get(name, {})) for name in names}

    return replace(plan, retired_refs=from_main(identities)) if plan.refs else plan


def read_again(plan: Plan, init_from: InitFrom) -> Plan:
    """The plan for where the run really goes on, which is earlier than expected if checkpoints are damaged."""
    past = _past(plan, None if init_from.state is None else init_from.state.cursor)
    return replace(plan, retired_refs={name: known for name, known in plan.retired_refs.items() if name in past})


def _past(plan: Plan, cursor: Cursor | None) -> list[str]:
    if cursor is None:
        return []
    ahead = plan.phases[cursor.phase :]
    evals = [one for one in plan.config.evals if any(one.scope.includes(phase.name) for phase in ahead)]
    needed = {name for evaluation in evals for name in evaluation.scope.references}
    needed |= {name for phase in ahead for name in phase.objective.facts.references}
    needed |= {name for phase in ahead[1:] for name in phase.surgery_references}
    return [name for name in plan.refs if name not in needed]
