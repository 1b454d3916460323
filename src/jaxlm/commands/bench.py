"""Measures the training step, or forecasts it for machines you do not have.

    jaxlm bench --config_path run.yaml --trainer.train_batch_size 64 --steps 40
    jaxlm bench --config_path run.yaml --tune
    jaxlm bench --config_path run.yaml --topology v5p-512,h100-64

Trains on random tokens, so it needs no data or tokenizer, and it writes only the compilation cache. If devices share rows
(`trainer.context`) and the data is tokenized, it says how uneven their work is for its documents. The last line of output is
JSON.
"""

import functools
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.core.devices import peak_flops, processor
from jaxlm.core.errors import ConfigError, Parser
from jaxlm.core.runtime import configure_jax
from jaxlm.core.sharding import current_platform
from jaxlm.core.stores import is_url
from jaxlm.core.tracing import BlockSizes
from jaxlm.data.loader import leading_axes
from jaxlm.engine.entry import enter_phase
from jaxlm.engine.peers import connect_if_it_fails, watch_peers
from jaxlm.engine.sync import FlagSync
from jaxlm.hardware.cpu_products import cpu_products, shares_by_library, shares_without_library
from jaxlm.hardware.hlo import collectives_by_kind, kernels, planned_bytes
from jaxlm.observe.console import Console, table
from jaxlm.plan.load_config import given_distributed, load_config, refuse_dry_run, run_id_of
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.plan.run_config import RunConfig
from jaxlm.session.command_parts import parts_of, run_parts
from jaxlm.session.compilation.options import StepOptions, compiler_options, enable_compilation_cache, keep
from jaxlm.session.compilation.step import USABLE, CompiledStep, compile_step, gib, trace_step
from jaxlm.session.compilation.tuning import MIN_ROUNDS, UnusableError, candidates_for, compare, tune
from jaxlm.session.dry_run import assumed_vocabulary
from jaxlm.session.exit_codes import command
from jaxlm.session.references import annotated, flops_per_token, load_references
from jaxlm.session.row_imbalance import row_imbalance
from jaxlm.session.startup import check_performance, describe

_STEPS, _WARMUP = 20, 3
_GEMM = 2048  # large enough for a matrix product to reach full speed on a CPU
_GEMM_GPU = 8192  # ... and on an accelerator, where a small one takes less time than its dispatch
_SHOWN_PRODUCTS = 3
_GEMM_REPEATS, _GEMM_SECONDS = 8, 2.0  # whichever is reached first


@dataclass(frozen=True)
class Result:
    """Results of a benchmark. Seconds are medians over the measured steps.

    Attributes:
        tokens_per_second: throughput over all devices.
        step_seconds: duration of a step that is not overlapped with others.
        step_seconds_spread: interquartile range of the step durations.
        host_seconds: time that the host needs to dispatch a step.
        compile_seconds: duration of tracing and compiling, or of loading the program from the cache.
        flops_per_token: forward and backward FLOPs, and the forward FLOPs of references; attention counted causally.
        mfu: model FLOPs utilization relative to the devices' peak; null if the peak is unknown.
        mfu_palm: the same with attention counted over the full sequence.
        mfu_attainable: the same relative to the rate of a large matrix product measured in this process, in the compute
            dtype.
        peak_bytes: peak memory of one device; on CPU, of the process.
        program_bytes: memory per device planned by the compiler; null if it does not report it.
        recomputation: the remat policy; with `model.gradient_checkpointing: auto`, the one that was chosen.
        kernels: library kernel -> calls per step.
        collectives: kind -> (number, output bytes) per step on one device.
        products: on CPUs, what computes the matrix products, and in which dtype -> share of their FLOPs; empty on others.
        products_without_library: of them, those that XLA computes itself -> share.
    """

    tokens_per_second: float
    step_seconds: float
    step_seconds_spread: float
    host_seconds: float
    compile_seconds: float
    flops_per_token: float
    mfu: float | None
    mfu_palm: float | None
    mfu_attainable: float
    peak_bytes: int
    program_bytes: int | None
    recomputation: str
    kernels: dict[str, int]
    collectives: dict[str, tuple[int, int]]
    products: dict[str, float]
    products_without_library: dict[str, float]
    devices: str
    jax: str


