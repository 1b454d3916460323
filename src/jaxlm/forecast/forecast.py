"""A configuration on machines that one does not have: does it fit, how fast could it be, and what limits it.

TPUs and NVIDIA cards are compiled for ahead of time by their real compilers, where those are installed (none needs a device).
For everything else the step is compiled for as many simulated CPU devices: its collectives are then those of the
partitioner, and memory is what the CPU compiler plans, which knows no fused kernels.

The time is a roofline. A program for NVIDIA cards is read kernel by kernel. Of others the model's operations are counted at
the share of the peak that large matrix products reach, and the state, read and written once. Collectives are counted at the
speed of the links. The optimistic end hides all communication behind computation, the pessimistic one none.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxlm.config.load import run_id_of
from jaxlm.config.run import RunConfig
from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.forecast.aot_devices import aot_devices, has_compiler
from jaxlm.forecast.hlo import Collective, collectives_per_run, kernels
from jaxlm.forecast.roofline import Seconds, Speed, overlapped, roofline
from jaxlm.forecast.topologies import Topology
from jaxlm.models.attention.aot_cuda import compiling_for_cuda
from jaxlm.models.moe import num_active
from jaxlm.models.remat import FULL
from jaxlm.observe.console import Console, table
from jaxlm.run.compile import compile_step, gib
from jaxlm.run.dry_run import assumed_vocabulary
from jaxlm.run.plan import Plan, make_plan

# What a large bf16 matrix product reaches of a data sheet's peak; measured on one H200: 0.78 to 0.81.
GEMM_SHARE = 0.8
# What the kernels of a training step reach: products 600 to 690 of 989 TFLOP/s, cuDNN's attention 350 to 500, and
# elementwise work 4.0 of 4.8 TB/s (public measurements on Hopper).
_PRODUCTS_SHARE, _ATTENTION_SHARE, _MEMORY_SHARE = 0.66, 0.43, 0.83
_MOST_SIMULATED = 2048  # XLA takes those beyond for devices of another process, which its CPUs do not compile for
_REAL = {
    "gpu": "pip install 'jaxlm[gpu]' brings the compiler of NVIDIA cards; no card is needed",
    "tpu": "pip install libtpu brings the compiler of TPUs; no TPU is needed",
}
_STATE_TRAFFIC = 2 * 3 + 2  # parameter and two moments, read and written; the gradient, written and read


@dataclass(frozen=True)
class Forecast:
    """What is to be expected of a step.

    Attributes:
        compiled_for: the real chip, or simulated devices.
        compute_seconds: matrix products and attention of one step, on their own.
        memory_seconds: the rest, which waits for memory: all other kernels, or, where those are not known, the state.
        communication_seconds: collectives.
        kernels: library kernel -> calls a step, of the compiled program.
        parameters, active_parameters: in all, and those that a token meets.
        step_seconds: all communication hidden behind computation.
        step_seconds_exposed: none of it.
        mfu: of the optimistic step and the 16 bit peak, attention counted causally; mfu_palm: over the whole sequence.
        memory_bytes: of one chip, as compiled.
        recomputation: which it was compiled with.
    """

    topology: str
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
    memory_limit: int
    recomputation: str
    kernels: dict[str, int]


def simulate_devices(topologies: Sequence[Topology]) -> None:
    """Makes jax simulate as many CPU devices as the largest topology without a compiler has. Call it before jax is used."""
    count = max([1, *(topology.num_chips for topology in topologies if not has_compiler(topology))])
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def forecast_all(config: RunConfig, topologies: Sequence[Topology], console: Console) -> None:
    """Shows a forecast for each topology, and one JSON line for each."""
    found = [forecast(config, topology, console) for topology in topologies]
    for one in found:
        console.log(table(f"{one.topology}: {one.chips} chips", _rows(one)))
    for one in found:
        console.log(json.dumps(dataclasses.asdict(one)))


def forecast(config: RunConfig, topology: Topology, console: Console) -> Forecast:
    """Compiles the first phase's step for the topology and works out its time."""
    target = _target(topology)
    plan = make_plan(config, run_id_of(config), assumed_vocabulary(config)[0], target.devices)
    with plan.layout.use(), target.tracing:
        step = compile_step(plan, plan.phases[0], console.log, limit=int(topology.chip.memory))
    hlo = step.call.as_text() or ""
    speed = _speed(topology, plan.precision.compute)
    time = roofline(hlo, speed) if target.is_card else _by_formula(plan, topology, again=step.remat_policy == FULL)
    of_one = functools.partial(_seconds, plan=plan, topology=topology)
    communication = sum(n * of_one(one) for one, n in collectives_per_run(hlo).items())
    seconds, exposed = max(time.total, communication), time.total + communication
    scheduled = exposed - overlapped(hlo, speed, of_one) if target.is_card else None
    model = plan.state_builder.abstract_state(plan.phases[0]).model
    flops = config.model.flops_per_token(plan.state_builder.Vocab.size)
    per_second = plan.tokens_per_step / (topology.num_chips * topology.chip.peak)
    return Forecast(
        topology=topology.name,
        chips=topology.num_chips,
        compiled_for=target.words,
        parameters=tree.num_parameters(model),
        active_parameters=num_active(model),
        tokens_per_step=plan.tokens_per_step,
        compute_seconds=time.products + time.attention,
        memory_seconds=time.memory,
        communication_seconds=communication,
        step_seconds=seconds,
        step_seconds_exposed=exposed,
        step_seconds_scheduled=scheduled,
        tokens_per_second=plan.tokens_per_step / seconds,
        mfu=flops.causal * per_second / seconds,
        mfu_exposed=flops.causal * per_second / exposed,
        mfu_scheduled=None if scheduled is None else flops.causal * per_second / scheduled,
        mfu_palm=flops.palm * per_second / seconds,
        memory_bytes=step.num_bytes,
        memory_limit=int(topology.chip.memory),
        recomputation=step.remat_policy,
        kernels=dict(kernels(hlo)) if target.is_card else {},
    )


