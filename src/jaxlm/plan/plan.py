"""The plan of a run: everything that can be computed and checked before its data is opened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxlm.core.imports import gc_paused

import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import BATCH
from jaxlm.core.devices import open_devices
from jaxlm.core.errors import ConfigError, within
from jaxlm.core.field_types import LARGEST_INT, check_fields
from jaxlm.core.mesh import MeshShape
from jaxlm.core.precision import Precision, parse_precision
from jaxlm.core.sharding import Layout
from jaxlm.core.stores import is_url, local_copy, open_store
from jaxlm.data.config import DataConfig
from jaxlm.data.sources.named import NamedSource
from jaxlm.data.tokenizer.train_bpe import BpeConfig, bpe_config
from jaxlm.engine.checkpoint.manifest import CheckpointName
from jaxlm.engine.checkpoint.restore import resolve_folder
from jaxlm.engine.checkpoint.store import CheckpointFolder
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.phases import Phase
from jaxlm.evals.base import EvalPhase, check_evaluations
from jaxlm.interop.hf.classifier import classifier_name, is_reward_model
from jaxlm.interop.hf.family import config_to_json, family_of_config
from jaxlm.interop.hf.folder import parse_export_dtype
from jaxlm.interop.hf.hub import check_upload_name
from jaxlm.interop.pretrained import hf_name
from jaxlm.models.base import LanguageModel, ModelConfig, vocab_axis
from jaxlm.models.diffusion import check_is_whole
from jaxlm.objectives.base import ObjectiveConfig, check_data, check_model
from jaxlm.objectives.next_token import check_mtp
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.groups import group_schedules
from jaxlm.plan.batches import BatchPlan, check_microbatches, plan_batches, small_batches, unreached_stages
from jaxlm.plan.context.choice import ContextChoice, Rows
from jaxlm.plan.controllers import controller_notes, earliest_starts, objective_notes, phase_controllers
from jaxlm.plan.load_config import run_id_of
from jaxlm.plan.mesh import check_phase, plan_mesh
from jaxlm.plan.refs.base import Ref
from jaxlm.plan.run_config import PhaseConfig, RunConfig
from jaxlm.reading.decode import choice_name, encode
from jaxlm.surgery.base import check_calibration


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        config: the configuration.
        run_id: ID of the run.
        mesh: sizes of the mesh axes.
        layout: devices and axis mappings.
        context: how devices that share rows divide attention; None if none do.
        warnings: settings that waste resources, are overridden or may mean something other than intended.
        state_builder: builds the model and the state of each phase.
        data: data section of each phase.
        batches: batch sizes and their division into microbatches.
        refs: the references, by name. Nothing of them has been read.
        retired_refs: name -> identity of each reference that the run no longer reads. Its files may be gone.
    """

    config: RunConfig
    run_id: str
    mesh: MeshShape
    layout: Layout
    context: ContextChoice | None
    warnings: tuple[str, ...]
    state_builder: StateBuilder
    data: tuple[DataConfig, ...]
    batches: BatchPlan
    refs: Mapping[str, Ref]
    retired_refs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def precision(self) -> Precision:
        return self.state_builder.precision

    @property
    def model(self) -> ModelConfig:
        """Config of the initial model. That of a phase, whose surgeries may have changed it, is `Phase.model`."""
        return self.state_builder.model

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(self.state_builder.phases)

    @property
    def active_refs(self) -> dict[str, Ref]:
        """The references that the run still reads."""
        return {name: ref for name, ref in self.refs.items() if name not in self.retired_refs}

    @property
    def num_steps(self) -> int:
        """Total number of steps of all phases."""
        return self.phases[-1].end

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of the first phase with its largest batch size, including padding."""
        return self.batches.of(self.phases[0]).largest.size * self.tokens_per_example(self.phases[0])

    def tokens_per_example(self, phase: Phase) -> int:
        """Tokens, including padding, of all sequences of an example that the model reads in a phase."""
        seq_len = phase.model.seq_len
        columns = self.data[phase.index].batch_spec(seq_len).columns.values()
        sizes = {axis.name: axis.size for column in columns for axis in column.axes}
        return seq_len * sizes.get(phase.objective.facts.sequences_axis or "", 1)

    @property
    def log_folder(self) -> Path:
        """Local folder of the run's logs, metrics and plots. If `trainer.log_dir` is a URL, it is copied there."""
        trainer = self.config.trainer
        staged = is_url(trainer.log_dir)
        root = local_copy(Path(trainer.checkpointer.staging_dir), trainer.log_dir) if staged else Path(trainer.log_dir)
        return root / self.run_id

    @property
    def log_url(self) -> str | None:
        """URL to which the logs are copied; None if they stay on the local disk."""
        log_dir = self.config.trainer.log_dir
        return f"{log_dir.rstrip('/')}/{self.run_id}" if is_url(log_dir) else None

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The run's checkpoint folder."""
        policy = self.config.trainer.checkpointer
        return resolve_folder(
            policy.base_path,
            self.run_id if policy.append_run_id_to_base_path else None,
            Path(policy.staging_dir),
            delete_temporary=policy.delete_old_temp_checkpoints,
        )

    def with_phase_ends(self, ends: Sequence[int]) -> "Plan":
        """The plan with the steps after which its first phases really ended."""
        return replace(self, state_builder=self.state_builder.with_phase_ends(ends)) if ends else self

    def with_token_leaves(self, leaves: Mapping[str, np.ndarray]) -> "Plan":
        """The plan with the leaves of the initial model that were computed from the training tokens, by path."""
        return replace(self, state_builder=self.state_builder.with_token_leaves(leaves)) if leaves else self

    def updated(self, config: RunConfig, vocab_size: int) -> "Plan":
        """The plan for a configuration and vocabulary size known after opening the data; `self` if they are unchanged."""
        if config == self.config and vocab_size == self.state_builder.Vocab.size:
            return self
        # The same references, so that nothing of them is read twice.
        return replace(make_plan(config, self.run_id, vocab_size), refs=self.refs, retired_refs=self.retired_refs)