@command
def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    about = "Benchmarks the training step of a configuration. Takes the same configuration options as jaxlm train."
    parser = Parser(prog="jaxlm bench", description=about, allow_abbrev=False)
    parser.add_argument("--steps", type=int, help=f"number of measured steps (default {_STEPS})")
    parser.add_argument("--warmup", type=int, help=f"number of warm-up steps before them (default {_WARMUP})")
    parts = parts_of("bench")
    for part in parts:
        part.add_options(parser)
    tune_help = "find the XLA options and block sizes that make the step fastest here, and keep them for jaxlm train"
    boolean = {"nargs": "?", "const": "true", "default": "false", "choices": ("true", "false")}
    parser.add_argument("--tune", **boolean, help=tune_help)
    options, rest = parser.parse_known_args(arguments)
    if (code := run_parts(parts, options, rest)) is not None:
        return code
    steps = _STEPS if options.steps is None else options.steps
    warmup = _WARMUP if options.warmup is None else options.warmup
    if steps < 1 or warmup < 0:
        parser.error("--steps must be at least 1, and --warmup at least 0")
    connect_if_it_fails(lambda: given_distributed(rest))
    config = load_config(rest, "jaxlm bench")
    refuse_dry_run(config, "jaxlm bench measures steps")
    if options.tune == "true":
        _check_tunable(options.warmup, steps, config)
    _run(config, steps, warmup, tunes=options.tune == "true")
    return 0


def _run(config: RunConfig, steps: int, warmup: int, *, tunes: bool) -> None:
    configure_jax(config.trainer.jax_config)
    config.trainer.distributed.join()
    watch_peers(config.trainer.distributed.heartbeat_timeout.total_seconds())
    plan = make_plan(config, run_id_of(config), assumed_vocabulary(config)[0])
    check_performance(plan)
    console = Console()
    imbalance = row_imbalance(plan)
    rows = [] if imbalance is None else [("imbalance", imbalance.describe())]
    console.log(table("benchmark", [*describe(plan), *rows]))
    enable_compilation_cache(config.trainer.compilation_cache_dir)
    with plan.layout.use():
        if tunes:
            _tune(plan, console, rounds=steps)
            return
        result = measure(plan, console, steps=steps, warmup=warmup)
    console.log(table("result", _rows(result)))
    console.log(json.dumps(asdict(result)))


def _check_tunable(warmup: int | None, steps: int, config: RunConfig) -> None:
    """Raises `ConfigError` for what does not go together with `--tune`."""
    folder, distributed = config.trainer.compilation_cache_dir, config.trainer.distributed
    if warmup is not None:
        raise ConfigError("--tune measures this machine, after two steps of each program. Remove --warmup")
    if steps < MIN_ROUNDS:
        raise ConfigError(f"--steps: {steps} given, but --tune compares at least {MIN_ROUNDS} of each program")
    if folder is None or is_url(folder):
        raise ConfigError(f"trainer.compilation_cache_dir: {folder} given. --tune keeps its results in a local folder")
    if distributed.num_processes not in (None, 1):
        raise ConfigError(
            "--tune runs in one process. Run it on one machine, and copy tuned_options.json to the others"
        )


