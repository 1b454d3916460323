"""A configuration to numbers: tokens/s, MFU, memory, compile time, and what the compiled program is made of.

    python -m jaxlm.bench --config_path run.yaml --trainer.train_batch_size 64 --steps 40
    python -m jaxlm.bench --config_path run.yaml --topology v5p-512,h100-64

Trains on random tokens: neither data nor tokenizer is needed, and nothing is written but the compilation cache. One JSON
line comes last.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from jaxlm.config.load import load_config, refuse_dry_run, run_id_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.hardware import peak_flops
from jaxlm.core.runtime import configure_jax
from jaxlm.core.types import TokenBatch
from jaxlm.engine.phases import enter_phase
from jaxlm.engine.sync import FlagSync, SyncFlags
from jaxlm.forecast.forecast import forecast_all, simulate_devices
from jaxlm.forecast.hlo import collectives_per_run, kernels
from jaxlm.forecast.topologies import parse_topology
from jaxlm.observe.console import Console, table
from jaxlm.run.compilation_cache import enable_compilation_cache
from jaxlm.run.compile import CompiledStep, abstract_batch, compile_step, gib
from jaxlm.run.dry_run import assumed_vocabulary
from jaxlm.run.exit_codes import run_command
from jaxlm.run.plan import Plan, make_plan
from jaxlm.run.startup import check_performance, describe

_STEPS, _WARMUP = 20, 3
_GEMM = 2048  # large enough for a full-speed matrix product on anything
_GEMM_REPEATS = 8


@dataclass(frozen=True)
class Result:
    """What a benchmark measured. Seconds are medians over the measured steps.

    Attributes:
        tokens_per_second: over all devices.
        step_seconds: of one step, the device having nothing else to do.
        step_seconds_spread: third minus first quartile.
        host_seconds: until the host had dispatched a step and was free again.
        compile_seconds: tracing and compiling, or finding the program in the cache.
        flops_per_token: forward and backward, attention counted causally.
        mfu: of the devices' peak; null where that is not known.
        mfu_palm: the same with attention counted over the whole sequence.
        mfu_attainable: of the rate that a large matrix product reached in this process, in the compute dtype.
        peak_bytes: of memory on one device; on CPU, of the process.
        program_bytes: what the compiler planned for one device.
        recomputation: what `model.gradient_checkpointing: auto` came to.
        kernels: library kernel -> calls a step.
        collectives: kind -> (number, bytes that come out) a step, on one device.
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
    devices: str
    jax: str


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return run_command(lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxlm.bench",
        description="Measures the training step of a configuration. All its keys may follow, as for jaxlm.train.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, help=f"measured steps (default {_STEPS})")
    parser.add_argument("--warmup", type=int, help=f"steps before them (default {_WARMUP})")
    parser.add_argument("--topology", help="machines to forecast for instead: v5p-512, h100-64, or several with commas")
    options, rest = parser.parse_known_args(arguments)
    steps = _STEPS if options.steps is None else options.steps
    warmup = _WARMUP if options.warmup is None else options.warmup
    if steps < 1 or warmup < 0:
        parser.error("--steps needs 1 or more, --warmup 0 or more")
    config = load_config(rest, "jaxlm.bench")
    refuse_dry_run(config, "jaxlm.bench measures steps, or forecasts with --topology")
    if options.topology is not None:
        if options.steps is not None or options.warmup is not None:
            raise ConfigError(
                "--topology: forecasts from the compiled program and runs no step, so --steps and --warmup have no effect."
                " Leave them out, or leave --topology out to measure on the devices that are here"
            )
        topologies = [parse_topology(name) for name in options.topology.split(",")]
        simulate_devices(topologies)
        forecast_all(config, topologies, Console())
        return 0
    configure_jax(config.trainer.jax_config)
    config.trainer.distributed.join()
    plan = make_plan(config, run_id_of(config), assumed_vocabulary(config)[0])
    check_performance(plan)
    console = Console()
    console.log(table("benchmark", describe(plan)))
    enable_compilation_cache(config.trainer.compilation_cache_dir)
    with plan.layout.use():
        result = measure(plan, console, steps=steps, warmup=warmup)
    console.log(table("result", _rows(result)))
    console.log(json.dumps(asdict(result)))
    return 0


def measure(plan: Plan, console: Console, *, steps: int, warmup: int) -> Result:
    """Runs the first phase's step on random tokens. Call it inside `plan.layout.use()`."""
    phase = plan.phases[0]
    step = compile_step(plan, phase, console.log)
    step.require_room()
    state = enter_phase(plan.state_builder, phase, plan.layout, None)()
    batches = [random_batch(plan, seed) for seed in range(4)]
    flags = FlagSync(plan.layout).to_devices(SyncFlags())
    dispatch, whole = [], []
    for number in range(warmup + steps):
        began = time.perf_counter()
        state, report = step.call(state, batches[number % len(batches)], flags)
        dispatched = time.perf_counter()
        jax.block_until_ready(report)
        dispatch.append(dispatched - began)
        whole.append(time.perf_counter() - began)
    return _result(plan, step, dispatch[warmup:], whole[warmup:])


def random_batch(plan: Plan, seed: int) -> TokenBatch:
    """Rows of random tokens, one document each, placed as the step wants them."""
    rng = np.random.default_rng(seed)
    shapes = abstract_batch(plan)
    axes = shapes.tokens.axes
    shape = tuple(axis.size for axis in axes)
    tokens = rng.integers(0, plan.state_builder.Vocab.size, (*shape[:-1], shape[-1] + 1), np.int32)
    columns = {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "loss_mask": np.ones(shape, np.float32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape),
    }
    place = plan.layout.compute_sharding(axes)
    put = lambda a: jax.make_array_from_callback(shape, place, lambda index: a[index])  # noqa: E731
    return TokenBatch(**{name: type(shapes.tokens)(put(array), axes) for name, array in columns.items()})


def attainable_flops(dtype: Any) -> float:
    """FLOP/s of a large matrix product on one device, the best of several."""
    product = jax.jit(lambda a, b: a @ b)
    a, b = (jax.random.normal(jax.random.key(k), (_GEMM, _GEMM)).astype(dtype) for k in (0, 1))
    jax.block_until_ready(product(a, b))
    seconds = []
    for _ in range(_GEMM_REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(product(a, b))
        seconds.append(time.perf_counter() - began)
    return 2 * _GEMM**3 / min(seconds)


def _result(plan: Plan, step: CompiledStep, dispatch: list[float], whole: list[float]) -> Result:
    devices = jax.devices()
    seconds = statistics.median(whole)
    rate = plan.tokens_per_step / seconds
    flops = plan.config.model.flops_per_token(plan.state_builder.Vocab.size)
    peak = peak_flops(devices[0].device_kind)
    peaks = None if peak is None else peak * len(devices)
    text = step.call.as_text() or ""
    moved: dict[str, tuple[int, int]] = {}
    for collective, number in collectives_per_run(text).items():
        before = moved.get(collective.kind, (0, 0))
        moved[collective.kind] = (before[0] + number, before[1] + number * collective.num_bytes)
    quartiles = statistics.quantiles(whole, n=4) if len(whole) > 1 else [seconds] * 3
    return Result(
        tokens_per_second=rate,
        step_seconds=seconds,
        step_seconds_spread=quartiles[2] - quartiles[0],
        host_seconds=statistics.median(dispatch),
        compile_seconds=step.seconds,
        flops_per_token=flops.causal,
        mfu=None if peaks is None else rate * flops.causal / peaks,
        mfu_palm=None if peaks is None else rate * flops.palm / peaks,
        mfu_attainable=rate * flops.causal / (attainable_flops(plan.precision.compute) * len(devices)),
        peak_bytes=_peak_bytes(),
        program_bytes=step.num_bytes,
        recomputation=step.remat_policy,
        kernels=dict(kernels(text)),
        collectives=moved,
        devices=f"{len(devices)} x {devices[0].device_kind}",
        jax=jax.__version__,
    )


def _peak_bytes() -> int:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rows(result: Result) -> list[tuple[str, str]]:
    percent = lambda share: "unknown (no peak for this device)" if share is None else f"{share:.1%}"  # noqa: E731
    return [
        ("tokens/s", f"{result.tokens_per_second:,.0f}"),
        ("step", f"{result.step_seconds * 1e3:.1f} ms (spread {result.step_seconds_spread * 1e3:.1f} ms)"),
        ("host", f"{result.host_seconds * 1e3:.2f} ms a step to dispatch it"),
        ("MFU", f"{percent(result.mfu)}; attention counted in full {percent(result.mfu_palm)}"),
        ("of a matrix product", f"{result.mfu_attainable:.1%} of the rate that one reached here"),
        ("compile", f"{result.compile_seconds:.1f} s"),
        ("memory", f"peak {gib(result.peak_bytes)}, planned {gib(result.program_bytes or 0)}"),
        ("kernels", ", ".join(f"{name} x {n}" for name, n in result.kernels.items()) or "none but XLA's own"),
        ("collectives", ", ".join(f"{k}: {n}, {gib(b)}" for k, (n, b) in result.collectives.items()) or "none"),
    ]


if __name__ == "__main__":
    sys.exit(main())
