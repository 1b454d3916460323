"""Traces and compiles the training step before its first batch."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxlm.core.imports import gc_paused

import jax

from jaxlm.core.axes import BATCH
from jaxlm.core.devices import HOST_MEMORY, host_memory, memory_limit
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import all_processes, is_main_process
from jaxlm.core.tracing import BlockSizes, tracing
from jaxlm.data.batch_schedule import BatchStage
from jaxlm.data.loader import leading_axes
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState, sharded_shapes
from jaxlm.engine.step import StepReport, make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.hardware.hlo import bytes_per_device, has_compiler_remat, host_bytes, planned_bytes
from jaxlm.models.remat import AUTO, CANDIDATES, CHEAP, FULL, NONE, RematPolicy, offloads, parse_remat, remat_name
from jaxlm.plan.plan import Plan
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.session.compilation.options import check_offload, step_options
from jaxlm.session.references import abstract_annotations, abstract_references

USABLE = 0.92
"""The fraction of a device's memory that a step may use; the rest is left for fragmentation and other programs."""


@dataclass(frozen=True)
class CompiledStep:
    """The training step of a phase, ready to run.

    Attributes:
        call: (state, refs, batch, flags) -> (state, report).
        traced: the traced step that was compiled.
        remat_policy: the remat policy; with `auto`, the one that was chosen.
        seconds: duration of tracing and compiling.
        num_bytes: memory per device that the step needs; None if the compiler does not report it.
        limit: memory of a device in bytes; None if unknown.
        compiler_remat: whether the compiler added rematerialization of its own to fit the step into memory.
        advice: how the step would need less memory.
        host_bytes: memory of the host per device, for what is offloaded.
    """

    call: jax.stages.Compiled
    traced: jax.stages.Traced
    remat_policy: str
    seconds: float
    num_bytes: int | None
    limit: int | None
    compiler_remat: bool
    advice: str
    host_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Tells whether the step fits into a device's usable memory, as far as known."""
        return self.num_bytes is None or self.limit is None or self.num_bytes <= USABLE * self.limit

    def check_fits_memory(self) -> None:
        """Raises `ConfigError` if the step needs more memory than a device has, instead of failing when it runs."""
        if self.num_bytes is not None and self.limit is not None and self.num_bytes > self.limit:
            raise ConfigError(
                f"the training step needs {gib(self.num_bytes)} per device, but only {gib(self.limit)} are available."
                f" {self.advice}"
            )
        num_devices, available = jax.local_device_count(), host_memory()
        if (needed := self.host_bytes * num_devices) > available:
            raise ConfigError(
                f"the training step needs {gib(needed)} of the host's memory for what its {num_devices} devices offload,"
                f" but the machine has {gib(available)}. Offload less: model.gradient_checkpointing.offload"
            )

    def __str__(self) -> str:
        memory = "unknown" if self.num_bytes is None else gib(self.num_bytes)
        available = "" if self.limit is None else f" of {gib(self.limit)}"
        on_host = f", and {gib(self.host_bytes)} of the host's" if self.host_bytes else ""
        return f"compiled in {self.seconds:.1f} s; memory per device {memory}{available}{on_host}"


@dataclass(frozen=True)
class StepPrograms:
    """The compiled training steps of a phase, one for each batch shape. A call runs the one for the batch's shape.

    Attributes:
        by_shape: (number of microbatches, sequences per microbatch) -> the step.
    """

    by_shape: Mapping[tuple[int, int], CompiledStep]

    def __call__(self, state: RunState, refs: Any, batch: Any, flags: jax.Array) -> tuple[RunState, StepReport]:
        num_microbatches, microbatch, *_ = jax.tree.leaves(batch)[0].shape
        return self.by_shape[num_microbatches, microbatch].call(state, refs, batch, flags)

    def check_fits_memory(self) -> None:
        for step in self.by_shape.values():
            step.check_fits_memory()

    def write(self, config: TrainerConfig, folder: Path, name: str) -> None:
        """Writes the jaxprs and the HLO of the programs of phase `name` into a folder, if configured."""
        enabled = {"jaxpr": config.log_jaxprs, "hlo": config.log_xla_hlo}
        texts = {"jaxpr": lambda step: str(step.traced.jaxpr), "hlo": lambda step: step.call.as_text() or ""}
        for form in (form for form in texts if enabled[form] and is_main_process()):
            folder.mkdir(parents=True, exist_ok=True)
            for (num_microbatches, microbatch), step in self.by_shape.items():
                shape = f".{num_microbatches}x{microbatch}" if len(self.by_shape) > 1 else ""
                (folder / f"{name}{shape}.{form}.txt").write_text(texts[form](step))


