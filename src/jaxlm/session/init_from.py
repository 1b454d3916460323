"""What a run starts from: its own newest checkpoint, another run's state, another model's weights, or scratch."""

import contextlib
import functools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import from_main, main_first, main_only
from jaxlm.core.sharding import Layout
from jaxlm.core.stores import is_url
from jaxlm.core.tree import is_named
from jaxlm.data.base import Log
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jaxlm.engine.checkpoint.manifest import CheckpointName, Cursor, DamagedError, History
from jaxlm.engine.checkpoint.restore import (
    VerifiedCheckpoint,
    latest_complete,
    latest_valid,
    newest_undamaged,
    resolve_checkpoints,
    restore,
    restore_state,
)
from jaxlm.engine.checkpoint.store import Checkpoint
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState, place_state, shardings
from jaxlm.interop.hf.folder import ReadOptions
from jaxlm.interop.hf.hub import local_folder, repository_of
from jaxlm.interop.hf.load import Change
from jaxlm.interop.pretrained import (
    check_pretrained,
    check_weights,
    grow_vocabulary,
    hf_name,
    load_pretrained,
    open_pretrained,
)
from jaxlm.models.base import LanguageModel, token_leaves
from jaxlm.observe.records import METRICS, read_jsonl
from jaxlm.plan.load_config import read_saved
from jaxlm.plan.plan import Plan
from jaxlm.plan.run_config import RunConfig
from jaxlm.plan.trainer_config import StartConfig
from jaxlm.reading.decode import choice_name
from jaxlm.surgery.base import changes_on_read, merge_surgeries


@dataclass(frozen=True)
class InitFrom:
    """Describes what a run starts from.

    Attributes:
        state: the checkpoint to resume from, including step, optimizer state and data position; None starts at step 0.
        is_own: whether `state` is this run's own checkpoint.
        weights: the checkpoint whose model to start from at step 0; None if `state` is set.
        back: the history of a run that goes back to `state`; None if `state` is its newest checkpoint, or another run's.
    """

    state: VerifiedCheckpoint | None = None
    is_own: bool = True
    weights: VerifiedCheckpoint | None = None
    back: History | None = None

    @property
    def resume_step(self) -> int | None:
        """The step of this run's own checkpoint; None for a new run."""
        return self.state.cursor.step if self.state and self.is_own else None

    def initializes(self, plan: Plan) -> bool:
        """Tells whether some parameters may be initialized, and not loaded."""
        if (source := self.state or self.weights) is not None and plan.config.trainer.allow_partial_checkpoint:
            wanted = token_leaves(plan.model, plan.state_builder.Vocab.size)
            saved = json.loads(source.checkpoint.read("run/manifest.json"))["leaves"]
            return wanted is not None and any(f"model.{path}" not in saved for path in wanted.paths)
        return self.state is None and self.weights is None and starts_at_random(plan.config, plan.data[0].tokenizer)

    @property
    def history(self) -> History:
        """The history with which the run starts."""
        if self.state is None:
            return History()
        history = self.back or self.state.cursor.history
        return history if self.is_own else history.in_another_run()

    @property
    def is_newest(self) -> bool:
        """Tells whether `state` is the newest checkpoint of this run."""
        return self.is_own and self.back is None

    def describe(self, plan: Plan) -> str:
        """Says what the run starts from, for the table at the start."""
        if self.state is not None:
            prefix = "" if self.is_own else "the state of another run, "
            return f"{prefix}{self.state.location} (step {self.state.cursor.step})"
        if self.weights is not None:
            return f"step 0, with the model of {self.weights.location}"
        name = hf_name(plan.config.initialize_from_hf, plan.data[0].tokenizer)
        return "step 0, with " + ("random weights" if name is None else f"the weights of {name}")

    def load_state(self, plan: Plan, phase: Phase, log: Log) -> RunState:
        """Restores the whole state of a checkpoint in `phase`. Call it inside `plan.layout.use()`."""
        assert self.state is not None
        partial = plan.config.trainer.allow_partial_checkpoint
        return restore_state(self.state, plan.state_builder, phase, plan.layout, log, allow_partial=partial)

    def load_weights(self, plan: Plan, log: Log) -> tuple[LanguageModel | None, int]:
        """Loads the model to start the first phase with; None for random weights. Call it inside `plan.layout.use()`.

        Returns:
            The model, and the number of surgeries of the first phase that it has been through.
        """
        if self.weights is None:
            return _load_hf_weights(plan, log)
        rest = "step, optimizer state and data position start from scratch"
        log(f"initializing the model from {self.weights.location}; {rest}")
        if not plan.config.trainer.allow_partial_checkpoint:
            return _restore_changed(self.weights, plan, log)
        abstract = plan.state_builder.abstract_initial_model
        fresh = lambda: place_state(plan.state_builder.initial_model, abstract, plan.layout)  # noqa: E731
        return restore(self.weights, abstract, plan.layout, prefix="model", fresh=fresh, log=log, cast=True), 0


