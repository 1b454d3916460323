"""Tracing and compiling the training step ahead of its first batch."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.core.imports import gc_paused

import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core.axes import BATCH, MICROBATCH
from jaxlm.core.batch_schedule import BatchStage
from jaxlm.core.errors import ConfigError
from jaxlm.core.hardware import memory_limit
from jaxlm.core.runtime import all_processes
from jaxlm.core.sharding import Layout
from jaxlm.core.types import TokenBatch
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState, shardings
from jaxlm.engine.step import StepReport, make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.forecast.hlo import has_compiler_remat
from jaxlm.models.remat import AUTO, CANDIDATES, CHEAP, NONE, auto_policy, parse_remat
from jaxlm.run.plan import Plan

USABLE = 0.92
"""The share of a device's memory that a step may plan with; the rest goes to fragments and to other programs."""


@dataclass(frozen=True)
class CompiledStep:
    """The training step of a phase, ready to run.

    Attributes:
        call: (state, batch, flags) -> (state, report).
        traced: what it was compiled from.
        keep: the recomputation policy, the one that was found to fit where it was to be chosen.
        seconds: tracing and compiling took.
        num_bytes: memory of a device while it runs; None where the compiler does not say.
        limit: memory that a device has; None where it is not known.
        squeezed: the compiler computes some of it again on its own account, to fit it into that memory.
    """

    call: jax.stages.Compiled
    traced: jax.stages.Traced
    remat_policy: str
    seconds: float
    num_bytes: int | None
    limit: int | None
    compiler_remat: bool

    @property
    def fits(self) -> bool:
        """Whether a device has the memory, as far as that is known."""
        return self.num_bytes is None or self.limit is None or self.num_bytes <= USABLE * self.limit

    def require_room(self) -> None:
        """Raises `ConfigError` where the step needs more memory than there is at all, before the machine finds out."""
        if self.num_bytes is not None and self.limit is not None and self.num_bytes > self.limit:
            raise ConfigError(
                f"the training step needs {gib(self.num_bytes)} a device, and there are {gib(self.limit)}. {_LESS}"
            )

    def __str__(self) -> str:
        memory = "unknown" if self.num_bytes is None else gib(self.num_bytes)
        there = "" if self.limit is None else f" of {gib(self.limit)}"
        return f"compiled in {self.seconds:.1f} s; memory a device {memory}{there}"


@dataclass(frozen=True)
class StepPrograms:
    """The training steps of a phase, a program for each shape of its batches. Called as one of them.

    Attributes:
        by_shape: (micro-batches, sequences of one) -> the step.
    """

    by_shape: Mapping[tuple[int, int], CompiledStep]

    def __call__(self, state: RunState, batch: TokenBatch, flags: jax.Array) -> tuple[RunState, StepReport]:
        """See `make_train_step`."""
        num_microbatches, microbatch, _ = batch.tokens.array.shape
        return self.by_shape[num_microbatches, microbatch].call(state, batch, flags)

    def require_room(self) -> None:
        """See `CompiledStep.require_room`."""
        for step in self.by_shape.values():
            step.require_room()

    def of(self, stage: BatchStage) -> CompiledStep:
        """The step for the batches of a stage."""
        return self.by_shape[stage.shape]


def trace_step(
    plan: Plan, phase: Phase, remat_policy: str = CHEAP, *, stage: BatchStage | None = None
) -> jax.stages.Traced:
    """The traced training step of a phase, from shapes alone. Call it inside `plan.layout.use()`.

    Args:
        keep: what `model.gradient_checkpointing: auto` stands for.
        stage: whose batches it takes; the largest ones where that is None.
    """
    abstract = plan.state_builder.abstract_state(phase)
    step = make_train_step(phase, plan.layout, plan.precision, abstract, plan.config.trainer.watch)
    with auto_policy(remat_policy):
        return step.trace(_placed(abstract, plan.layout), abstract_batch(plan, stage), FlagSync.abstract(plan.layout))


def compile_steps(plan: Plan, phase: Phase, first_step: int, log: Callable[[str], None]) -> StepPrograms:
    """The compiled steps for all batches of a phase from `first_step` on: what does not fit is known before any trains."""
    stages = plan.batches.train.between(first_step, phase.end)
    by_shape = {stage.shape: stage for stage in reversed(stages)}
    return StepPrograms({shape: compile_step(plan, phase, log, stage=by_shape[shape]) for shape in reversed(by_shape)})


