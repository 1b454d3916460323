"""A configuration on machines that one does not have: does it fit, how fast could it be, and what limits it.

TPUs are compiled for ahead of time by their real compiler, where `libtpu` is installed (no TPU is needed for that). For
everything else the step is compiled for as many simulated CPU devices: its collectives are then those of the partitioner,
and memory is what the CPU compiler plans, which knows no fused kernels.

The time is a roofline: matrix products at the share of the peak that large ones reach, state read and written once,
collectives at the speed of the links. The optimistic end hides all communication behind computation, the pessimistic one
none.
"""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxlm.compiling import compile_step, gib
from jaxlm.config import RunConfig, run_id_of
from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.programs import Collective, collectives_a_run
from jaxlm.core.topologies import Topology
from jaxlm.dry_run import assumed_vocabulary
from jaxlm.engine.console import Console, table
from jaxlm.models.experts import num_active
from jaxlm.models.recompute import FULL
from jaxlm.plan import Plan, make_plan

# What a large bf16 matrix product reaches of a data sheet's peak; measured on one H200: 0.78 to 0.81.
GEMM_SHARE = 0.8
_MOST_SIMULATED = 2048  # XLA takes those beyond for devices of another process, which its CPUs do not compile for
_STATE_TRAFFIC = 2 * 3 + 2  # parameter and two moments, read and written; the gradient, written and read


@dataclass(frozen=True)
class Forecast:
    """What is to be expected of a step.

    Attributes:
        compiled_for: the real chip, or simulated devices.
        compute_seconds, state_seconds, communication_seconds: of one step, each on its own.
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
    state_seconds: float
    communication_seconds: float
    step_seconds: float
    step_seconds_exposed: float
    tokens_per_second: float
    mfu: float
    mfu_exposed: float
    mfu_palm: float
    memory_bytes: int | None
    memory_limit: int
    recomputation: str


def simulate_devices(topologies: Sequence[Topology]) -> None:
    """Makes jax simulate as many CPU devices as the largest topology has. Call it before jax is used."""
    count = max(topology.num_chips for topology in topologies)
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def forecast_all(config: RunConfig, topologies: Sequence[Topology], console: Console) -> None:
    """Shows a forecast for each topology, and one JSON line for each."""
    found = [forecast(config, topology, console) for topology in topologies]
    for one in found:
        console.show(table(f"{one.topology}: {one.chips} chips", _rows(one)))
    for one in found:
        console.show(json.dumps(dataclasses.asdict(one)))


def forecast(config: RunConfig, topology: Topology, console: Console) -> Forecast:
    """Compiles the first phase's step for the topology and works out its time."""
    devices, compiled_for = _devices(topology)
    plan = make_plan(config, run_id_of(config), assumed_vocabulary(config)[0], devices)
    with plan.layout.use():
        step = compile_step(plan, plan.phases[0], console.show, limit=int(topology.chip.memory))
    reached = topology.chip.peak_of(plan.precision.compute) * GEMM_SHARE
    compute = _executed_flops(plan, again=step.keep == FULL) / (topology.num_chips * reached)
    state = _state_bytes(plan) / (plan.mesh.data * plan.mesh.model) / topology.chip.memory_bandwidth
    moved = collectives_a_run(step.call.as_text() or "")
    communication = sum(n * _seconds(collective, plan, topology) for collective, n in moved.items())
    seconds, exposed = max(compute, communication) + state, compute + communication + state
    model = plan.recipe.abstract_state(plan.phases[0]).model
    flops = config.model.flops_per_token(plan.recipe.Vocab.size)
    per_second = plan.tokens_per_step / (topology.num_chips * topology.chip.peak)
    return Forecast(
        topology=topology.name,
        chips=topology.num_chips,
        compiled_for=compiled_for,
        parameters=tree.num_parameters(model),
        active_parameters=num_active(model),
        tokens_per_step=plan.tokens_per_step,
        compute_seconds=compute,
        state_seconds=state,
        communication_seconds=communication,
        step_seconds=seconds,
        step_seconds_exposed=exposed,
        tokens_per_second=plan.tokens_per_step / seconds,
        mfu=flops.causal * per_second / seconds,
        mfu_exposed=flops.causal * per_second / exposed,
        mfu_palm=flops.palm * per_second / seconds,
        memory_bytes=step.num_bytes,
        memory_limit=int(topology.chip.memory),
        recomputation=step.keep,
    )


def _devices(topology: Topology) -> tuple[Sequence[Any], str]:
    if topology.chip.platform == "tpu" and importlib.util.find_spec("libtpu") is not None:
        from jax.experimental import topologies

        described = topologies.get_topology_desc(platform="tpu", topology_name=topology.compiler_name)
        return described.devices, f"{topology.compiler_name}, ahead of time"
    if topology.num_chips > _MOST_SIMULATED:
        raise ConfigError(
            f"--topology {topology.name}: {topology.num_chips} chips; jax compiles for {_MOST_SIMULATED} simulated devices at"
            " the most. Take fewer chips, or, for TPUs, install libtpu, which compiles for the real ones"
        )
    devices = jax.devices("cpu")
    if len(devices) < topology.num_chips:
        raise ConfigError(f"--topology {topology.name}: jax simulates {len(devices)} devices; it was already in use")
    return devices[: topology.num_chips], f"{topology.num_chips} simulated CPU devices"


def _executed_flops(plan: Plan, *, again: bool) -> float:
    """All that is computed in a step: the model's operations, and a third more where everything is recomputed."""
    flops = plan.config.model.flops_per_token(plan.recipe.Vocab.size).causal * plan.tokens_per_step
    return flops * (4 / 3 if again else 1)


def _state_bytes(plan: Plan) -> float:
    model = plan.recipe.abstract_state(plan.phases[0]).model
    return _STATE_TRAFFIC * tree.num_parameters(model) * plan.precision.params.itemsize


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
    return [
        ("compiled for", f"{one.compiled_for}, recomputation {one.recomputation}"),
        ("parameters", f"{one.parameters:,}, {one.active_parameters:,} of them active for a token"),
        (
            "step",
            f"{one.tokens_per_step:,} tokens, {one.step_seconds:.3f} s ({one.step_seconds_exposed:.3f} s exposed)",
        ),
        ("of it", f"computation {one.compute_seconds:.3f} s, communication {one.communication_seconds:.3f} s"),
        ("state", f"{one.state_seconds:.4f} s to read and write"),
        ("tokens/s", f"{one.tokens_per_second:,.0f} ({one.tokens_per_second / one.chips:,.0f} a chip)"),
        ("MFU", f"{one.mfu:.1%}, {one.mfu_exposed:.1%} exposed; attention counted in full {one.mfu_palm:.1%}"),
        ("memory a chip", f"{memory} of {gib(one.memory_limit)}"),
    ]