def _tune(plan: Plan, console: Console, *, rounds: int) -> None:
    """Tunes the first phase's step on random tokens and keeps the result. Call it inside `plan.layout.use()`."""
    phase = plan.phases[0]
    compiled, refs, batches = _opened(plan, console)

    def traced(plan: Plan, sizes: BlockSizes) -> jax.stages.Lowered:
        return trace_step(plan, plan.phases[0], compiled.remat_policy, sizes=sizes).lower()

    lowered = functools.cache(functools.partial(traced, plan))
    console.log("looking for block sizes that make another program of this step ...")
    candidates = candidates_for(plan.layout.platform, lambda options: lowered(options.sizes).as_text())
    enter = enter_phase(plan.state_builder, phase, plan.layout, None)
    flags = FlagSync.unset(plan.layout)

    def compile_with(options: StepOptions, lowered: Callable[[BlockSizes], jax.stages.Lowered] = lowered) -> Any:
        xla: Any = options.xla
        call = lowered(options.sizes).compile(xla)
        needed = planned_bytes(call)
        if needed is not None and compiled.limit is not None and needed > USABLE * compiled.limit:
            raise UnusableError(f"it needs {gib(needed)}")
        return lambda state, batch: call(state, refs, batch, flags)

    console.log(f"tuning on {processor()}: each program runs {rounds} steps, in turn with the step as it is")
    tuned = tune(plan, compile_with, candidates, enter(), batches, rounds, console.log)
    console.log(f"step options: {tuned}")
    if plan.precision.params == plan.precision.compute == jnp.float32 and not plan.precision.rules:
        platform = plan.layout.platform
        options = StepOptions.of(platform, compiler_options(platform) | tuned.options)
        trainer = replace(plan.config.trainer, mp="p=f32,c=bfloat16")
        other = make_plan(replace(plan.config, trainer=trainer), plan.run_id, plan.state_builder.Vocab.size)
        in_bfloat16 = compile_with(options, functools.partial(traced, other))  # its state is the same
        low, median, high = compare(compile_with(options), in_bfloat16, enter(), batches, rounds)
        console.log(
            f"trainer.mp: p=f32,c=bfloat16 would be {median:.2f} times as fast ({low:.2f} to {high:.2f}). It changes the"
            " numbers, so --tune does not keep it: set it in the configuration if you want it"
        )
    console.log(f"kept in {keep(plan, tuned)} for jaxlm train")
    console.log(json.dumps(asdict(tuned)))


def measure(plan: Plan, console: Console, *, steps: int, warmup: int) -> Result:
    """Measures the first phase's step on random tokens. Call it inside `plan.layout.use()`."""
    step, refs, batches = _opened(plan, console)
    state = enter_phase(plan.state_builder, plan.phases[0], plan.layout, None)()
    flags = FlagSync.unset(plan.layout)
    dispatch_seconds, step_seconds = [], []
    for number in range(warmup + steps):
        started = time.perf_counter()
        state, report = step.call(state, refs, batches[number % len(batches)], flags)
        dispatched = time.perf_counter()
        jax.block_until_ready(report)
        dispatch_seconds.append(dispatched - started)
        step_seconds.append(time.perf_counter() - started)
    return _result(plan, step, dispatch_seconds[warmup:], step_seconds[warmup:])


def _opened(plan: Plan, console: Console) -> tuple[CompiledStep, Any, Sequence[Any]]:
    """The compiled step of the first phase, its references and a few random batches."""
    phase = plan.phases[0]
    step = compile_step(plan, phase, console.log)
    step.check_fits_memory()
    refs = load_references(plan, phase, console.log)
    return step, refs, annotated(plan, phase, [random_batch(plan, seed) for seed in range(4)], console.log)


def random_batch(plan: Plan, seed: int) -> Any:
    """A batch of the first phase with random tokens, with the sharding that the step expects."""
    stage, seq_len = plan.batches.of(plan.phases[0]).largest, plan.phases[0].model.seq_len
    num_examples = math.prod(stage.shape)
    columns = plan.data[0].random_columns(num_examples, seq_len, plan.state_builder.Vocab.size, seed)
    read = lambda rows: {name: column[rows] for name, column in columns.items()}  # noqa: E731
    return plan.data[0].batch_spec(seq_len).assemble(read, leading_axes(stage), plan.layout)