def trace_step(
    plan: Plan,
    phase: Phase,
    remat_policy: str = CHEAP,
    *,
    stage: BatchStage | None = None,
    sizes: BlockSizes | None = None,
) -> jax.stages.Traced:
    """Traces the training step of a phase from shapes only. Call it inside `plan.layout.use()`.

    Args:
        remat_policy: the policy to use for `model.gradient_checkpointing: auto`.
        stage: the stage whose batch shape to use; None means the largest.
        sizes: block sizes of the kernels; None leaves them to the kernels.
    """
    abstract = plan.state_builder.abstract_state(phase)
    step = make_train_step(phase, plan.layout, plan.precision, abstract, plan.config.trainer.watch)
    refs, batch = abstract_references(plan, phase), abstract_batch(plan, phase, stage)
    if phase.objective.facts.annotation_key is not None:
        batch = replace(batch, annotations=abstract_annotations(plan, phase, batch))
    with tracing(auto_remat=remat_policy, block_sizes=sizes or BlockSizes()):
        return step.trace(sharded_shapes(abstract, plan.layout), refs, batch, FlagSync.abstract(plan.layout))


def compile_steps(plan: Plan, phase: Phase, first_step: int, log: Callable[[str], None]) -> StepPrograms:
    """Compiles the steps for all batch shapes of a phase from `first_step` on, so that memory errors show before training."""
    check_state_fits(plan, phase, memory_limit())
    stages = plan.batches.of(phase).between(first_step, phase.end)
    by_shape = {stage.shape: stage for stage in reversed(stages)}
    return StepPrograms({shape: compile_step(plan, phase, log, stage=by_shape[shape]) for shape in reversed(by_shape)})


@gc_paused()
def compile_step(
    plan: Plan, phase: Phase, log: Callable[[str], None], *, stage: BatchStage | None = None, limit: int | None = None
) -> CompiledStep:
    """Compiles the training step of a phase and logs progress.

    With `model.gradient_checkpointing: auto`, it compiles the candidate policies in turn and takes the first that fits
    into memory, which recomputes the least. The compilation cache saves all of them for the next start.

    Args:
        stage: the stage whose batch shape to use; None means the largest.
        limit: memory of a device in bytes, if the devices are absent; None uses that of the available devices.
    """
    stage = stage or plan.batches.of(phase).largest
    size = f" for batches of {stage.size}" if len(plan.batches.of(phase).stages) > 1 else ""
    log(f"compiling the step of phase '{phase.name}'{size} ...")
    automatic = phase.model.gradient_checkpointing == AUTO
    candidates = CANDIDATES[plan.layout.platform] if automatic else (CHEAP,)
    limit = memory_limit() if limit is None else limit
    for remat_policy in candidates:
        policy_note = f" (remat policy {remat_policy})" if automatic else ""
        last = remat_policy == candidates[-1]
        step, compiler_error = None, ""
        try:
            step = _compile(plan, phase, stage, remat_policy, limit)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith(_NO_MEMORY):
                raise
            compiler_error = str(error).splitlines()[0][:300]
        # All processes must choose the same program, even if their devices have different memory.
        # The compiler's own remat recomputes whole matrix products; `cheap` recomputes only norms and activations.
        accepted = all_processes(step is not None and step.fits and not (step.compiler_remat and remat_policy == NONE))
        if all_processes(step is not None):
            assert step is not None
            log(f"{step}{policy_note}")
            if accepted or last:
                break
            log("  needs too much memory; trying the next remat policy")
        elif last:
            raise ConfigError(
                f"the training step does not fit into a device's memory: {compiler_error}. {_advice(plan, phase, stage)}"
            )
        else:
            log(f"does not fit into memory{policy_note}; trying the next remat policy")
    assert step is not None
    if not all_processes(step.fits):
        log(f"  warning: the step needs more than {USABLE:.0%} of a device's memory. {step.advice}")
    return step