@gc_paused()
def make_plan(config: RunConfig, run_id: str, vocab_size: int, devices: Sequence[Any] | None = None) -> Plan:
    """Plans a run for the available devices. Raises `ConfigError` if it cannot be trained as configured.

    Args:
        devices: devices to plan for instead, possibly descriptions of absent devices to compile for.
    """
    trainer = config.trainer
    check_fields(config)
    config.model.check()
    trainer.check()
    devices = open_devices() if devices is None else devices
    precision = parse_precision(trainer.mp, devices[0])
    Vocab = vocab_axis(vocab_size)
    phases, data = plan_phases(config)
    state_builder = StateBuilder(config.model, Vocab, trainer.seed, precision, phases)
    arrays = {p: leaf.axes for p, leaf in tree.leaves(state_builder.abstract_initial_model) if tree.is_named(leaf)}
    sizes = {axis.name: axis.size for axes in arrays.values() for axis in axes}
    names = {path: [axis.name for axis in axes] for path, axes in arrays.items()}
    mesh, layout, context, warnings = plan_mesh(trainer, sizes, names, devices, lambda: Rows.of(state_builder, data))
    check_hugging_face(config, data[0].tokenizer, [phase.model for phase in phases])
    batches = plan_batches(trainer, layout.num_shards(BATCH), config.batches_of_phases())
    plan = Plan(
        config=config,
        run_id=run_id,
        mesh=mesh,
        layout=replace(layout, optimizer_memory=trainer.optimizer_memory),
        context=context,
        warnings=(
            *warnings,
            *unreached_stages(trainer, phases[-1].end),
            *small_batches(batches, phases, layout.num_shards(BATCH)),
            *_schedule_notes(phases),
            *objective_notes(config, phases),
            *controller_notes(config, phases),
        ),
        state_builder=state_builder,
        data=data,
        batches=batches,
        refs=plan_references(config, phases),
    )
    for phase, section, start in zip(phases, data, earliest_starts(config, phases), strict=True):
        _check_batch(phase, section)
        check_microbatches(phase, start, batches.of(phase), layout.num_shards(BATCH))
        if (masking := section.batching.masking) is not None:
            for stage in batches.of(phase).between(start, phase.end):
                masking.check_batch_size(stage.size)
    # Raises for surgeries that do not apply and patterns that match nothing.
    states = [plan.state_builder.abstract_state(phase) for phase in phases]
    check_evaluations(config.evals, [_evaluated(p, d, s.model) for p, d, s in zip(phases, data, states, strict=True)])
    precision.check([state_builder.abstract_initial_model, *(state.model for state in states)])
    for phase, state in zip(phases, states, strict=True):
        spec = data[phase.index].batch_spec(phase.model.seq_len)
        trainable = phase.split(state.model)[0]
        phase.objective.check(spec.make(**spec.columns), state.model, trainable)
        check_mtp(phase.objective, trainable)
        if config.hf_save_path is not None:
            check_is_whole(state.model.traits.denoisers)
            if is_reward_model(state.model):
                classifier_name(family_of_config(phase.model).architecture)  # raises if transformers has no such class
        check_phase(layout, state.model, phase.name)
    return plan


