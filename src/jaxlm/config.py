"""The configuration of a run: what the YAML says, as frozen dataclasses."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from jaxlm.core.batch_schedule import BatchSize
from jaxlm.core.cli import help_text, option_tree, override, parse_arguments
from jaxlm.core.decode import decode, drop_stale_keys
from jaxlm.core.distributed import DistributedConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import MeshConfig
from jaxlm.core.plugins import load_installed_plugins
from jaxlm.core.yaml_source import Source, load_yaml, merge
from jaxlm.data.config import DataConfig
from jaxlm.data.ray_cluster import RayConfig
from jaxlm.engine.profiler import ProfilerConfig
from jaxlm.engine.save_policy import CheckpointerConfig
from jaxlm.engine.trackers import TrackerConfig
from jaxlm.engine.watch import WatchConfig
from jaxlm.evals.base import EvalConfig
from jaxlm.evals.loss import LossEvalConfig
from jaxlm.interop.levanter import from_levanter
from jaxlm.interop.model_section import with_hf_model
from jaxlm.interop.peft_section import with_peft_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.llama import LlamaConfig
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.objectives.next_token import NextToken
from jaxlm.optim.adam import AdamConfig
from jaxlm.optim.averaging import AveragingConfig
from jaxlm.optim.base import OptimizerConfig
from jaxlm.surgery.base import SurgeryConfig


@dataclass(frozen=True)
class TrainerConfig:
    """How long, how large, where.

    Attributes:
        id: the run's name, under which logs and checkpoints are kept; where it is null, the environment's RUN_ID, a
            tracker's `id`, or the config file's stem.
        seed: of parameters, shuffling and dropout.
        num_train_steps: optimizer steps of a phase that does not say otherwise.
        train_batch_size: sequences a step, over all devices; -1 means `per_device_parallelism` on each device that
            shares the batch. Or sizes that change with the run's steps: `[{start: 0, value: 32}, {start: 1000, value: 64}]`.
        per_device_parallelism: sequences a device works on at once; -1 means all of its share. Less than its share
            accumulates gradients over several micro-batches.
        per_device_train_parallelism: another name of `per_device_parallelism`.
        allow_nondivisible_batch_size: fill up a batch that does not divide with empty sequences, which count nothing.
        per_device_eval_parallelism: the same for evaluation; -1 means as in training.
        steps_per_eval: steps between two evaluations; one more follows the last step.
        max_eval_batches: evaluate on so many batches of each source at the most; null means all.
        mp: dtypes, as `f32` or `p=f32,c=bfloat16` (parameters, computation); `c=float16` scales the loss by itself.
        log_dir: logs go to `<log_dir>/<id>/`.
        compilation_cache_dir: compiled programs are kept here for the next start; null keeps none.
        strict_performance: refuse to run where something falls back to a slower form than the platform has. What is
            asked for by its name (`model.attn_backend: plain`) is no fallback.
        batch_axis: the logical axis that is spread over replica and data.
        fsdp_axis: logical axes whose parameters rest spread over data; null means none.
        tensor_parallel_axes: logical axes that are spread over model; `heads` takes `kv_heads` along where they divide.
        model_axis_size: devices that share each layer's computation.
        replica_ici_axis_size: groups of devices that hold all parameters each.
        replica_dcn_axis_size: the same across TPU slices or, where there are none, across processes.
        axis_resources: further entries of both axis mappings: logical axis to mesh axis (replica, data, model).
        parameter_axis_resources: further entries of the parameter mapping.
        compute_axis_resources: further entries of the compute mapping; they win.
        mesh: a mesh of one's own axes instead of the three sizes, and mappings onto them; the other axis keys still hold.
        load_checkpoint: go on from a checkpoint: true insists on one, false refuses to begin where one is, null takes
            what is there.
        load_checkpoint_path: another run's checkpoint to go on from, or a folder of them or of runs, or a URL of these; the
            one with the most steps counts. The run's own checkpoints come first.
        initialize_from: the same, for the model's weights alone: steps, optimizer and data begin anew.
        initialize_from_state: the same, for all of it: as `load_checkpoint_path`, but there must be one.
        allow_partial_checkpoint: let what a checkpoint lacks begin anew, and leave out what only it has; both are listed.
        require_accelerator: refuse to train on CPUs.
        crash_on_nan: stop at a loss or gradient that is not a number, instead of leaving its update out.
        crash_on_inf: the same for one that is infinite.
        shutdown_at_exit: only false: turning machines off is left to what starts the run.
        jax_config: options of jax itself, as `jax_default_matmul_precision: highest`.
        log_jaxprs: write each phase's step as jax traced it to `<log_dir>/<id>/artifacts/`.
        log_xla_hlo: write each phase's step as XLA compiled it to the same place.
        model_averaging: keep an average of the weights and evaluate it beside them, as `eval/ema/...`; null keeps none.
        checkpointer: where and when checkpoints are saved.
        tracker: further places for the numbers beside `metrics.jsonl`: one, or a list. Without a `type` it is `wandb`.
        watch: log norms and histograms of gradients, parameters, updates; null looks at nothing.
        profiler: record a profile of some steps below the log folder; null records none.
        distributed: how several processes find each other.
        ray: tokenize on a Ray cluster (`{}` starts one); null tokenizes in process 0, on all of its machine's cores.
    """

    id: str | None = None
    seed: int = 0
    num_train_steps: int = 400_000
    train_batch_size: int | list[BatchSize] = 32
    per_device_parallelism: int = -1
    per_device_train_parallelism: int = -1
    allow_nondivisible_batch_size: bool = False
    per_device_eval_parallelism: int = -1
    steps_per_eval: int = 1000
    max_eval_batches: int | None = None
    mp: str = "f32"
    log_dir: str = "logs/"
    compilation_cache_dir: str | None = "cache/xla"
    strict_performance: bool = False
    batch_axis: str | None = "batch"
    fsdp_axis: str | list[str] | None = "embed"
    tensor_parallel_axes: str | list[str] | None = None
    model_axis_size: int = 1
    replica_ici_axis_size: int = 1
    replica_dcn_axis_size: int = 1
    axis_resources: dict[str, str | list[str]] = field(default_factory=dict)
    parameter_axis_resources: dict[str, str | list[str]] = field(default_factory=dict)
    compute_axis_resources: dict[str, str | list[str]] = field(default_factory=dict)
    mesh: MeshConfig | None = None
    load_checkpoint: bool | None = None
    load_checkpoint_path: str | None = None
    initialize_from: str | None = None
    initialize_from_state: str | None = None
    allow_partial_checkpoint: bool = False
    require_accelerator: bool | None = None
    crash_on_nan: bool = False
    crash_on_inf: bool = False
    shutdown_at_exit: bool | float = False
    jax_config: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    log_jaxprs: bool = False
    log_xla_hlo: bool = False
    model_averaging: AveragingConfig | None = None
    checkpointer: CheckpointerConfig = field(default_factory=CheckpointerConfig)
    tracker: TrackerConfig | list[TrackerConfig] = field(default_factory=list)
    watch: WatchConfig | None = None
    profiler: ProfilerConfig | None = None
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    ray: RayConfig | None = None

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be, whatever the model and the devices are."""
        self.checkpointer.check()
        if self.profiler is not None:
            self.profiler.check()
        if self.watch is not None:
            self.watch.check()
        if self.steps_per_eval < 1:
            raise ConfigError(f"trainer.steps_per_eval: {self.steps_per_eval} given, 1 or more steps expected")
        if self.max_eval_batches is not None and self.max_eval_batches < 1:
            raise ConfigError(f"trainer.max_eval_batches: {self.max_eval_batches} given, null or 1 and more expected")
        if self.shutdown_at_exit:
            raise ConfigError(
                "trainer.shutdown_at_exit: a run does not turn machines off. Let what starts it do so, by its exit code:"
                " python -m jaxlm.train ...; sudo shutdown"
            )

    @property
    def parallelism(self) -> int:
        """Sequences that a device trains on at once, under either name.

        Raises:
            ConfigError: both are given, and differ.
        """
        given = {self.per_device_parallelism, self.per_device_train_parallelism} - {-1}
        if len(given) > 1:
            raise ConfigError(
                f"trainer.per_device_parallelism: {self.per_device_parallelism} given, and per_device_train_parallelism:"
                f" {self.per_device_train_parallelism}. They mean the same; leave one out"
            )
        return given.pop() if given else -1

    @property
    def trackers(self) -> list[TrackerConfig]:
        """All of `tracker`, which may be one."""
        return self.tracker if isinstance(self.tracker, list) else [self.tracker]


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