def check_state_fits(plan: Plan, phase: Phase, limit: int | None) -> None:
    """Raises `ConfigError` if the state of a phase is larger than a device's memory, which compiling would find out later."""
    state = sharded_shapes(plan.state_builder.abstract_state(phase), plan.layout)
    on_device = [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.memory_kind != HOST_MEMORY]
    needed = sum(map(bytes_per_device, on_device))
    if not all_processes(limit is None or needed <= limit):
        shard = " Or shard the parameters: trainer.fsdp_axis: embed" if plan.config.trainer.fsdp_axis is None else ""
        raise ConfigError(
            f"phase '{phase.name}': parameters and optimizer state take {gib(needed)} per device, but only {gib(limit or 0)}"
            " are available. Make the model smaller, use more devices, or an optimizer with a smaller state (optimizer.state:"
            f" 8bit).{shard}"
        )


def _compile(plan: Plan, phase: Phase, stage: BatchStage, remat_policy: str, limit: int | None) -> CompiledStep:
    started = time.perf_counter()
    options = step_options(plan)
    traced = trace_step(plan, phase, remat_policy, stage=stage, sizes=options.sizes)
    xla: Any = options.xla  # JAX annotates the parameter by its default only, None
    configured = parse_remat(phase.model.gradient_checkpointing)
    if offloads(configured):
        check_offload(xla)
    call = traced.lower().compile(xla)
    num_bytes = planned_bytes(call)
    if configured != AUTO:
        remat_policy = remat_name(configured)
    compiler_remat = (
        limit is not None
        and num_bytes is not None
        and num_bytes > _REMAT_THRESHOLD * limit
        and has_compiler_remat(call.as_text() or "")
    )
    seconds = time.perf_counter() - started
    advice = _advice(plan, phase, stage)
    return CompiledStep(call, traced, remat_policy, seconds, num_bytes, limit, compiler_remat, advice, host_bytes(call))


_REMAT_THRESHOLD = 0.7  # fraction of memory below which the compiler adds no remat, so its HLO need not be searched
_NO_MEMORY = "RESOURCE_EXHAUSTED"


def _advice(plan: Plan, phase: Phase, stage: BatchStage) -> str:
    """Says what would make a step need less memory and has not been done yet."""
    policy = parse_remat(phase.model.gradient_checkpointing)
    can_shard = plan.config.trainer.fsdp_axis is None and plan.layout.mesh.size > 1
    ways = [
        _fewer_at_once(plan, phase, stage),
        "set trainer.mp: 'p=f32,c=bfloat16'" if plan.precision.compute.itemsize > 2 else "",
        _less_saved(plan, policy),
        "shard the parameters: trainer.fsdp_axis: embed" if can_shard else "use more devices",
    ]
    *first, last = filter(None, ways)
    return f"To use less memory, {', '.join(first)}, or {last}"


def _less_saved(plan: Plan, policy: RematPolicy) -> str:
    if policy not in (AUTO, FULL) and not offloads(policy):
        return "set model.gradient_checkpointing: full"
    on_host = plan.layout.platform != "cpu" and not offloads(policy)
    return "save each layer's input on the host: model.gradient_checkpointing.offload: [residual]" if on_host else ""


def _fewer_at_once(plan: Plan, phase: Phase, stage: BatchStage) -> str:
    trainer = plan.config.trainer
    at_once = -(-stage.microbatch // plan.layout.num_shards(BATCH))
    if at_once == 1:
        return f"lower model.seq_len ({phase.model.seq_len}; a device computes one sequence at a time already)"
    for name in ("per_device_parallelism", "per_device_train_parallelism", "max_per_device_parallelism"):
        if getattr(trainer, name) not in (-1, None):
            return f"lower trainer.{name} ({getattr(trainer, name)})"
    if phase.objective.facts.compares_examples:
        return f"lower trainer.train_batch_size ({stage.size})"
    return (
        f"set trainer.per_device_parallelism (a device computes its {at_once} sequences at once; the batch stays the same)"
        " or lower trainer.train_batch_size"
    )


def gib(num_bytes: int) -> str:
    """Formats bytes as `1.234 GiB`."""
    return f"{num_bytes / 2**30:.3f} GiB"


def abstract_batch(plan: Plan, phase: Phase, stage: BatchStage | None = None) -> Any:
    """Shapes, dtypes and shardings of a training batch {microbatch, batch, ...}; without a stage, of the largest."""
    spec = plan.data[phase.index].batch_spec(phase.model.seq_len)
    return spec.abstract(leading_axes(stage or plan.batches.of(phase).largest), plan.layout)
