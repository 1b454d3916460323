"""Tracing and compiling the training step ahead of its first batch, and keeping what was compiled."""

import time
from collections.abc import Callable

import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core.axes import BATCH, MICROBATCH
from jaxlm.core.sharding import Layout
from jaxlm.core.types import TokenBatch
from jaxlm.engine.agreement import Ballot, Wishes
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState, shardings
from jaxlm.engine.step import make_train_step
from jaxlm.plan import Plan


def keep_compiled_programs(folder: str | None) -> None:
    """Has jax keep compiled programs in a folder, so that the next start finds them. A broken folder only warns."""
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_raise_persistent_cache_errors", False)


def lower_step(plan: Plan, phase: Phase) -> jax.stages.Lowered:
    """The traced training step of a phase, from shapes alone. Call it inside `plan.layout.use()`."""
    abstract = plan.recipe.abstract_state(phase)
    step = make_train_step(phase, plan.layout, plan.precision, abstract)
    ballot = Ballot(plan.layout).cast(Wishes())
    return step.lower(_placed(abstract, plan.layout), _abstract_batch(plan), ballot)


def compile_step(plan: Plan, phase: Phase, show: Callable[[str], None]) -> jax.stages.Compiled:
    """The compiled training step of a phase, announced and timed."""
    show(f"compiling the step of phase '{phase.name}' ...")
    began = time.perf_counter()
    compiled = lower_step(plan, phase).compile()
    show(f"compiled in {time.perf_counter() - began:.1f} s; temporary memory a device {_temporary(compiled)}")
    return compiled


def _temporary(compiled: jax.stages.Compiled) -> str:
    memory = compiled.memory_analysis()
    return "unknown" if memory is None else gib(memory.temp_size_in_bytes)


def gib(num_bytes: int) -> str:
    """`1.234 GiB`."""
    return f"{num_bytes / 2**30:.3f} GiB"


def _placed(abstract: RunState, layout: Layout) -> RunState:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        shardings(abstract, layout),
    )


def _abstract_batch(plan: Plan) -> TokenBatch:
    axes = (
        hax.Axis(MICROBATCH, plan.batches.num_microbatches),
        hax.Axis(BATCH, plan.batches.microbatch),
        plan.config.model.Pos,
    )
    place = plan.layout.compute_sharding(axes)
    shape = tuple(axis.size for axis in axes)

    def column(dtype) -> hax.NamedArray:
        return hax.NamedArray(jax.ShapeDtypeStruct(shape, dtype, sharding=place), axes)  # type: ignore[arg-type]

    ids = column(jnp.int32)
    return TokenBatch(tokens=ids, targets=ids, loss_mask=column(jnp.float32), segment_ids=ids, positions=ids)