def _schedule_notes(phases: Sequence[Phase]) -> list[str]:
    """The notes of all learning-rate schedules, each once."""
    notes = {}
    for phase in phases:
        schedule, groups = phase.optimizer.schedule(phase.num_steps), group_schedules(phase.optimizer, phase.num_steps)
        of_phase = f"phase '{phase.name}': " if len(phases) > 1 else ""
        lines = [line for part in (schedule, *groups.values()) for line in part.notes]
        notes |= {f"{of_phase}{line}": None for line in lines}
    return list(notes)


def _evaluated(phase: Phase, data: DataConfig, model: LanguageModel) -> EvalPhase:
    """The phase as evaluations find it. Args: model: as shapes."""
    annotated = phase.objective.facts.annotation_key is not None and not phase.objective.facts.asks_itself
    return EvalPhase(phase.name, model, _empty_batch(phase, data), data.has_validation, annotated)


def _empty_batch(phase: Phase, data: DataConfig) -> Any:
    spec = data.batch_spec(phase.model.seq_len)
    return spec.make(**dict.fromkeys(spec.columns))


def _check_batch(phase: Phase, data: DataConfig) -> None:
    """Raises `ConfigError` if the phase's surgeries or its objective do not read the batches of its data."""
    batch = _empty_batch(phase, data)
    with within(f"phase '{phase.name}'"):
        check_calibration(phase.surgeries, batch, choice_name(type(data)))
        check_data(phase.objective, data, batch)
    check_model(phase.objective, phase.model)


def plan_references(config: RunConfig, phases: Sequence[Phase]) -> dict[str, Ref]:
    """The references, unread. Raises `ConfigError` if an objective needs one that is not there, or none needs one that is.
    Tables need all."""
    needed = {name: ("objective", phase) for phase in phases for name in phase.objective.facts.references}
    needed |= {name: ("surgery", phase) for phase in phases for name in phase.surgery_references}
    users = {name: f"{section} of phase '{phase.name}'" for name, (section, phase) in needed.items()}
    for evaluation in config.evals:
        users |= {name: f"evaluation '{choice_name(type(evaluation))}'" for name in evaluation.scope.references}
    for name, user in users.items():
        if name not in config.refs:
            problem = f"only has: {', '.join(config.refs)}" if config.refs else "is empty"
            raise ConfigError(
                f"refs: the {user} uses the model '{name}', but the section {problem}. Add"
                f" it: refs: {{{name}: {{type: hf, path: ...}}}}"
            )
    for name in config.refs:
        if name not in users and not config.tables:
            reason = (
                f"objectives, surgeries and evaluations use {', '.join(users)}"
                if users
                else "no objective, surgery or evaluation uses one"
            )
            raise ConfigError(
                f"refs.{name}: not used, because {reason}. Remove or rename it, set objective.type, or compare it in tables"
            )
    return {name: ref.open(f"refs.{name}") for name, ref in config.refs.items()}