@dataclass(frozen=True)
class _Target:
    """What a step is compiled for.

    Attributes:
        words: which devices, by which compiler.
        is_card: NVIDIA cards, by their own compiler.
        tracing: what the step is traced in.
    """

    devices: Sequence[Any]
    words: str
    is_card: bool = False
    tracing: AbstractContextManager[None] = field(default_factory=nullcontext)


def _target(topology: Topology) -> _Target:
    if has_compiler(topology):
        absent, cuda = aot_devices(topology), topology.chip.cuda
        tracing = nullcontext() if cuda is None else compiling_for_cuda(cuda.capability)
        return _Target(absent.devices, absent.compiler, cuda is not None, tracing)
    if topology.num_chips > _MOST_SIMULATED:
        raise ConfigError(
            f"--topology {topology.name}: {topology.num_chips} chips; jax compiles for {_MOST_SIMULATED} simulated devices at"
            f" the most. Take fewer chips, or compile for the real ones: {_REAL[topology.chip.platform]}"
        )
    devices = jax.devices("cpu")
    if len(devices) < topology.num_chips:
        raise ConfigError(f"--topology {topology.name}: jax simulates {len(devices)} devices; it was already in use")
    words = f"{topology.num_chips} simulated CPU devices, whose collectives are float32"
    return _Target(devices[: topology.num_chips], f"{words} ({_REAL[topology.chip.platform]})")


def _speed(topology: Topology, dtype: Any) -> Speed:
    chip = topology.chip
    peak = chip.peak_of(dtype)
    return Speed(peak * _PRODUCTS_SHARE, peak * _ATTENTION_SHARE, chip.memory_bandwidth * _MEMORY_SHARE)


def _by_formula(plan: Plan, topology: Topology, *, again: bool) -> Seconds:
    """The model's operations, a third more where everything is recomputed, and its state, read and written."""
    flops = plan.config.model.flops_per_token(plan.state_builder.Vocab.size).causal * plan.tokens_per_step
    executed = flops * (4 / 3 if again else 1) / topology.num_chips
    model = plan.state_builder.abstract_state(plan.phases[0]).model
    state = _STATE_TRAFFIC * tree.num_parameters(model) * plan.precision.params.itemsize
    spread = plan.mesh.data * plan.mesh.model
    return Seconds(
        products=executed / (topology.chip.peak_of(plan.precision.compute) * GEMM_SHARE),
        memory=state / spread / topology.chip.memory_bandwidth,
    )


def _seconds(collective: Collective, plan: Plan, topology: Topology) -> float:
    """A ring over the likely group, at the speed of the slowest link between its members.

    Parameters are gathered over `data`, whose members lie `model` devices apart; sums over replicas span everything.
    """
    group, span = plan.mesh.data, plan.mesh.data * plan.mesh.model
    if group == 1 or (plan.mesh.replica > 1 and collective.kind == "all-reduce"):
        group = span = topology.num_chips
    passes = {"all-reduce": 2.0, "reduce-scatter": float(group)}.get(collective.kind, 1.0)
    return passes * collective.num_bytes * (group - 1) / group / topology.bandwidth(span)


def _rows(one: Forecast) -> list[tuple[str, str]]:
    memory = "unknown" if one.memory_bytes is None else gib(one.memory_bytes)
    known = one.step_seconds_scheduled is not None and one.mfu_scheduled is not None
    seconds = f"{one.step_seconds_scheduled:.3f} s as scheduled, " if known else ""
    mfu = f"{one.mfu_scheduled:.1%} as scheduled, " if known else ""
    return [
        ("compiled for", f"{one.compiled_for}, recomputation {one.recomputation}"),
        ("parameters", f"{one.parameters:,}, {one.active_parameters:,} of them active for a token"),
        (
            "step",
            f"{one.tokens_per_step:,} tokens, {one.step_seconds:.3f} s ({seconds}{one.step_seconds_exposed:.3f} s exposed)",
        ),
        ("of it", f"{one.compute_seconds:.3f} s products and attention, {one.memory_seconds:.3f} s memory"),
        ("communication", f"{one.communication_seconds:.3f} s"),
        ("tokens/s", f"{one.tokens_per_second:,.0f} ({one.tokens_per_second / one.chips:,.0f} a chip)"),
        ("MFU", f"{one.mfu:.1%} ({mfu}{one.mfu_exposed:.1%} exposed); attention counted in full {one.mfu_palm:.1%}"),
        ("kernels", ", ".join(f"{name} x {n}" for name, n in one.kernels.items()) or "not known"),
        ("memory a chip", f"{memory} of {gib(one.memory_limit)}"),
    ]
