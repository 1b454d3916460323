"""Forecasts a run on hardware that is not available: whether it fits, how fast it can be, and what limits it.

If the real compiler of the TPUs or NVIDIA GPUs is installed, the step is compiled ahead of time with it (no device
needed). Otherwise the step is compiled for the same number of simulated CPU devices: its collectives are those of the
partitioner, and its memory is what the CPU compiler plans, without fused kernels.

The time is a roofline. Programs for NVIDIA GPUs are read kernel by kernel. For others, the model's FLOPs count at the
fraction of the peak that large matrix products reach, and the state is read and written once. Collectives count at the
bandwidth of the links. The optimistic estimate overlaps all communication with computation, the pessimistic one
none.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.install import install_command
from jaxlm.engine.phases import Phase
from jaxlm.engine.step import OPTIMIZER_SCOPE
from jaxlm.hardware.hlo import HostCopy, argument_bytes, collectives_by_kind, kernels, loops_counted_once
from jaxlm.hardware.topologies import Cuda, Topology, parse_topology, speed_of
from jaxlm.models.base import LanguageModel
from jaxlm.models.moe import num_active
from jaxlm.models.remat import ATTENTION, FULL
from jaxlm.observe.console import Console, exact_duration, table
from jaxlm.plan.load_config import load_config, refuse_dry_run, run_id_of
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.choices import choice
from jaxlm.session.command_parts import CommandPart
from jaxlm.session.compilation.step import CompiledStep, compile_step, gib
from jaxlm.session.dry_run import assumed_vocabulary
from jaxlm.session.references import flops_per_token
from jaxlm.session.row_imbalance import RowImbalance, row_imbalance
from jaxlm.systems.forecast.aot import aot_devices, compiling_for_cuda, has_compiler
from jaxlm.systems.forecast.roofline import (
    Estimate,
    HostTraffic,
    Seconds,
    communication_seconds,
    estimate_kernels,
    executed_flops,
    roofline,
)
from jaxlm.systems.forecast.sampling import SamplingForecast, forecast_sampling, moved

# Fraction of a data sheet's peak that a large bf16 matrix product reaches; measured on one H200: 0.78 to 0.81.
GEMM_SHARE = 0.8
_MAX_SIMULATED = 2048  # XLA treats more as devices of another process, which it cannot compile for on CPUs
LOOP_STEP_SECONDS = 25e-6  # assumed: what a GPU waits in a step of a loop, whose kernels are too short to hide it
_STATE_TRAFFIC = 2 * 3 + 2  # parameter and two moments, read and written; gradient, written and read


@dataclass(frozen=True)
class Forecast:
    """The forecast of a phase's training step.

    Attributes:
        phase: name of the phase.
        chips: number of devices, each a chip, or one of the two chiplets of a TPU7x.
        compiled_for: the real chip, or simulated devices.
        parameters, active_parameters: number of parameters in total, and active for one token.
        compute_seconds: time of matrix products and attention.
        memory_seconds: time of memory-bound kernels, or, if the kernels are not known, of reading and writing the
            state.
        communication_seconds: time of collectives.
        step_seconds: with all communication overlapped with computation (optimistic).
        step_seconds_exposed: with no communication overlapped (pessimistic).
        step_seconds_scheduled: with the overlap of the compiler's schedule; None if the kernels are not known.
        mfu: model FLOPs utilization of the optimistic step, relative to the 16-bit peak, with causal attention counted.
        mfu_exposed, mfu_scheduled: the same for the pessimistic step and for the scheduled one.
        mfu_palm: `mfu` with attention counted over the whole sequence.
        memory_bytes: memory per chip, as compiled.
        argument_bytes: the part of it that the state, references and the batch take; the rest is temporary.
        recomputation: remat policy that the step was compiled with.
        host_bytes: memory of the host per chip, for what is offloaded.
        host_traffic: the copies between the memories of chip and host in each loop of the step, and outside of them; empty if
            there are none, or the kernels are not known.
        optimizer_seconds: the part of `compute_seconds` and `memory_seconds` that the update of the parameters takes; None if
            the kernels are not known.
        optimizer_flops_share: its share of the FLOPs of matrix products and attention that a device executes.
        context_seconds: kind -> (seconds, of them beside kernels in the compiler's schedule) of the collectives with which
            chips that share a row divide its attention; empty if there are none, or the kernels are not known.
        imbalance: how uneven their work is for the documents of the first phase's data; None if there is nothing to say.
        collectives: kind -> (number, output bytes) per step on one chip.
        kernels: number of calls per step of each library kernel.
        counted_once: loops with matrix products whose trip count depends on the data; seconds and executed FLOPs count one
            iteration of each.
        loop_steps: how often the bodies of loops run in a step, which no estimate of seconds counts; None if the kernels are
            not known.
        flops_per_token: the model's, as `mfu` counts them.
        executed_flops: FLOPs of matrix products and attention that a chip executes in a step, recomputation included; None if
            the kernels are not known. Products in fp8 count half.
        sampling: what the model samples on these chips before it trains on it; None if it samples nothing there, or if the
            kernels are not known.
    """

    topology: str
    phase: str
    chips: int
    compiled_for: str
    parameters: int
    active_parameters: int
    tokens_per_step: int
    compute_seconds: float
    memory_seconds: float
    communication_seconds: float
    step_seconds: float
    step_seconds_exposed: float
    step_seconds_scheduled: float | None
    tokens_per_second: float
    mfu: float
    mfu_exposed: float
    mfu_scheduled: float | None
    mfu_palm: float
    memory_bytes: int | None
    argument_bytes: int | None
    memory_limit: int
    recomputation: str
    host_bytes: int
    host_traffic: tuple[HostTraffic, ...]
    optimizer_seconds: float | None
    optimizer_flops_share: float | None
    context_seconds: Mapping[str, tuple[float, float]]
    imbalance: RowImbalance | None
    collectives: dict[str, tuple[int, int]]
    kernels: dict[str, int]
    counted_once: list[str]
    loop_steps: float | None
    flops_per_token: float
    executed_flops: float | None
    sampling: SamplingForecast | None


@choice(CommandPart, "bench forecast")
class ForecastPart(CommandPart):
    """`jaxlm bench --topology`."""

    def add_options(self, parser: Any) -> None:
        parser.add_argument(
            "--topology",
            help="comma-separated machines to forecast performance for, such as v5p-512,h100-64, instead of measuring",
        )

    def run(self, options: Any, rest: Any) -> int | None:
        if options.topology is None:
            return None
        config = load_config(rest, "jaxlm bench")
        refuse_dry_run(config, "jaxlm bench --topology forecasts")
        if options.tune == "true":
            raise ConfigError("--tune measures this machine. Remove --topology")
        if options.steps is not None or options.warmup is not None:
            raise ConfigError(
                "--topology: the forecast uses the compiled program and runs no steps, so --steps and --warmup have no"
                " effect. Remove them, or remove --topology to measure on this machine's devices"
            )
        topologies = [parse_topology(name) for name in options.topology.split(",")]
        simulate_devices(topologies)
        forecast_all(config, topologies, Console())
        return 0


def simulate_devices(topologies: Sequence[Topology]) -> None:
    """Makes jax simulate the CPU devices of the largest topology that has no compiler. Call this before using jax."""
    count = max([1, *(topology.num_chips for topology in topologies if not has_compiler(topology))])
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def forecast_all(config: RunConfig, topologies: Sequence[Topology], console: Console) -> None:
    """Logs a table for each topology and phase, then one JSON line for each."""
    forecasts = [result for topology in topologies for result in forecast(config, topology, console)]
    for result in forecasts:
        of_phase = f", phase '{result.phase}'" if len(config.phases or ()) > 1 else ""
        size = parse_topology(result.topology).size
        console.log(table(f"{result.topology}: {size}{of_phase}", _rows(result)))
    for result in forecasts:
        console.log(json.dumps(dataclasses.asdict(result)))


def forecast(config: RunConfig, topology: Topology, console: Console) -> list[Forecast]:
    """Compiles the step of each phase for the topology and estimates its time."""
    has_real_compiler = has_compiler(topology)
    devices, compiled_for = aot_devices(topology) if has_real_compiler else _simulated_devices(topology)
    plan = make_plan(config, run_id_of(config), assumed_vocabulary(config)[0], devices)
    cuda = topology.chip.cuda if has_real_compiler else None
    imbalance = row_imbalance(plan)
    return [_forecast_phase(plan, phase, topology, cuda, compiled_for, imbalance, console) for phase in plan.phases]


def _forecast_phase(
    plan: Plan,
    phase: Phase,
    topology: Topology,
    cuda: Cuda | None,
    compiled_for: str,
    imbalance: RowImbalance | None,
    console: Console,
) -> Forecast:
    """Args: cuda: what the compiler for NVIDIA GPUs compiles for; None for another compiler."""
    with plan.layout.use(), compiling_for_cuda(cuda.capability) if cuda else nullcontext():
        step = compile_step(plan, phase, console.log, limit=int(topology.chip.memory))
        sampling = forecast_sampling(plan, phase, topology, console.log) if cuda else None
    hlo = _program_text(step, topology)
    flops, tokens = flops_per_token(plan, phase), plan.batches.of(phase).largest.size * plan.tokens_per_example(phase)
    model = plan.state_builder.abstract_state(phase).model
    on_host = _optimizer_bytes(plan, phase) if plan.layout.optimizer_memory else 0
    if cuda:
        update = roofline(hlo, speed_of(topology, plan.precision.compute), OPTIMIZER_SCOPE).total
        estimate = estimate_kernels(hlo, topology, plan.mesh, plan.precision.compute)
        estimate = dataclasses.replace(estimate, host=(*estimate.host, *_moments_traffic(on_host, topology, update)))
    else:
        update, estimate = None, _analytic_estimate(plan, topology, step, hlo, model, flops.causal, tokens)
    seconds, exposed, scheduled = estimate.overlapped, estimate.exposed, estimate.scheduled
    per_second = tokens / (topology.num_chips * topology.chip.peak)
    return Forecast(
        topology=topology.name,
        phase=phase.name,
        chips=topology.num_chips,
        compiled_for=compiled_for,
        parameters=tree.num_parameters(model),
        active_parameters=num_active(model),
        tokens_per_step=tokens,
        compute_seconds=estimate.kernels.products + estimate.kernels.attention,
        memory_seconds=estimate.kernels.memory,
        communication_seconds=estimate.communication,
        step_seconds=seconds,
        step_seconds_exposed=exposed,
        step_seconds_scheduled=scheduled,
        tokens_per_second=tokens / seconds,
        mfu=flops.causal * per_second / seconds,
        mfu_exposed=flops.causal * per_second / exposed,
        mfu_scheduled=None if scheduled is None else flops.causal * per_second / scheduled,
        mfu_palm=flops.palm * per_second / seconds,
        memory_bytes=step.num_bytes,
        argument_bytes=argument_bytes(step.call),
        memory_limit=int(topology.chip.memory),
        recomputation=step.remat_policy,
        host_bytes=step.host_bytes + on_host,
        host_traffic=estimate.host,
        optimizer_seconds=update,
        optimizer_flops_share=executed_flops(hlo, OPTIMIZER_SCOPE) / max(1.0, estimate.flops or 0.0) if cuda else None,
        context_seconds=estimate.attention if plan.context else {},
        imbalance=imbalance,
        collectives=estimate.collectives,
        kernels=dict(kernels(hlo)) if cuda else {},
        counted_once=loops_counted_once(hlo) if cuda else [],
        loop_steps=estimate.loop_steps,
        flops_per_token=flops.causal,
        executed_flops=estimate.flops,
        sampling=sampling,
    )


def _moments_traffic(on_host: int, topology: Topology, update: float) -> list[HostTraffic]:
    """The copies of the moments that are in the host's memory, there and back. Args: update: seconds of the update."""
    if not on_host:
        return []
    bandwidth = topology.chip.host_bandwidth
    assert bandwidth is not None, "GPUs have one"
    return [HostTraffic(1, HostCopy(on_host, on_host), 2 * on_host / bandwidth, 0.0, update)]


def _optimizer_bytes(plan: Plan, phase: Phase) -> int:
    """Memory of the moments per chip. Without the device, the compiler takes them to be in its memory, wherever they are."""
    moments = [
        leaf for _, leaf in tree.leaves(plan.state_builder.abstract_state(phase).opt_state) if tree.is_named(leaf)
    ]
    shards = ((plan.layout.parameter_sharding(m.axes).shard_shape(m.array.shape), m.dtype.itemsize) for m in moments)
    return sum(math.prod(shape) * itemsize for shape, itemsize in shards)


def _simulated_devices(topology: Topology) -> tuple[Sequence[Any], str]:
    """CPU devices, as many as the topology has, and a description of them."""
    hint = f"{install_command('gpu')} installs the compiler for NVIDIA GPUs; no GPU is needed"
    if topology.chip.platform == "tpu":
        hint = "pip install libtpu installs the compiler for TPUs; no TPU is needed"
    if topology.num_chips > _MAX_SIMULATED:
        raise ConfigError(
            f"--topology {topology.name}: {topology.num_chips} chips given, but jax compiles for at most"
            f" {_MAX_SIMULATED} simulated devices. Use fewer chips, or compile for the real ones: {hint}"
        )
    devices = jax.devices("cpu")
    if len(devices) < topology.num_chips:
        raise ConfigError(
            f"--topology {topology.name}: {topology.num_chips} simulated devices needed, but jax was initialized with"
            f" {len(devices)}. Call simulate_devices before you use jax"
        )
    description = f"{topology.num_chips} simulated CPU devices, whose collectives are float32 ({hint})"
    return devices[: topology.num_chips], description


def _program_text(step: CompiledStep, topology: Topology) -> str:
    try:
        return step.call.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"--topology {topology.name}: jax {jax.__version__} cannot read the program that the installed compiler wrote"
            f" ({str(error)[:80]}). Install the compiler of this version: {install_command('tpu')}"
        ) from error