def check_hugging_face(config: RunConfig, tokenizer: str | BpeConfig, models: Sequence[ModelConfig]) -> None:
    """Raises `ConfigError` if the keys about Hugging Face import and export are invalid. Args: models: of the phases."""
    if config.hf_save_dtype is not None:
        parse_export_dtype(config.hf_save_dtype, "hf_save_dtype")
    if config.hf_save_path is not None:
        if is_url(config.hf_save_path):
            open_store(config.hf_save_path, "hf_save_path")
        for model in dict.fromkeys(models):
            config_to_json(family_of_config(model), model)  # raises for what a config.json cannot say
    if config.hf_upload and (config.hf_save_path is None or is_url(config.hf_save_path)):
        raise ConfigError(
            f"hf_upload: {config.hf_upload} given, but hf_save_path is {config.hf_save_path}. It pushes the folders in"
            " hf_save_path: set that to a local folder"
        )
    if repository := upload_repository(config):
        check_upload_name(repository, "hf_upload")
    name = hf_name(config.initialize_from_hf, tokenizer)
    for key in ("hf_weight_names", "hf_skip_keys"):
        if name is None and getattr(config, key):
            raise ConfigError(f"{key}: given without initialize_from_hf. Remove it, or set initialize_from_hf")
    if name is not None and bpe_config(tokenizer) is not None:
        raise ConfigError(
            "initialize_from_hf: the weights belong to an existing tokenizer, but data.tokenizer trains a new one. Set"
            " data.tokenizer to the folder of the weights"
        )


def upload_repository(config: RunConfig) -> str | None:
    """The repository that `hf_upload` names; None if nothing is pushed."""
    return run_id_of(config) if config.hf_upload is True else config.hf_upload or None


def initial_model(config: RunConfig) -> ModelConfig:
    """The config of the model before the first phase's surgeries, unchecked."""
    return config.model


def saved_models(config: RunConfig, vocab_size: int, precision: Precision) -> StateBuilder:
    """Makes the builder of the models of a run with this configuration."""
    return StateBuilder(config.model, vocab_axis(vocab_size), config.trainer.seed, precision, plan_phases(config)[0])


def plan_phases(config: RunConfig) -> tuple[tuple[Phase, ...], tuple[DataConfig, ...]]:
    """The phases and the data section of each. Without a `phases` section, the top level defines a single phase."""
    written = config.phases or [PhaseConfig(name="train")]
    names = [phase.name for phase in written]
    if len(set(names)) != len(names):
        raise ConfigError(f"phases: names must be unique, but {', '.join(names)} given")
    phases: list[Phase] = []
    averaging, model = config.trainer.model_averaging, config.model
    for index, phase in enumerate(written):
        if not phase.name.replace("_", "").replace(".", "").isalnum():
            raise ConfigError(
                f"phases.{index}.name: '{phase.name}' given, but only letters, digits, '_' and '.' are allowed"
            )
        if CheckpointName.parse(f"step-0-{phase.name}") is None:
            raise ConfigError(
                f"phases.{index}.name: '{phase.name}' given, but its ending is reserved for incomplete checkpoints. Choose"
                " another name"
            )
        start = phases[-1].end if phases else 0
        steps = config.trainer.num_train_steps if phase.num_train_steps is None else phase.num_train_steps
        optimizer = phase.optimizer or config.optimizer
        objective = phase.objective or config.objective
        continues_schedule = phase.carry_optimizer and _check_carries(optimizer, objective, phases, index)
        phase = objective.prepare(replace(phase, data=phase.data or config.data, optimizer=optimizer))
        surgeries = phase.surgery
        for surgery in surgeries:
            if (changed := surgery.changed(model)) != model:
                changed.check()
            model = changed
        pacing = objective.facts.pacing
        if pacing is not None and optimizer.facts.nowcast_window is not None:
            raise ConfigError(
                f"phase '{phase.name}': optimizer.nowcast: given, but objective.type: {choice_name(type(objective))} slows"
                " down or stops single layers, whose weights the trend would not follow. Remove nowcast from the optimizer"
                " and from the controllers of this phase"
            )
        scheduled = None if pacing is None else pacing.scheduled_steps(steps, model)
        phases.append(
            Phase(
                index=index,
                name=phase.name,
                model=model,
                surgeries=tuple(surgeries),
                trainable=tuple(phase.trainable),
                objective=objective,
                optimizer=optimizer,
                start=start,
                end=start + steps,
                averages={} if averaging is None else {"ema": averaging},
                controllers=phase_controllers(config, phase, index),
                carries_optimizer=phase.carry_optimizer,
                schedule_start=phases[-1].first_scheduled if continues_schedule else None,
                scheduled_steps=scheduled,
            )
        )
    if phases[-1].end > LARGEST_INT:
        preset = "" if config.preset is None else f", or keys of preset.type: {choice_name(type(config.preset))}"
        raise ConfigError(
            f"num_train_steps: {phases[-1].end} given in all {len(phases)} phases together, at most {LARGEST_INT} expected."
            f" Change phases.N.num_train_steps{preset}"
        )
    phases = _with_shared_schedules(phases)
    data = tuple(phase.data or config.data for phase in written)
    for index, section in enumerate(data):
        for key in ("tokenizer", "vocab_size", "added_tokens"):
            if (value := getattr(section, key)) != (first := getattr(data[0], key)):
                raise ConfigError(
                    f"phases.{index}.data.{key}: {encode(value)} given, but all phases must use the same tokenizer, and the"
                    f" first phase has {encode(first)}"
                )
    return tuple(phases), data