def starts_at_random(config: RunConfig, tokenizer: Any) -> bool:
    """Tells whether a new run may initialize some parameters, and not load them.

    Args:
        tokenizer: `data.tokenizer` of the first phase.
    """
    if hf_name(config.initialize_from_hf, tokenizer) is not None:
        return False
    return not config.trainer.starts or config.trainer.allow_partial_checkpoint


def _load_hf_weights(plan: Plan, log: Log) -> tuple[LanguageModel | None, int]:
    """The configured Hugging Face weights, or None, and the number of surgeries that have been done on them."""
    name = hf_name(plan.config.initialize_from_hf, plan.data[0].tokenizer)
    if name is None:
        return None, 0
    path = main_first(lambda: local_folder(name, "initialize_from_hf", weights=True))
    log(f"weights: {path}")
    abstract = plan.state_builder.abstract_initial_model
    config, added = plan.config, plan.data[0].added_tokens
    options = ReadOptions(config.hf_weight_names, config.hf_skip_keys, log=log)
    if not added:
        changes, num_applied = _changes_on_read(plan)
        options = replace(options, changes=changes)
        return load_pretrained(path, abstract, plan.model, plan.layout, options), num_applied
    smaller = plan.state_builder.with_vocabulary(abstract.Vocab.size - len(added)).abstract_initial_model
    model = load_pretrained(path, smaller, plan.model, plan.layout, options)
    log(f"the {len(added)} rows for data.added_tokens are the mean of the {smaller.Vocab.size:,} others")
    return grow_vocabulary(model, abstract, plan.layout), 0


def _restore_changed(weights: VerifiedCheckpoint, plan: Plan, log: Log) -> tuple[LanguageModel, int]:
    """The model of a checkpoint, and the number of surgeries that have been done on it. Parameters that these change are
    read one by one, so that only one of them exists as it was: the layers of a stack together, as they are saved."""
    abstract, (changes, num_applied) = plan.state_builder.abstract_initial_model, _changes_on_read(plan)
    paths = [path for path, _ in tree.leaves(abstract)]

    def read(chosen: Collection[str]) -> dict[str, Any]:
        part = tree.map_leaves(lambda path, leaf: leaf if path in chosen else None, abstract)
        unused = {f"model.{path}" for path in paths if path not in chosen}
        return dict(tree.leaves(restore(weights, part, plan.layout, prefix="model", log=log, cast=True, unused=unused)))

    leaves = read([path for path in paths if path not in changes])
    for path, change in changes.items():
        leaves[path] = change(_layers(read([path])[path]))
    return tree.map_leaves(lambda path, _: leaves[path], abstract), num_applied


def _layers(parameter: NamedArray) -> Iterator[NamedArray]:
    """The layers of a stacked parameter; one that is not stacked, as it is."""
    if not parameter.has_axis(LAYERS):
        yield parameter
        return
    for number in range(parameter.axis_size(LAYERS)):
        yield parameter[LAYERS, number : number + 1]


def _changes_on_read(plan: Plan) -> tuple[dict[str, Change], int]:
    """Returns what the first phase's first surgeries make of parameters as they are read, and how many surgeries."""
    by_surgery = list(changes_on_read(plan.phases[0].surgeries, plan.state_builder.abstract_initial_model))
    changes = {path: change for of_surgery in by_surgery for path, change in of_surgery.items()}
    return {path: _ChangeOnRead(path, change, plan.layout) for path, change in changes.items()}, len(by_surgery)