def _analytic_estimate(
    plan: Plan, topology: Topology, step: CompiledStep, hlo: str, model: LanguageModel, flops: float, tokens: int
) -> Estimate:
    """Estimates a program whose kernels are not known by the model's FLOPs, `flops` per token and what remat recomputes, and
    by moving its state."""
    of_weights = min(flops, 6 * num_active(model))
    recomputed = {FULL: flops / 3, ATTENTION: of_weights / 3}.get(step.remat_policy, 0.0)
    executed = (flops + recomputed) * tokens / topology.num_chips
    state = _STATE_TRAFFIC * tree.num_parameters(model) * plan.precision.params.itemsize
    num_shards = plan.mesh.data * plan.mesh.context * plan.mesh.model
    return Estimate(
        kernels=Seconds(
            products=executed / (topology.chip.peak_of(plan.precision.compute) * GEMM_SHARE),
            memory=state / num_shards / topology.chip.memory_bandwidth,
        ),
        communication=communication_seconds(hlo, topology, plan.mesh),
        hidden=None,
        flops=None,
        collectives=collectives_by_kind(hlo),
    )


def _host(result: Forecast) -> str:
    """Says what is in the host's memory, and how long the copies take beside the kernels of a layer."""
    parts = [gib(result.host_bytes)]
    for traffic in sorted(result.host_traffic, key=lambda traffic: traffic.copies.back):
        directions = ((traffic.copies.there, "to the host"), (traffic.copies.back, "back"))
        moved = " and ".join(f"{gib(num_bytes)} {where}" for num_bytes, where in directions if num_bytes)
        copying, kernels, waiting = map(
            exact_duration, (traffic.seconds, traffic.kernels, traffic.exposed / traffic.turns)
        )
        parts.append(f"{traffic.turns} times {moved} in {copying} beside {kernels} of kernels, {waiting} of it exposed")
    return "; ".join(parts)