def all_sources(phases: Sequence[Phase], sections: Sequence[DataConfig]) -> list[tuple[NamedSource, int]]:
    """The sources of all phases, each once, with the length of the phase's sequences."""
    pairs = zip(phases, sections, strict=True)
    return list(
        {
            source.folder: (source, phase.model.seq_len) for phase, data in pairs for source in data.corpus.sources
        }.values()
    )


def _check_carries(
    optimizer: OptimizerConfig, objective: ObjectiveConfig, earlier: Sequence[Phase], index: int
) -> bool:
    """Tells whether the schedule of the phase before goes on. Raises `ConfigError` if its optimizer's state cannot."""
    key = f"phases.{index}.carry_optimizer"
    if not earlier:
        raise ConfigError(f"{key}: true given, but no phase is before the first one. Remove it")
    before = earlier[-1].optimizer
    if type(before) is not type(optimizer):
        raise ConfigError(
            f"{key}: true given, but the optimizer is {choice_name(type(optimizer))}, and that of phase"
            f" '{earlier[-1].name}' is {choice_name(type(before))}. Use the same type, or remove the key"
        )
    formats = [[encode(one.state) for one in (whole, *whole.groups)] for whole in (optimizer, before)]
    for number, (given, other) in enumerate(zip(*formats, strict=False)):
        if given != other:
            path = "optimizer.state" if number == 0 else f"optimizer.groups.{number - 1}.state"
            raise ConfigError(
                f"{key}: true given, but {path} is {given}, and in phase '{earlier[-1].name}' it is {other}. Moments are not"
                " converted: use the same state, or remove the key"
            )
    for one in (objective, earlier[-1].objective):
        if (pacing := one.facts.pacing) is not None and pacing.restarts_optimizer:
            raise ConfigError(
                f"{key}: true given, but objective {choice_name(type(one))} starts the optimizer and its schedule anew within"
                " the phase. Remove the key"
            )
    return before == optimizer


def _with_shared_schedules(phases: Sequence[Phase]) -> list[Phase]:
    """The phases, with schedules that span all phases that share them."""
    ends = {phase.first_scheduled: phase.end for phase in phases}
    shared = {phase.schedule_start for phase in phases}
    return [
        replace(phase, scheduled_steps=ends[start] - start) if (start := phase.first_scheduled) in shared else phase
        for phase in phases
    ]
