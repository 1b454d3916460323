"""Everything about a run that can be known before its data is opened: computed once, checked, and shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlm.core.imports import gc_paused

import jax

from jaxlm.config.run import PhaseConfig, RunConfig
from jaxlm.core import tree
from jaxlm.core.axes import BATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import MeshShape
from jaxlm.core.precision import Precision, parse_precision
from jaxlm.core.sharding import Layout
from jaxlm.data.config import TRAIN_BPE, DataConfig
from jaxlm.engine.checkpoint.manifest import CheckpointName
from jaxlm.engine.checkpoint.resolve import resolve_folder
from jaxlm.engine.checkpoint.store import CheckpointFolder
from jaxlm.engine.phases import Phase, StateBuilder
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.folder import parse_dtype
from jaxlm.interop.hf.model_section import hf_name
from jaxlm.models.base import vocab_axis
from jaxlm.run.batch_plan import BatchPlan, plan_batches, unreached_stages
from jaxlm.run.mesh_plan import plan_mesh


@dataclass(frozen=True)
class Plan:
    """A run, worked out.

    Attributes:
        config: what was asked for.
        run_id: the run's name.
        mesh: sizes of the mesh axes.
        layout: devices and axis mappings.
        warnings: what the configuration wastes or overrides.
        recipe: the model, its precision and the phases.
        data: of each phase.
        batches: how large they are, and how they are divided.
    """

    config: RunConfig
    run_id: str
    mesh: MeshShape
    layout: Layout
    warnings: tuple[str, ...]
    state_builder: StateBuilder
    data: tuple[DataConfig, ...]
    batches: BatchPlan

    @property
    def precision(self) -> Precision:
        """The dtypes of the run."""
        return self.state_builder.precision

    @property
    def phases(self) -> tuple[Phase, ...]:
        """In order."""
        return tuple(self.state_builder.phases)

    @property
    def num_steps(self) -> int:
        """Of all phases together."""
        return self.phases[-1].end

    @property
    def tokens_per_step(self) -> int:
        """Positions that a step with the largest batch trains on, padding included."""
        return self.batches.train.largest.size * self.config.model.seq_len

    @property
    def log_folder(self) -> Path:
        """Logs, metrics and pictures of the run."""
        return Path(self.config.trainer.log_dir) / self.run_id

    @property
    def checkpoints(self) -> CheckpointFolder:
        """Where those of the run lie."""
        policy = self.config.trainer.checkpointer
        return resolve_folder(
            policy.base_path,
            self.run_id if policy.append_run_id_to_base_path else None,
            Path(policy.staging_dir),
            delete_temporary=policy.delete_old_temp_checkpoints,
        )

    def knowing(self, config: RunConfig, vocab_size: int) -> "Plan":
        """The plan for what the data has shown: this one where nothing is otherwise than was assumed.

        Raises:
            ConfigError: see `make_plan`.
        """
        if config == self.config and vocab_size == self.state_builder.Vocab.size:
            return self
        return make_plan(config, self.run_id, vocab_size)


@gc_paused()
def make_plan(config: RunConfig, run_id: str, vocab_size: int, devices: Sequence[Any] | None = None) -> Plan:
    """Works a configuration out for the devices that are there.

    Args:
        devices: others instead of those, which need not be there: descriptions to compile for.

    Raises:
        ConfigError: anything that could not be trained as asked: sizes that do not divide, axes that do not exist, ...
    """
    trainer = config.trainer
    config.model.check()
    trainer.check()
    precision = parse_precision(trainer.mp)
    devices = jax.devices() if devices is None else devices
    Vocab = vocab_axis(vocab_size)
    phases, data = plan_phases(config)
    state_builder = StateBuilder(config.model, Vocab, trainer.seed, precision, phases)
    arrays = {p: leaf.axes for p, leaf in tree.leaves(state_builder.abstract_initial_model) if tree.is_named(leaf)}
    sizes = {axis.name: axis.size for axes in arrays.values() for axis in axes}
    names = {path: [axis.name for axis in axes] for path, axes in arrays.items()}
    mesh_plan = plan_mesh(trainer, sizes, names, devices)
    check_hugging_face(config, data[0].tokenizer)
    plan = Plan(
        config=config,
        run_id=run_id,
        mesh=mesh_plan.shape,
        layout=mesh_plan.layout,
        warnings=(*mesh_plan.warnings, *unreached_stages(trainer, phases[-1].end)),
        state_builder=state_builder,
        data=data,
        batches=plan_batches(trainer, mesh_plan.layout.num_shards(BATCH)),
    )
    for phase in phases:
        plan.state_builder.abstract_state(
            phase
        )  # surgeries that do not apply and patterns that match nothing fail here
    return plan


def check_hugging_face(config: RunConfig, tokenizer: str) -> None:
    """Raises `ConfigError` for keys about imported and exported weights that cannot be followed."""
    if config.hf_save_steps < 1:
        raise ConfigError(f"hf_save_steps: {config.hf_save_steps} given, 1 or more expected")
    if config.hf_save_dtype is not None:
        parse_dtype(config.hf_save_dtype, "hf_save_dtype")
    if config.hf_save_path is not None:
        family_of_config(config.model)
    name = hf_name(config.initialize_from_hf, tokenizer)
    if name is None and config.hf_weight_names:
        raise ConfigError("hf_weight_names: given, but initialize_from_hf names no weights. Leave it out, or name some")
    if name is not None and tokenizer == TRAIN_BPE:
        raise ConfigError(
            "initialize_from_hf: the weights go with a tokenizer, and data.tokenizer would train another one. Set it to"
            " the folder of the weights"
        )


def plan_phases(config: RunConfig) -> tuple[tuple[Phase, ...], tuple[DataConfig, ...]]:
    """The phases and the data of each; the top level is the one phase where none are written out."""
    written = config.phases or [PhaseConfig(name="train")]
    names = [phase.name for phase in written]
    if len(set(names)) != len(names):
        raise ConfigError(f"phases: names must differ, given {', '.join(names)}")
    phases: list[Phase] = []
    averaging = config.trainer.model_averaging
    for index, phase in enumerate(written):
        if not phase.name.replace("_", "").replace(".", "").isalnum():
            raise ConfigError(f"phases.{index}.name: '{phase.name}' given; letters, digits, '_' and '.' are allowed")
        if CheckpointName.parse(f"step-0-{phase.name}") is None:
            raise ConfigError(
                f"phases.{index}.name: '{phase.name}' given, which ends as the names of checkpoints do that are not whole."
                " Choose another"
            )
        start = phases[-1].end if phases else 0
        steps = config.trainer.num_train_steps if phase.num_train_steps is None else phase.num_train_steps
        if steps < 1:
            where = "trainer" if phase.num_train_steps is None else f"phases.{index}"
            raise ConfigError(f"{where}.num_train_steps: {steps} given, 1 or more expected")
        phases.append(
            Phase(
                index=index,
                name=phase.name,
                surgeries=tuple(phase.surgery),
                trainable=tuple(phase.trainable),
                objective=phase.objective or config.objective,
                optimizer=phase.optimizer or config.optimizer,
                start=start,
                end=start + steps,
                averages={} if averaging is None else {"ema": averaging},
            )
        )
    data = tuple(phase.data or config.data for phase in written)
    for index, section in enumerate(data):
        if section.tokenizer != data[0].tokenizer or section.vocab_size != data[0].vocab_size:
            raise ConfigError(
                f"phases.{index}.data.tokenizer: {section.tokenizer} given, but a run has one tokenizer and the first"
                f" phase says {data[0].tokenizer}"
            )
    return tuple(phases), data
