"""The `trainer` section: how long, how large, where."""

from dataclasses import dataclass, field

from jaxlm.core.batch_schedule import BatchSize
from jaxlm.core.distributed import DistributedConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import MeshConfig
from jaxlm.data.cache.ray_workers import RayConfig
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.watch import WatchConfig
from jaxlm.observe.profiler import ProfilerConfig
from jaxlm.observe.trackers import TrackerConfig
from jaxlm.optim.averaging import AveragingConfig


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
            asked for by its name (`model.attn_backend: reference`) is no fallback.
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