R = TypeVar("R", bound=RunConfig)


def as_run_config(config: RunConfig) -> RunConfig:
    """Without the keys that a program of one's own added: what every command can read again."""
    return RunConfig(**{item.name: getattr(config, item.name) for item in fields(RunConfig)})


def load_config(arguments: Sequence[str], command: str, kind: type[R] = RunConfig) -> R:
    """Reads a command line: the file that it names, and what it overrides.

    Args:
        command: for the help text, as in `python -m command`.
        kind: `RunConfig`, or a dataclass that extends it by keys of its own program.

    Raises:
        ConfigError: the first mistake in either.
        SystemExit: `--help` was asked for, and printed.
    """
    load_installed_plugins()
    parsed = parse_arguments(arguments)
    if parsed.help:
        print(help_text(kind, command))
        raise SystemExit(0)
    if parsed.config_path is None and not parsed.options:
        raise ConfigError(
            "no configuration is given. --config_path run.yaml reads a file (config/quickstart.yaml trains on text that"
            " every Python has), --section.key value sets one key, and --help lists all keys"
        )
    source = Source({}) if parsed.config_path is None else load_yaml(parsed.config_path)
    dropped = drop_stale_keys(kind, source.tree, option_tree(parsed.options))
    if dropped:
        print(f"note: the command line changes a type; of the file's keys, these do not apply: {', '.join(dropped)}")
    source, notes = from_levanter(override(source, parsed.options))
    for note in notes:
        print(f"note: {note}")
    stem = None if parsed.config_path is None else Path(parsed.config_path).stem
    return decode_run(source, stem, kind)