@dataclass(frozen=True)
class _ChangeOnRead:
    """Changes the layers of a parameter one by one, and joins them.

    Raises:
        ConfigError: a layer has a number that is not finite. In few bits, it would become another one.
    """

    path: str
    change: Callable[[NamedArray], Any]
    layout: Layout

    def __call__(self, layers: Iterator[NamedArray]) -> Any:
        first = next(layers)
        placement = shardings(jax.eval_shape(self.change, first), self.layout)
        placed = jax.jit(self._checked, out_shardings=(placement, self.layout.replicated()))
        found = [placed(first)]
        del first
        found += map(placed, layers)
        changed = [one for one, _ in found]
        if wrong := [number for number, (_, is_finite) in enumerate(found) if not is_finite]:
            where = f"{self.path}, layer {wrong[0]}" if len(found) > 1 else self.path
            raise ConfigError(
                f"{where}: the weights that the run starts from have numbers that are not finite, or become so as they are"
                " stored. Repair the weights, or store them with another kind"
            )
        if len(changed) == 1:
            return changed[0]

        def joined(*parts: Any) -> Any:
            return jax.tree.map(lambda *arrays: hax.concatenate(LAYERS, arrays), *parts, is_leaf=is_named)

        return place_state(joined, jax.eval_shape(joined, *changed), self.layout, *changed)

    def _checked(self, layer: NamedArray) -> tuple[Any, jax.Array]:
        """Changes a layer, and tells whether all numbers before and after are finite."""
        changed = self.change(layer)
        numbers = [layer.array, *filter(eqx.is_inexact_array, jax.tree.leaves(changed))]
        return changed, jnp.all(jnp.stack([jnp.all(jnp.isfinite(array)) for array in numbers]))


def import_notes(plan: Plan) -> list[str]:
    """Lists what a start logs about the config.json of the weights and references that it loads. Reads no weights."""
    config, notes = plan.config, [note for ref in plan.active_refs.values() for note in ref.notes()]
    name = hf_name(config.initialize_from_hf, plan.data[0].tokenizer)
    if name is None or config.hf_weight_names:
        return notes
    path = main_first(lambda: local_folder(name, "initialize_from_hf", weights=False))
    return [*open_pretrained(path, ReadOptions(skip_keys=config.hf_skip_keys)).notes, *notes]


def check_init_from(plan: Plan) -> None:
    """Checks the configured starting point without changing it. Checkpoints at URLs may be downloaded."""
    trainer, own_checkpoints = plan.config.trainer, main_first(plan.checkpoints.checkpoints)
    if trainer.load_checkpoint is False and own_checkpoints:
        raise ConfigError(
            f"trainer.load_checkpoint: false given, but the run '{plan.run_id}' already has checkpoints"
            f" ({own_checkpoints[-1].location}). Starting from scratch would mix new checkpoints with them. Set another"
            " trainer.id, or move them away"
        )
    if own_checkpoints:
        main_first(lambda: _check_own_named(plan, own_checkpoints))
    else:
        for phase in plan.phases:
            plan.state_builder.initial_leaves(phase)  # raises for files that a surgery cannot use
    other = trainer.load_checkpoint_path or trainer.initialize_from_state
    if trainer.load_checkpoint and not own_checkpoints and other is None:
        raise ConfigError(
            f"trainer.load_checkpoint: true given, but there is no checkpoint at {plan.checkpoints.location}"
        )
    for name, path in trainer.starts.items():
        if not own_checkpoints and not _checkpoints_at(path, trainer):
            raise ConfigError(
                f"trainer.{name}: no checkpoint at {path}. Set it to a checkpoint, a run's checkpoint folder, or a folder of"
                " runs, or remove it to start without one"
            )
    if own_checkpoints or other is not None:
        return
    if trainer.initialize_from is not None:
        newest = _checkpoints_at(trainer.initialize_from, trainer)[-1]
        main_first(functools.partial(_check_names, newest, plan))


def check_hf_weights(plan: Plan, num_tokens: int) -> None:
    """Checks the weights that a new run will load, before the training data is tokenized: their vocabulary, and their files,
    unless the Hub's client downloads and checks them later. Args: num_tokens: of the tokenizer."""
    config = plan.config
    name = hf_name(config.initialize_from_hf, plan.data[0].tokenizer)
    if name is None or config.trainer.starts or main_first(plan.checkpoints.checkpoints):
        return
    is_here = repository_of(name) is None
    path = main_first(lambda: local_folder(name, "initialize_from_hf", weights=is_here))
    if is_here:
        main_first(lambda: check_weights(path, ReadOptions(config.hf_weight_names)))
    if not config.hf_weight_names:
        options = ReadOptions(skip_keys=config.hf_skip_keys)
        main_first(lambda: check_pretrained(path, num_tokens - len(plan.data[0].added_tokens), options))