def _hidden(transfers: Mapping[str, tuple[float, float]]) -> str:
    """The share of context parallelism's transfers that kernels hide, all together and by kind."""
    seconds, hidden = map(sum, zip(*transfers.values(), strict=True))
    kinds = (f"{kind} {part / whole:.1%} of {exact_duration(whole)}" for kind, (whole, part) in transfers.items())
    return f"{hidden / seconds:.1%} of its transfers beside kernels, as scheduled: {', '.join(sorted(kinds))}"


def _loops(result: Forecast) -> str:
    """Says what the steps of loops would add if each had to wait, and the tokens per second then."""
    assert result.loop_steps is not None
    seconds = result.loop_steps * LOOP_STEP_SECONDS
    whole = seconds + (result.step_seconds_scheduled or result.step_seconds)
    return (
        f"{result.loop_steps:,.0f} steps, not counted above; with {1e6 * LOOP_STEP_SECONDS:.0f} us for each (assumed)"
        f" {exact_duration(seconds)} more and {result.tokens_per_step / whole / result.chips:,.0f} tokens/s per chip"
    )


def _rows(result: Forecast) -> list[tuple[str, str]]:
    memory = "unknown" if result.memory_bytes is None else gib(result.memory_bytes)
    held = "" if result.argument_bytes is None else f", {gib(result.argument_bytes)} of it state, references and batch"
    seconds = mfu = rate = ""
    if result.step_seconds_scheduled is not None and result.mfu_scheduled is not None:
        seconds = f"{exact_duration(result.step_seconds_scheduled)} as scheduled, "
        mfu = f"{result.mfu_scheduled:.1%} as scheduled, "
        per_chip = result.tokens_per_step / result.step_seconds_scheduled / result.chips
        rate = f"; {per_chip:,.0f} per chip as scheduled"
    step, exposed = map(exact_duration, (result.step_seconds, result.step_seconds_exposed))
    compute, traffic = map(exact_duration, (result.compute_seconds, result.memory_seconds))
    full_attention = f"{result.mfu_palm:.1%} with full attention counted"
    optimizer = "unknown"
    if result.optimizer_seconds is not None and result.optimizer_flops_share is not None:
        share = result.optimizer_seconds / (result.compute_seconds + result.memory_seconds)
        flops_share = f"{result.optimizer_flops_share:.1%} of FLOPs"
        optimizer = f"{exact_duration(result.optimizer_seconds)}, {share:.1%} of compute and memory; {flops_share}"
    executed = "unknown"
    if result.executed_flops is not None:
        counted = result.flops_per_token * result.tokens_per_step / result.chips
        times = result.executed_flops / counted
        executed = f"{result.executed_flops:.4g} executed per chip and step, {times:.2f} times the model's"
    once = result.counted_once
    rows = [
        ("compiled for", f"{result.compiled_for}, remat policy {result.recomputation}"),
        ("parameters", f"{result.parameters:,}, {result.active_parameters:,} of them active per token"),
        ("step", f"{result.tokens_per_step:,} tokens, {step} ({seconds}{exposed} exposed)"),
        ("compute", f"{compute} matrix products and attention, {traffic} memory"),
        ("optimizer", optimizer),
        ("communication", exact_duration(result.communication_seconds)),
        *([("context parallelism", _hidden(result.context_seconds))] if result.context_seconds else []),
        *([("imbalance", result.imbalance.describe())] if result.imbalance else []),
        ("FLOPs", f"{result.flops_per_token:.4g} per token; {executed}"),
        ("collectives", moved(result.collectives)),
        (
            "tokens/s",
            f"{result.tokens_per_second:,.0f} ({result.tokens_per_second / result.chips:,.0f} per chip{rate})",
        ),
        ("MFU", f"{result.mfu:.1%} ({mfu}{result.mfu_exposed:.1%} exposed); {full_attention}"),
        *([("loops", _loops(result))] if result.loop_steps else []),
        ("kernels", ", ".join(f"{name} x {n}" for name, n in result.kernels.items()) or "unknown"),
        *([("counted once", f"loops whose trip count depends on the data: {', '.join(once)}")] if once else []),
        ("memory per chip", f"{memory} of {gib(result.memory_limit)}{held}"),
        *([("host's memory per chip", _host(result))] if result.host_bytes else []),
    ]
    return rows if result.sampling is None else [*rows, *result.sampling.rows_of_table(result.memory_limit)]