def attainable_flops(dtype: Any) -> float:
    """FLOP/s of a large matrix product on one device; the best of several runs, fewer on a slow device."""
    size = _GEMM if current_platform() == "cpu" else _GEMM_GPU
    product = jax.jit(lambda a, b: a @ b)
    a, b = (jax.random.normal(jax.random.key(k), (size, size)).astype(dtype) for k in (0, 1))
    jax.block_until_ready(product(a, b))
    seconds = []
    while len(seconds) < _GEMM_REPEATS and sum(seconds) < _GEMM_SECONDS:
        started = time.perf_counter()
        jax.block_until_ready(product(a, b))
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def _result(plan: Plan, step: CompiledStep, dispatch_seconds: list[float], step_seconds: list[float]) -> Result:
    devices = jax.devices()
    seconds = statistics.median(step_seconds)
    rate = plan.tokens_per_step / seconds
    flops = flops_per_token(plan, plan.phases[0])
    peak = peak_flops(devices[0].device_kind)
    peaks = None if peak is None else peak * len(devices)
    text = step.call.as_text() or ""
    products = cpu_products(text) if current_platform() == "cpu" else {}
    quartiles = statistics.quantiles(step_seconds, n=4) if len(step_seconds) > 1 else [seconds] * 3
    attainable = attainable_flops(plan.precision.compute) * len(devices)
    stats = jax.local_devices()[0].memory_stats() or {}
    return Result(
        tokens_per_second=rate,
        step_seconds=seconds,
        step_seconds_spread=quartiles[2] - quartiles[0],
        host_seconds=statistics.median(dispatch_seconds),
        compile_seconds=step.seconds,
        flops_per_token=flops.causal,
        mfu=None if peaks is None else rate * flops.causal / peaks,
        mfu_palm=None if peaks is None else rate * flops.palm / peaks,
        mfu_attainable=rate * flops.causal / attainable,
        peak_bytes=stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        program_bytes=step.num_bytes,
        recomputation=step.remat_policy,
        kernels=dict(kernels(text)),
        collectives=collectives_by_kind(text),
        products=shares_by_library(products),
        products_without_library=shares_without_library(products),
        devices=f"{len(devices)} x {devices[0].device_kind}",
        jax=jax.__version__,
    )


def _products(result: Result) -> str:
    """Says what computes the matrix products on a CPU, and the largest of those that XLA computes itself."""
    libraries, own = (
        ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        for shares in (result.products, dict(list(result.products_without_library.items())[:_SHOWN_PRODUCTS]))
    )
    return f"{libraries} of their FLOPs" + (f"; without a library: {own}" if own else "")


def _rows(result: Result) -> list[tuple[str, str]]:
    mfu = "unknown (no peak FLOP/s known for this device)"
    if result.mfu is not None and result.mfu_palm is not None:
        mfu = f"{result.mfu:.1%}; with non-causal attention {result.mfu_palm:.1%}"
    return [
        ("tokens/s", f"{result.tokens_per_second:,.0f}"),
        ("step", f"{result.step_seconds * 1e3:.1f} ms (spread {result.step_seconds_spread * 1e3:.1f} ms)"),
        ("host", f"{result.host_seconds * 1e3:.2f} ms to dispatch a step"),
        ("MFU", mfu),
        ("attainable MFU", f"{result.mfu_attainable:.1%} of the measured rate of a large matrix product"),
        ("compile", f"{result.compile_seconds:.1f} s"),
        ("memory", f"peak {gib(result.peak_bytes)}, planned {gib(result.program_bytes or 0)}"),
        ("kernels", ", ".join(f"{name} x {n}" for name, n in result.kernels.items()) or "only XLA's own"),
        ("collectives", ", ".join(f"{k}: {n}, {gib(b)}" for k, (n, b) in result.collectives.items()) or "none"),
        *([("products", _products(result))] if result.products else []),
    ]


if __name__ == "__main__":
    sys.exit(main())
