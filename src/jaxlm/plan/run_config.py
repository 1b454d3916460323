"""The configuration of a run, as frozen dataclasses."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from jaxlm.controllers.base import ControllerConfig
from jaxlm.controllers.early_stopping import UntilConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveInt, Seed
from jaxlm.core.rules import Rules, excludes, only
from jaxlm.data.config import DataConfig
from jaxlm.data.tokens import TokensConfig
from jaxlm.evals.base import EvalConfig
from jaxlm.evals.loss import LossEvalConfig
from jaxlm.evals.tables import TableConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import ModelConfig
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.objectives.next_token import NextToken
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.plan.batches import ANOTHER_SIZE, BatchConfig
from jaxlm.plan.presets.base import PresetConfig
from jaxlm.plan.refs.base import RefConfig
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.reading.decode import encode
from jaxlm.reading.effects import Effect, field, follows
from jaxlm.surgery.base import SurgeryConfig


@dataclass(frozen=True)
class PhaseConfig:
    """One phase of a run. It inherits each missing section and key from the top level.

    Attributes:
        name: letters, digits, `_` and `.`. Names the checkpoint that is saved when the phase starts.
        num_train_steps: length of the phase in steps; null uses `trainer.num_train_steps`.
        train_batch_size: sequences per step over all devices; null uses `trainer.train_batch_size`. With longer sequences,
            give as many fewer, so that a step keeps its number of tokens.
        per_device_parallelism: sequences per device in one microbatch, and in evaluations; null uses the keys of `trainer`.
        until: end the phase earlier, depending on its evaluations; null uses `trainer.until`.
        controllers: controllers of the phase; null uses `trainer.controllers`, and `[]` uses none.
        surgery: model changes to apply when the phase starts, in order.
        trainable: regular expressions matched against parameter paths. Parameters that match none are frozen. `new_stack`
            stands for the layers that the surgery `grow` has added last.
        data: training data of the phase.
        objective: loss of the phase.
        optimizer: optimizer of the phase. Its state is reset at the start of each phase, and its schedule spans the
            phase, unless `carry_optimizer` is set.
        carry_optimizer: keep the optimizer state of the parameters that the phase before trained too; that of new ones starts
            at zero. If the optimizer has the same keys as in the phase before, its schedule goes on too, and spans both
            phases: two phases that differ in their data train like one. Otherwise the schedule starts anew.
    """

    name: str
    num_train_steps: PositiveInt | None = field(None, on_resume="length")
    train_batch_size: PositiveInt | None = field(None, on_resume=ANOTHER_SIZE)
    per_device_parallelism: PositiveInt | None = field(None, on_resume="rounding")
    until: UntilConfig | None = field(None, on_resume="stopping")
    controllers: list[ControllerConfig] | None = field(None, on_resume="controllers")
    surgery: list[SurgeryConfig] = field(default_factory=list)
    trainable: list[str] = field(default_factory=lambda: [".*"])
    data: DataConfig | None = field(None, on_resume="content")
    objective: ObjectiveConfig | None = field(None, on_resume="loss")
    optimizer: OptimizerConfig | None = field(None, on_resume="updates")
    carry_optimizer: bool = field(False, on_resume="updates")

    def batch_keys(self, trainer: TrainerConfig) -> TrainerConfig:
        """The section `trainer` with the batch keys of the phase."""
        if self.train_batch_size is not None:
            trainer = replace(trainer, train_batch_size=self.train_batch_size)
        if self.per_device_parallelism is not None:
            own = {"per_device_parallelism": self.per_device_parallelism, "per_device_train_parallelism": -1}
            trainer = replace(trainer, **own, max_per_device_parallelism=None)
        return trainer


@dataclass(frozen=True)
class RunConfig:
    """The top level of a run's configuration.

    Attributes:
        data: training and validation data; `type:` says what an example is.
        model: model architecture; `type:` selects the family.
        trainer: run length, batch size, devices, checkpoints and logging.
        optimizer: optimizer and learning-rate schedule; `type:` selects the family.
        objective: loss to minimize; `type:` selects the family.
        refs: models beside the one that trains, by name, such as the teacher of the objective `distill`: `{teacher: {type:
            hf, path: ...}}`.
        evals: evaluations to run every `trainer.steps_per_eval` steps.
        tables: tables and pictures of the trained model beside the models in `refs`: `type:` selects what to measure. They
            are written to the folder `tables` of the run's log folder after the last phase, and by `jaxlm tables`.
        phases: training phases, run in order, each with its own surgery, trainable parameters, data, objective or
            optimizer. If empty, the top level is the only phase.
        preset: fill in keys of other sections, such as all sizes and rates from a depth; `type:` selects the preset. Keys
            that you write win. Null fills in nothing.
        data_seed: random seed of the order of the training data alone; null uses `trainer.seed`.
        epoch: number of passes over each phase's training data, instead of `num_train_steps`; 0 trains for
            `num_train_steps`.
        initialize_from_hf: load initial weights in Hugging Face format. A string is a folder with config.json and
            safetensors files, or a Hub `name` or `name@revision`; true uses the folder in data.tokenizer; false
            initializes randomly.
        hf_weight_names: rename tensors when initialize_from_hf points to weights from another program (.safetensors,
            .pt, .pth, .bin). Maps a regular expression on that program's tensor names to the Hugging Face name (`\\1` for
            groups). Tensors that match no expression are skipped.
        hf_skip_keys: keys of config.json in initialize_from_hf to read as if they were not there, for keys that jaxlm
            refuses. The model may then compute other numbers than its authors'.
        use_hf_model_config: take the model section from the config.json in initialize_from_hf; keys written here
            override it.
        hf_save_path: folder or URL (`gs://bucket/exports`) for Hugging Face checkpoints, saved as `step-N`; null saves none.
            Each run needs its own: a run that starts refuses one with another run's exports of its steps.
        hf_save_steps: steps between Hugging Face checkpoints. One more is saved after the last step.
        hf_save_dtype: dtype of the saved weights: float32, bfloat16, float16, or source for the one that each tensor has in
            initialize_from_hf; null keeps the training dtype.
        hf_save_parts: what the saved folders have of initialize_from_hf. `all` copies what is not trained, such as the vision
            tower of a multimodal model, and keeps the form of that folder; `text` writes the text model alone.
        hf_stored_format: how the saved folders have the weights that initialize_from_hf has as codes and scales (fp8, MXFP4).
            `decode` writes what they stand for; `keep` copies codes and scales, none of which may be trained.
        hf_upload: also push the folders in `hf_save_path` to this repository on the Hugging Face Hub (`owner/name`), one
            commit each; true names it after `trainer.id`, in your own account; null or false pushes nothing. A push that
            fails does not end the run.
        dry_run: resolve, trace and compile the run, print the plan and the memory use, plot the learning rate into the
            log folder, then exit.
    """

    data: DataConfig = field(default_factory=TokensConfig, on_resume="content")
    model: ModelConfig = field(default_factory=LlamaConfig, on_resume="refused")
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig, on_resume="updates")
    objective: ObjectiveConfig = field(default_factory=NextToken, on_resume="loss")
    refs: dict[str, RefConfig] = field(default_factory=dict, on_resume="content")
    evals: list[EvalConfig] = field(default_factory=lambda: [LossEvalConfig()], on_resume="evaluations")
    tables: list[TableConfig] = field(default_factory=list, on_resume="harmless")
    phases: list[PhaseConfig] = field(
        default_factory=list, on_resume=follows("the phases from the current one on differ")
    )
    preset: PresetConfig | None = field(None, on_resume=Effect("harmless", "what it fills in is compared itself"))
    data_seed: Seed | None = field(None, on_resume="order")
    epoch: NonNegativeInt = field(0, on_resume="length")
    initialize_from_hf: bool | str = field(False, on_resume="at_start")
    hf_weight_names: dict[str, str] = field(default_factory=dict, on_resume="at_start")
    hf_skip_keys: list[str] = field(default_factory=list, on_resume="at_start")
    use_hf_model_config: bool = field(False, on_resume="at_start")
    hf_save_path: str | None = field(None, on_resume="harmless")
    hf_save_steps: PositiveInt = field(10_000, on_resume="harmless")
    hf_save_dtype: str | None = field(None, on_resume="harmless")
    hf_save_parts: Literal["all", "text"] = field("all", on_resume="harmless")
    hf_stored_format: Literal["decode", "keep"] = field("decode", on_resume="harmless")
    hf_upload: bool | str | None = field(None, on_resume="harmless")
    dry_run: bool = field(False, on_resume="harmless")

    key_rules: ClassVar[Rules] = (
        excludes("initialize_from_hf", "trainer.initialize_from", why="and both set the initial weights"),
        only("hf_stored_format", when="hf_save_parts", is_="all", why="whose names and keys it keeps"),
    )

    @property
    def order_seed(self) -> int:
        """Random seed of the order of the training data."""
        return self.trainer.seed if self.data_seed is None else self.data_seed

    def batches_of_phases(self) -> dict[int, BatchConfig]:
        """The batch keys of the phases that have their own, by number. Raises `ConfigError` if one of `trainer` has no
        effect."""
        for key in ("train_batch_size", "per_device_parallelism"):
            own, given = [getattr(phase, key) for phase in self.phases], getattr(self.trainer, key)
            if self.phases and None not in own and given != getattr(TrainerConfig, key):
                raise ConfigError(
                    f"trainer.{key}: {encode(given)} given, but it has no effect, because every phase has its own"
                    f" ({', '.join(map(str, own))}). Remove it"
                )
        keys = enumerate(phase.batch_keys(self.trainer) for phase in self.phases)
        return {number: own for number, own in keys if own != self.trainer}