def _check_names(checkpoint: Checkpoint, plan: Plan) -> None:
    """Raises `ConfigError` for a checkpoint that has parameters of the run's model under other names, because of surgeries.

    `allow_partial_checkpoint` does not help there: it would initialize these parameters.
    """
    try:
        with checkpoint.local("run") as folder:
            saved = read_saved(folder / "config.yaml")
        manifest = json.loads(checkpoint.read("run/manifest.json"))
        phases = saved.phases[: checkpoint.cursor().phase + 1]
        names = {path.removeprefix("model.") for path in manifest["leaves"]}
    except (ConfigError, DamagedError, OSError, ValueError, TypeError, KeyError):
        return  # damage is reported later, when the checkpoint is verified
    surgeries = [surgery for phase in phases for surgery in phase.surgery]
    missing = {path for path, _ in tree.leaves(plan.state_builder.abstract_initial_model)} - names
    if not surgeries or not missing:
        return

    def merged() -> LanguageModel:
        model = saved.model.build(plan.state_builder.Vocab, key=jax.random.key(0))
        for surgery in surgeries:
            model = surgery.apply(model, key=jax.random.key(0))
        return merge_surgeries(model, surgeries)

    renamed = sorted(missing.intersection(path for path, _ in tree.leaves(jax.eval_shape(merged))))
    if renamed:
        kinds = " and ".join(dict.fromkeys(choice_name(type(surgery)) for surgery in surgeries))
        raise ConfigError(
            f"trainer.initialize_from: {checkpoint.location} was saved after the surgery {kinds}, so {len(renamed)}"
            f" parameters of this model have other names in it ({renamed[0]}, ...). A checkpoint of the model without surgery"
            f" was expected. Export it: jaxlm convert to-hf --checkpoint {checkpoint.location} --output_dir FOLDER. Then set"
            " initialize_from_hf: FOLDER and use_hf_model_config: true, and remove trainer.initialize_from"
        )


def find_init_from(plan: Plan, log: Log) -> InitFrom:
    """Finds what the run starts from. Its own checkpoints take precedence over all configured paths.

    Raises:
        ConfigError: the run is to go back to a checkpoint that it does not have.
        NoUsableCheckpointError: checkpoints exist, but all of them are damaged.
    """
    trainer = plan.config.trainer
    own_checkpoint = latest_valid(plan.checkpoints, log)
    if own_checkpoint is not None:
        return _going_back(plan, own_checkpoint, log) or InitFrom(own_checkpoint)
    key, path = next(iter(trainer.starts.items()), (None, None))
    if path is None:
        return InitFrom()
    checkpoint = latest_complete(_checkpoints_at(path, trainer), path, log)
    return InitFrom(weights=checkpoint) if key == "initialize_from" else InitFrom(checkpoint, is_own=False)


def _going_back(plan: Plan, newest: VerifiedCheckpoint, log: Log) -> InitFrom | None:
    """Returns where the run goes back to because its configuration names one of its checkpoints; None if it does not.

    It goes back once: a later start with the same configuration goes on from what was done since.
    """
    key, name = _own_checkpoint_named(plan)
    before = newest.cursor.history
    if name is None or name == newest.checkpoint.name:
        return None
    if name == before.went_back_to:
        log(f"{key}: the run has gone back to {name} already (attempt {before.attempt})")
        return None
    names = main_first(plan.checkpoints.names)
    if name not in names:
        raise _not_own(plan, key, name, names)
    target = newest_undamaged(plan.checkpoints, [name], log)
    if target is None:
        raise ConfigError(f"{key}: {name} is damaged. Choose another checkpoint: {', '.join(names)}")
    num_steps = max(_last_step(plan, newest, key, name) - target.cursor.step, 0)
    then = target.cursor.history
    # A checkpoint that was pinned then may have been deleted since: its evaluations start anew.
    then = then if set(then.pins.values()) <= set(names) else then.without_pins()
    history = replace(
        then,
        attempt=before.attempt + 1,
        abandoned_steps=before.abandoned_steps + num_steps,
        went_back_to=name,
        abandoned=tuple(names[names.index(name) + 1 :]),
    )
    log(f"{key}: going back from {newest.checkpoint.name} to {target.location} (attempt {history.attempt})")
    return InitFrom(target, back=history)


def _check_own_named(plan: Plan, own_checkpoints: Sequence[Checkpoint]) -> None:
    """Raises `ConfigError` if a key names what is in the run's own folder, but none of its checkpoints."""
    (key, name), names = _own_checkpoint_named(plan), plan.checkpoints.names()
    newest = _newest_cursor(own_checkpoints)
    is_done = newest is not None and name == newest.history.went_back_to
    if name is not None and name not in names and not is_done:
        raise _not_own(plan, key, name, names)