@gc_paused()
def compile_step(
    plan: Plan,
    phase: Phase,
    log: Callable[[str], None],
    *,
    stage: BatchStage | None = None,
    limit: int | None = None,
) -> CompiledStep:
    """The compiled training step of a phase, announced and timed.

    Where the configuration leaves recomputation to be chosen, it is the least that fits into memory, found by compiling;
    the next start finds what was compiled, whether it fitted or not, in the cache.

    Args:
        stage: whose batches it takes; the largest ones where that is None.
        limit: bytes of memory that a device has, where it is not one of those that are there.
    """
    stage = stage or plan.batches.train.largest
    size = f" for batches of {stage.size}" if len(plan.batches.train.stages) > 1 else ""
    log(f"compiling the step of phase '{phase.name}'{size} ...")
    automatic = plan.config.model.gradient_checkpointing == AUTO
    candidates = CANDIDATES[plan.layout.platform] if automatic else (CHEAP,)
    limit = memory_limit() if limit is None else limit
    for remat_policy in candidates:
        named = f" (recomputation {remat_policy})" if automatic else ""
        last = remat_policy == candidates[-1]
        step, refusal = _attempt(plan, phase, stage, remat_policy, limit)
        # One answer for all processes: their programs must be the same, whatever memory each of them has.
        # What the compiler computes again are whole matrix products, where `cheap` makes norms and activations again.
        roomy = all_processes(step is not None and step.fits and not (step.compiler_remat and remat_policy == NONE))
        if all_processes(step is not None):
            assert step is not None
            log(f"{step}{named}")
            if roomy or last:
                break
            log("  too much for what there is; recomputing more")
        elif last:
            raise ConfigError(f"the training step does not fit into a device's memory: {refusal}. {_LESS}")
        else:
            log(f"does not fit into memory{named}; recomputing more")
    assert step is not None
    if not all_processes(step.fits):
        log(f"  warning: more than {USABLE:.0%} of what there is. {_LESS}")
    return step


def _attempt(
    plan: Plan, phase: Phase, stage: BatchStage, remat_policy: str, limit: int | None
) -> tuple[CompiledStep | None, str]:
    """The compiled step, or None and what the compiler says where it finds no memory for it."""
    try:
        return _compile(plan, phase, stage, remat_policy, limit), ""
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(_NO_MEMORY):
            raise
        return None, str(error).splitlines()[0][:300]


def _compile(plan: Plan, phase: Phase, stage: BatchStage, remat_policy: str, limit: int | None) -> CompiledStep:
    began = time.perf_counter()
    options: Any = compiler_options(plan.layout.platform)  # jax declares what it takes by the default, None
    traced = trace_step(plan, phase, remat_policy, stage=stage)
    call = traced.lower().compile(options)
    memory = call.memory_analysis()
    needed = memory and (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    asked = parse_remat(plan.config.model.gradient_checkpointing)
    policy = remat_policy if asked == AUTO else asked if isinstance(asked, str) else ", ".join(asked)
    compiler_remat = (
        limit is not None
        and needed is not None
        and needed > _CLOSE * limit
        and has_compiler_remat(call.as_text() or "")
    )
    return CompiledStep(call, traced, policy, time.perf_counter() - began, needed, limit, compiler_remat)


_CLOSE = 0.7  # of the memory: a step that needs less has not been squeezed, and its text need not be read
_NO_MEMORY = "RESOURCE_EXHAUSTED"
_LESS = (
    "Less is needed with a smaller trainer.per_device_parallelism, trainer.mp 'p=f32,c=bfloat16', or parameters spread"
    " over more devices"
)


def gib(num_bytes: int) -> str:
    """`1.234 GiB`."""
    return f"{num_bytes / 2**30:.3f} GiB"


def _placed(abstract: RunState, layout: Layout) -> RunState:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        shardings(abstract, layout),
    )


def abstract_batch(plan: Plan, stage: BatchStage | None = None) -> TokenBatch:
    """Shapes, dtypes and places of a training batch {microbatch, batch, position}, the largest where no stage is named."""
    num_microbatches, microbatch = (stage or plan.batches.train.largest).shape
    axes = (
        hax.Axis(MICROBATCH, num_microbatches),
        hax.Axis(BATCH, microbatch),
        plan.config.model.Pos,
    )
    place = plan.layout.compute_sharding(axes)
    shape = tuple(axis.size for axis in axes)

    def column(dtype) -> hax.NamedArray:
        return hax.NamedArray(jax.ShapeDtypeStruct(shape, dtype, sharding=place), axes)  # type: ignore[arg-type]

    ids = column(jnp.int32)
    return TokenBatch(tokens=ids, targets=ids, loss_mask=column(jnp.float32), segment_ids=ids, positions=ids)


Options = dict[str, bool | int | str]

# Options of XLA by platform. They go to each compilation and not into the environment, so that they hold for the training
# step alone and need not be set before jax starts; what the user's XLA_FLAGS name is left to the user. An option is here
# only with a reason; docs/howto/watch.md has the same table.
TABLE: Mapping[str, Options] = {
    # Fast math, wider vectors, oneDNN, other schedulers: nothing measurable or slower.
    "cpu": {},
    # Starts collectives early and waits for them late; off by default in XLA. Without effect on one device.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "tpu": {},
}


def compiler_options(platform: str) -> Options:
    """The table's options for a platform, without those that `XLA_FLAGS` sets."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    named = {flag.lstrip("-").partition("=")[0] for flag in flags}
    return {name: value for name, value in TABLE[platform].items() if name not in named}
