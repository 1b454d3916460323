"""The `trainer` section: run length, batch size, devices, checkpoints and logging."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxlm.controllers.base import ControllerConfig
from jaxlm.controllers.early_stopping import UntilConfig
from jaxlm.core.devices import HOST_MEMORY
from jaxlm.core.distributed import DistributedConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt, Seed
from jaxlm.core.precision import PrecisionConfig
from jaxlm.core.rules import Rules, excludes
from jaxlm.data.cache.ray_workers import RayConfig
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.watch import WatchConfig
from jaxlm.engine.watchdog import WatchdogConfig
from jaxlm.observe.callbacks import CallbackConfig
from jaxlm.observe.completions import CompletionsConfig
from jaxlm.observe.console import duration
from jaxlm.observe.profiler import ProfilerConfig
from jaxlm.observe.trackers import TrackerConfig
from jaxlm.optim.averaging import AveragingConfig
from jaxlm.plan.batches import BatchConfig
from jaxlm.plan.mesh import ShardingConfig
from jaxlm.reading.effects import ANOTHER_ORDER, field, follows


@dataclass(frozen=True)
class LengthConfig:
    """The keys of `trainer` for a run's name and length, and when it is evaluated.

    Attributes:
        id: name of the run; logs and checkpoints are saved under it. Null uses the environment variable RUN_ID, then a
            tracker's `id`, then the name of the config file without its suffix.
        seed: random seed for parameter initialization, shuffling (unless `data_seed` is set) and dropout.
        num_train_steps: optimizer steps per phase, unless the phase sets its own. If all phases do, only their sum is
            accepted.
        until: end each phase earlier, depending on its evaluations, unless the phase sets its own; null does not.
        controllers: decide between steps, from metrics, what happens next, such as a lower learning rate on a plateau. They
            apply to each phase from its start, unless the phase sets its own.
        steps_per_eval: steps between evaluations. One more evaluation runs after the last step.
        max_eval_batches: maximum batches per source in each evaluation; null evaluates all of them.
    """

    id: str | None = field(None, on_resume="harmless")
    seed: Seed = field(0, on_resume=follows(f"dropout differs; unless data_seed is set, {ANOTHER_ORDER}"))
    num_train_steps: PositiveInt = field(400_000, on_resume="length")
    until: UntilConfig | None = field(None, on_resume="stopping")
    controllers: list[ControllerConfig] = field(default_factory=list, on_resume="controllers")
    steps_per_eval: PositiveInt = field(1000, on_resume="evaluations")
    max_eval_batches: PositiveInt | None = field(None, on_resume="evaluations")


@dataclass(frozen=True)
class StartConfig:
    """The keys of `trainer` for what a run starts from, and which checkpoints it saves.

    Attributes:
        load_checkpoint: resume from a checkpoint. True requires one, false fails if one exists, null resumes if one
            exists.
        load_checkpoint_path: where to resume from if this run has no checkpoint of its own: another run's checkpoint, a
            folder of checkpoints or of runs, or a URL of one of these. The checkpoint with the most steps is used. An
            earlier checkpoint of this run (`checkpoints/my-run/step-4000`) makes it go back there, once: the checkpoints
            after it are set aside, not deleted, and the records of the steps that follow have a new `attempt`.
        initialize_from: load only the model weights from a checkpoint, given as in `load_checkpoint_path`. Step, optimizer
            state and data position start from zero.
        initialize_from_state: the same as `load_checkpoint_path`, which comes first.
        allow_partial_checkpoint: initialize parameters that are missing from the checkpoint, and ignore parameters that
            only the checkpoint has. Both are listed.
        allow_changes: what may differ from the run's last start: `data`, `tokenizer`, `refs`. They are compared by content,
            and a difference is otherwise refused. The model may never differ.
        checkpointer: where and when to save checkpoints.
    """

    load_checkpoint: bool | None = field(None, on_resume="harmless")
    load_checkpoint_path: str | None = field(None, on_resume="harmless")
    initialize_from: str | None = field(None, on_resume="at_start")
    initialize_from_state: str | None = field(None, on_resume="at_start")
    allow_partial_checkpoint: bool = field(False, on_resume="harmless")
    allow_changes: list[Literal["data", "tokenizer", "refs"]] = field(default_factory=list, on_resume="harmless")
    checkpointer: CheckpointerConfig = field(default_factory=CheckpointerConfig, on_resume="harmless")

    key_rules: ClassVar[Rules] = (
        excludes("initialize_from", "initialize_from_state", why="the first loads only the model, the second all"),
        excludes("load_checkpoint_path", when="load_checkpoint", is_=False),
    )

    @property
    def starts(self) -> dict[str, str]:
        """Key -> path, of what a run without checkpoints of its own may start from. The first one decides."""
        paths = {
            "load_checkpoint_path": self.load_checkpoint_path,
            "initialize_from_state": self.initialize_from_state,
            "initialize_from": self.initialize_from,
        }
        return {key: path for key, path in paths.items() if path is not None}

    def describe_start(self) -> str:
        """What a run starts from, as far as these keys say."""
        own = {True: "a checkpoint (required)", False: "no checkpoint", None: "its own checkpoint, if it has one"}
        others = [f"{'model' if key == 'initialize_from' else 'state'} at {path}" for key, path in self.starts.items()]
        partial = " (missing arrays are newly initialized)" if self.allow_partial_checkpoint else ""
        return own[self.load_checkpoint] + "".join(f"; else the {it}" for it in others[:1]) + partial

    def describe_checkpoints(self) -> str:
        """When checkpoints are saved, and which stay."""
        policy = self.checkpointer
        permanent = "; ".join(f"every {r.every} steps" + (f" until {r.until}" if r.until else "") for r in policy.keep)
        retention = "temporary" if policy.delete_old_temp_checkpoints else "never deleted"
        every = duration(policy.save_interval.total_seconds())
        return f"every {every} ({retention}), permanent {permanent or 'only at the end'}"


@dataclass(frozen=True)
class FailureConfig:
    """The keys of `trainer` for when a run stops, other than at its end.

    Attributes:
        crash_on_nan: stop the run at a NaN loss, gradient or update instead of skipping that update.
        crash_on_inf: stop the run at an infinite loss, gradient or update instead of skipping that update.
        crash_after_skipped: stop the run when this many updates in a row were skipped; null never does. Dynamic loss scaling
            skips up to 15 at the start.
        watchdog: what to do when the run makes no progress.
        preemption_notices: on Google Compute Engine, save and stop as soon as the machine says that it will be preempted, or
            stopped for maintenance. SIGTERM always does.
        shutdown_at_exit: only false is supported. Shut machines down in the command that starts the run.
    """

    crash_on_nan: bool = field(False, on_resume="stopping")
    crash_on_inf: bool = field(False, on_resume="stopping")
    crash_after_skipped: PositiveInt | None = field(25, on_resume="stopping")
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig, on_resume="harmless")
    preemption_notices: bool = field(True, on_resume="harmless")
    shutdown_at_exit: bool | float = field(False, on_resume="harmless")


# The last base comes first: --help and the guide list the keys from the length of a run to its logs.
@dataclass(frozen=True)
class TrainerConfig(FailureConfig, StartConfig, ShardingConfig, BatchConfig, LengthConfig):
    """Run length, batch size, devices, checkpoints and logging. The keys of all bases are in one section.

    Attributes:
        mp: mixed-precision policy: `f32`, or dtypes of parameters and compute, as in `p=f32,c=bfloat16` (like PyTorch's
            autocast to bfloat16). `auto` is the latter where the device multiplies it faster, else the former; the start
            says which, and why. `bf16` alone also stores the parameters in bfloat16. `c=float16` turns on dynamic loss
            scaling. A section gives some parameters other dtypes:
            `{default: 'p=f32,c=bfloat16', rules: [{match: '\\.router\\.', compute: float32}]}`.
        offload_optimizer: keep the optimizer's state in the host's memory between steps. Each step copies it to the devices
            for the update, and back: the same time for one microbatch as for many.
        log_dir: logs are written to `<log_dir>/<id>/`. To a URL, they are copied with every checkpoint and at the end.
        compilation_cache_dir: folder for the persistent compilation cache; null disables it.
        strict_performance: fail if an operation falls back to a slower implementation than the platform supports.
            Implementations that you select by name (`model.attn_backend: reference`) are allowed.
        require_accelerator: true fails if only CPUs are available.
        jax_config: jax configuration options, such as `jax_default_matmul_precision: highest`.
        log_jaxprs: save the jaxpr of each phase's training step to `<log_dir>/<id>/artifacts/`.
        log_xla_hlo: save the compiled HLO of each phase's training step to `<log_dir>/<id>/artifacts/`.
        model_averaging: keep an average of the weights and evaluate it as `eval/ema/...`; null keeps none.
        tracker: trackers to log metrics to in addition to `metrics.jsonl`: one, or a list. The default `type` is `wandb`.
        completions: which completions of the policy are logged with their rewards, in `completions.jsonl` and elsewhere.
        callbacks: classes of your own that follow the run, and `print_metrics`.
        watch: log norms and histograms of gradients, parameters and updates; null logs none.
        profiler: record a profile of some steps into the log folder; null records none.
        distributed: how the processes of a multi-process run connect.
        ray: tokenize on a Ray cluster (`{}` starts one). Null tokenizes in process 0, on all cores of its machine.
    """

    mp: str | PrecisionConfig = field("f32", on_resume=follows("numbers have a different precision from here"))
    offload_optimizer: bool = field(False, on_resume="rounding")
    log_dir: str = field("logs/", on_resume="harmless")
    compilation_cache_dir: str | None = field("cache/xla", on_resume="harmless")
    strict_performance: bool = field(False, on_resume="harmless")
    require_accelerator: bool | None = field(None, on_resume="harmless")
    jax_config: dict[str, bool | int | float | str | None] = field(default_factory=dict, on_resume="rounding")
    log_jaxprs: bool = field(False, on_resume="harmless")
    log_xla_hlo: bool = field(False, on_resume="harmless")
    model_averaging: AveragingConfig | None = field(
        None, on_resume=follows("the average of the weights differs from here")
    )
    tracker: TrackerConfig | list[TrackerConfig] = field(default_factory=list, on_resume="harmless")
    completions: CompletionsConfig = field(default_factory=CompletionsConfig, on_resume="harmless")
    callbacks: list[CallbackConfig] = field(default_factory=list, on_resume="harmless")
    watch: WatchConfig | None = field(None, on_resume="rounding")
    profiler: ProfilerConfig | None = field(None, on_resume="harmless")
    distributed: DistributedConfig = field(default_factory=DistributedConfig, on_resume="harmless")
    ray: RayConfig | None = field(None, on_resume="harmless")

    def check(self) -> None:
        """Raises `ConfigError` for values that are invalid for every model and every set of devices."""
        self.checkpointer.check()
        for callback in self.callbacks:
            callback.check()
        if self.watch is not None:
            self.watch.check()
        if self.shutdown_at_exit:
            raise ConfigError(
                "trainer.shutdown_at_exit: a run does not shut machines down. Do it in the command that starts the run:"
                " jaxlm train ...; sudo shutdown"
            )

    @property
    def optimizer_memory(self) -> str | None:
        """The kind of memory that the optimizer's state is in between steps; None for the devices' own."""
        return HOST_MEMORY if self.offload_optimizer else None

    @property
    def trackers(self) -> list[TrackerConfig]:
        """`tracker` as a list."""
        return self.tracker if isinstance(self.tracker, list) else [self.tracker]