def refuse_dry_run(config: RunConfig, because: str) -> None:
    """Raises `ConfigError` where a command that is no training is to be a dry run. Args: because: what it does."""
    if config.dry_run:
        raise ConfigError(
            f"dry_run: true has no effect here: {because}. Leave it out; `python -m jaxlm.train --dry_run true` shows the"
            " plan and the memory"
        )


def read_config(path: Path) -> RunConfig:
    """The configuration in a file, without a command line."""
    return decode_run(from_levanter(load_yaml(path))[0], path.stem)


def decode_run(source: Source, name: str | None, kind: type[R] = RunConfig) -> R:
    """A run from a tree: phases take what they leave out from the top level, and the run its id where it has none: from
    the environment's RUN_ID, a tracker's `id`, or `name`."""
    load_installed_plugins()
    tree = with_hf_model(_with_inherited(source.tree))
    config = decode(kind, Source(tree, source.marks))
    filled = with_peft_keys(tree, config.model)
    if filled is not tree:
        config = decode(kind, Source(filled, source.marks))
    name = _name_elsewhere(config) or name
    if config.trainer.id is None and name is not None:
        config = replace(config, trainer=replace(config.trainer, id=name))
    return config


def _name_elsewhere(config: RunConfig) -> str | None:
    """A run's name from the environment, or from the first tracker that gives it one."""
    given = (getattr(tracker, "id", None) for tracker in config.trainer.trackers)
    return os.environ.get("RUN_ID") or next((name for name in given if name), None)


def _with_inherited(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with every phase's sections laid over the run's own."""
    phases = tree.get("phases")
    if not isinstance(phases, list):
        return dict(tree)
    return {**tree, "phases": [_phase_with_inherited(tree, p) if isinstance(p, dict) else p for p in phases]}


def _phase_with_inherited(tree: Mapping[str, Any], phase: Mapping[str, Any]) -> dict[str, Any]:
    full = dict(phase)
    for section in ("data", "objective", "optimizer"):
        own, shared = phase.get(section), tree.get(section, {})
        if isinstance(own, dict) and isinstance(shared, dict):
            # Another type shares no keys that could be meant.
            same_type = own.get("type", shared.get("type")) == shared.get("type")
            full[section] = merge(shared, own) if same_type else own
    return full


def run_id_of(config: RunConfig) -> str:
    """The run's name: `trainer.id`, which `decode_run` has filled in, or `run`."""
    name = config.trainer.id or "run"
    if "/" in name or name in (".", ".."):
        raise ConfigError(f"trainer.id: '{name}' cannot name a folder")
    return name