def _not_own(plan: Plan, key: str, name: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{key}: the run '{plan.run_id}' has no checkpoint {name} to go back to. It has: {', '.join(names)}"
    )


def _last_step(plan: Plan, newest: VerifiedCheckpoint, key: str, name: str) -> int:
    """The last step with a record: a killed run has logged steps after its newest checkpoint. The same on all processes.

    Raises:
        ConfigError: the checkpoint `name` is from steps that a later attempt of the run has done again.
    """
    target = CheckpointName.parse(name)
    assert target is not None

    def last_step() -> int:
        attempts = {record["step"]: record.get("attempt", 0) for record in read_jsonl(plan.log_folder / METRICS)}
        if attempts.get(target.step, target.attempt) != target.attempt:
            raise ConfigError(
                f"{key}: {name} is from attempt {target.attempt}, and attempt {attempts[target.step]} of '{plan.run_id}' has"
                " done its steps again. To go on from it, set another trainer.id and keep this key"
            )
        return int(max([newest.cursor.step, *attempts]))

    return from_main(last_step)


def _own_checkpoint_named(plan: Plan) -> tuple[str, str | None]:
    """The key that names something in the run's own folder, and its name; None if no key does."""
    for key in ("load_checkpoint_path", "initialize_from_state"):
        folder, _, name = (getattr(plan.config.trainer, key) or "").rstrip("/").rpartition("/")
        location = str(plan.checkpoints.location).rstrip("/")
        is_own = folder == location or (not is_url(location) and Path(folder).resolve() == Path(location).resolve())
        if is_own:
            return f"trainer.{key}", name
    return "", None


def expected_cursor(plan: Plan) -> Cursor | None:
    """Returns where the run will probably go on: the checkpoints are not verified yet. None if it starts at step 0, or if
    no checkpoint says it. All processes must call this, and only process 0 gets the answer."""
    own_checkpoints, trainer = main_first(plan.checkpoints.checkpoints), plan.config.trainer
    if own_checkpoints:
        return main_only(lambda: _own_cursor(plan, own_checkpoints))
    for key, path in trainer.starts.items():
        if key != "initialize_from" and (others := _checkpoints_at(path, trainer)):
            return main_only(functools.partial(_newest_cursor, others))
    return None


def _own_cursor(plan: Plan, own_checkpoints: Sequence[Checkpoint]) -> Cursor | None:
    newest, (_, name) = _newest_cursor(own_checkpoints), _own_checkpoint_named(plan)
    if newest is None or name in (None, newest.history.went_back_to):
        return newest
    return _newest_cursor([checkpoint for checkpoint in own_checkpoints if checkpoint.name == name])


def _newest_cursor(checkpoints: Sequence[Checkpoint]) -> Cursor | None:
    """The newest cursor that can be read. Damaged checkpoints are reported later, when they are verified."""
    for checkpoint in reversed(checkpoints):
        with contextlib.suppress(ConfigError, DamagedError, OSError, ValueError, TypeError):
            return checkpoint.cursor()
    return None


def check_tokenizer(init_from: InitFrom, tokenizer: Tokenizer, log: Log) -> None:
    """Warns if a checkpoint of another run was trained with another tokenizer, and refuses one of another size."""
    checkpoint = init_from.weights or (None if init_from.is_own else init_from.state)
    if checkpoint is None:
        return
    with checkpoint.checkpoint.local("run/tokenizer") as folder:
        theirs = load_tokenizer(str(folder), of_run=True)
    if theirs.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"data.tokenizer: it has {tokenizer.vocab_size:,} tokens, but {checkpoint.location} was trained with"
            f" {theirs.vocab_size:,}. Set data.tokenizer to the tokenizer of that run, which is in run/tokenizer there. For"
            f" more tokens, export its model: jaxlm convert to-hf --checkpoint {checkpoint.location} --output_dir FOLDER."
            " Then set initialize_from_hf and data.tokenizer to FOLDER, and name the tokens in data.added_tokens"
        )
    if theirs.fingerprint != tokenizer.fingerprint:
        log(
            f"warning: {checkpoint.location} was trained with another tokenizer. Its embeddings belong to different tokens"
        )


def _checkpoints_at(path: str, trainer: StartConfig) -> Sequence[Checkpoint]:
    find = functools.partial(resolve_checkpoints, path, Path(trainer.checkpointer.staging_dir))
    return main_first(find) if is_url(path) else find()
