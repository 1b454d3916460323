"""Forecasts the sampling of rollouts on the chips that train: the programs for the prompts and for the new tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from jaxlm.core.errors import counted
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import sharded_shapes
from jaxlm.hardware.hlo import bytes_per_device, planned_bytes, with_trip_count
from jaxlm.hardware.topologies import Topology
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.responses import compile_sampling
from jaxlm.observe.console import exact_duration
from jaxlm.plan.plan import Plan
from jaxlm.session.compilation.options import step_options
from jaxlm.session.compilation.step import gib
from jaxlm.session.references import abstract_references
from jaxlm.systems.forecast.roofline import Estimate, estimate_kernels


@dataclass(frozen=True)
class SamplingForecast:
    """The forecast of what is sampled for a rollout, if prompts and responses are as long as they may be.

    Seconds are those of the compiler's schedule.

    Attributes:
        rows: responses that are sampled at the same time.
        calls: number of times that as many are sampled for a rollout.
        steps: number of steps that train on a rollout.
        prompt_tokens, new_tokens: tokens of a prompt and of a response.
        prompt_seconds: time to read the prompts of one call and sample the first token of each.
        token_seconds: time for each further token of all rows of a call.
        token_seconds_exposed: the same with no communication beside computation.
        token_compute_seconds: the part of matrix products and attention.
        token_memory_seconds: the part of memory-bound kernels.
        token_communication_seconds: time of the collectives of a token, hidden or not.
        rollout_seconds: all calls of a rollout.
        tokens_per_second: new tokens of all rows.
        memory_bytes: memory per chip, with the state of the training step.
        cache_bytes: the part of it that keys and values take.
        collectives: kind -> (number, output bytes) for each further token on one chip.
    """

    rows: int
    calls: int
    steps: int
    prompt_tokens: int
    new_tokens: int
    prompt_seconds: float
    token_seconds: float
    token_seconds_exposed: float
    token_compute_seconds: float
    token_memory_seconds: float
    token_communication_seconds: float
    rollout_seconds: float
    tokens_per_second: float
    memory_bytes: int | None
    cache_bytes: int
    collectives: dict[str, tuple[int, int]]

    def rows_of_table(self, memory_limit: int) -> list[tuple[str, str]]:
        """Rows of the table of a forecast."""
        token, exposed = exact_duration(self.token_seconds), exact_duration(self.token_seconds_exposed)
        parts = (self.token_compute_seconds, self.token_memory_seconds, self.token_communication_seconds)
        compute, traffic, communication = map(exact_duration, parts)
        spent = f"{compute} matrix products, {traffic} memory, {communication} communication"
        size = f"{self.calls} x {self.rows} responses of {self.new_tokens:,} tokens to {self.prompt_tokens:,}"
        memory = "unknown" if self.memory_bytes is None else gib(self.memory_bytes)
        held = f"{memory} of {gib(memory_limit)}, {gib(self.cache_bytes)} of it keys and values"
        return [
            ("rollout", f"{exact_duration(self.rollout_seconds)} before every {counted(self.steps, 'step')}: {size}"),
            ("rollout: prompts", f"{exact_duration(self.prompt_seconds)} for {self.rows} rows"),
            ("rollout: new token", f"{token} ({exposed} exposed) for {self.rows} rows: {spent}"),
            ("rollout: collectives", f"{moved(self.collectives)}, for each new token"),
            ("rollout: tokens/s", f"{self.tokens_per_second:,.0f}"),
            ("rollout: memory per chip", held),
        ]


def forecast_sampling(
    plan: Plan, phase: Phase, topology: Topology, log: Callable[[str], None]
) -> SamplingForecast | None:
    """The forecast for a phase on NVIDIA GPUs; None if it samples nothing on the chips that train.

    Call it inside `plan.layout.use()`.
    """
    sampled = plan.data[phase.index].batch_spec(phase.model.seq_len).sampled
    if sampled is None:
        return None
    num_rows = sampled.num_rows(plan.batches.of(phase).largest.size)
    rows = sampled.rows_at_once(num_rows)
    log(f"compiling the programs that sample {rows} responses ...")
    state = plan.state_builder.abstract_state(phase)
    model = sharded_shapes(jax.eval_shape(plan.precision.cast_to_compute, state.model), plan.layout)
    lengths, options = (sampled.prompt_tokens, sampled.new_tokens), tuple(step_options(plan).xla.items())
    programs = compile_sampling(model, rows, *lengths, sampled.sampling, options)
    of = lambda hlo: estimate_kernels(hlo, topology, plan.mesh, plan.precision.compute)  # noqa: E731
    loop = programs.tokens.as_text() or ""
    prompts = of(programs.prompts.as_text() or "")
    once, twice = of(with_trip_count(loop, 1)), of(with_trip_count(loop, 2))
    token = twice.kernels + once.kernels * -1
    token_seconds = _seconds(twice) - _seconds(once)
    prompt_seconds = _seconds(prompts) + _seconds(once) - token_seconds  # what runs around the loop runs once
    calls = -(-num_rows // rows)
    rollout_seconds = calls * (prompt_seconds + (sampled.new_tokens - 1) * token_seconds)
    needed = [planned_bytes(program) for program in (programs.prompts, programs.tokens)]
    return SamplingForecast(
        rows=rows,
        calls=calls,
        steps=sampled.num_steps,
        prompt_tokens=sampled.prompt_tokens,
        new_tokens=sampled.new_tokens,
        prompt_seconds=prompt_seconds,
        token_seconds=token_seconds,
        token_seconds_exposed=twice.exposed - once.exposed,
        token_compute_seconds=token.products + token.attention,
        token_memory_seconds=token.memory,
        token_communication_seconds=twice.communication - once.communication,
        rollout_seconds=rollout_seconds,
        tokens_per_second=num_rows * sampled.new_tokens / rollout_seconds,
        memory_bytes=None if None in needed else _resident_bytes(plan, phase, model) + max(n or 0 for n in needed),
        cache_bytes=sum(map(bytes_per_device, jax.tree.leaves(programs.cache))),
        collectives=_difference(twice.collectives, once.collectives),
    )


def moved(collectives: Mapping[str, tuple[int, int]]) -> str:
    """Collectives by kind, in words."""
    return ", ".join(f"{kind}: {number}, {gib(size)}" for kind, (number, size) in collectives.items()) or "none"


def _seconds(estimate: Estimate) -> float:
    assert estimate.scheduled is not None, "the kernels are known"
    return estimate.scheduled


def _difference(more: Mapping[str, tuple[int, int]], less: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    differences = {kind: tuple(a - b for a, b in zip(more[kind], less.get(kind, (0, 0)), strict=True)) for kind in more}
    return {kind: (number, size) for kind, (number, size) in differences.items() if number}


def _resident_bytes(plan: Plan, phase: Phase, model: LanguageModel) -> int:
    """Bytes per device of state and references, which stay while the model samples, without what is in the model as well.

    Args:
        model: in the compute dtypes. Arrays of other dtypes are copies.
    """
    state = sharded_shapes(plan.state_builder.abstract_state(phase), plan.layout)
    pairs = zip(*map(jax.tree.leaves, (state.model, model)), strict=True)
    shared = [stored for stored, sampling in pairs if stored.dtype == sampling.dtype]
    total = sum(map(bytes_per_device, jax.tree.leaves((state, abstract_references(plan, phase)))))
    return total - sum(map(bytes_per_device, shared))
