"""The configuration of a run: what the YAML says, as frozen dataclasses."""

from dataclasses import dataclass, field

from jaxlm.config.trainer import TrainerConfig
from jaxlm.data.config import DataConfig
from jaxlm.evals.base import EvalConfig
from jaxlm.evals.loss import LossEvalConfig
from jaxlm.models.base import ModelConfig
from jaxlm.models.families.llama import LlamaConfig
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.objectives.next_token import NextToken
from jaxlm.optim.adam import AdamConfig
from jaxlm.optim.base import OptimizerConfig
from jaxlm.surgery.base import SurgeryConfig


@dataclass(frozen=True)
class PhaseConfig:
    """One phase. What it leaves out, it takes from the top level, section by section and key by key.

    Attributes:
        name: letters, digits, `_` and `.`; names its entry checkpoint.
        num_train_steps: its steps; null takes `trainer.num_train_steps`.
        surgery: changes of the model on entry, in order.
        trainable: regular expressions on parameter paths; what none of them matches is frozen.
        data: what it trains on.
        objective: what it minimises.
        optimizer: how; its state starts afresh in every phase, and its schedule spans the phase.
    """

    name: str
    num_train_steps: int | None = None
    surgery: list[SurgeryConfig] = field(default_factory=list)
    trainable: list[str] = field(default_factory=lambda: [".*"])
    data: DataConfig | None = None
    objective: ObjectiveConfig | None = None
    optimizer: OptimizerConfig | None = None


@dataclass(frozen=True)
class RunConfig:
    """A run: the four sections of the configuration guide, and what goes beyond them.

    Attributes:
        data: what to train and validate on.
        model: the network; `type:` picks the family.
        trainer: how long, how large, where.
        optimizer: gradients into updates; `type:` picks the family.
        objective: what is minimised; `type:` picks the family.
        evals: what is looked at every `trainer.steps_per_eval` steps.
        phases: stretches of training with a surgery, a choice of what trains, data, objective or optimizer of their
            own. Without any, the top level is the one phase.
        epoch: so many passes over each phase's training data, instead of `num_train_steps`; 0 counts steps.
        initialize_from_hf: start from weights of Hugging Face: a folder with config.json and safetensors, or the hub's
            `name` or `name@revision`; true means the folder that data.tokenizer names, false random weights.
        hf_weight_names: for a file or folder of another program (.safetensors, .pt, .pth, .bin) in initialize_from_hf:
            regular expression on its names to the name at Hugging Face (`\\1` for groups); names that none matches are left
            out.
        use_hf_model_config: take the model section from that folder's config.json; keys that are written here go over it.
        hf_save_path: folders for transformers go here, as `step-N`; null writes none.
        hf_save_steps: steps between two of them; one more follows the last step.
        hf_save_dtype: of their numbers: float32, bfloat16 or float16; null means as trained.
        dry_run: resolve, trace and compile, print the plan and the memory, draw the learning rate into the log folder,
            and stop.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=LlamaConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    objective: ObjectiveConfig = field(default_factory=NextToken)
    evals: list[EvalConfig] = field(default_factory=lambda: [LossEvalConfig()])
    phases: list[PhaseConfig] = field(default_factory=list)
    epoch: int = 0
    initialize_from_hf: bool | str = False
    hf_weight_names: dict[str, str] = field(default_factory=dict)
    use_hf_model_config: bool = False
    hf_save_path: str | None = None
    hf_save_steps: int = 10_000
    hf_save_dtype: str | None = None
    dry_run: bool = False
