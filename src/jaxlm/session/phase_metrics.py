"""Who receives the metrics of a phase's steps, and what a step amounts to."""

import jax

from jaxlm.core.devices import peak_flops
from jaxlm.engine.checkpoint.manifest import History
from jaxlm.engine.control import Control
from jaxlm.engine.metrics import AsyncMetrics, CrashListener, Workload
from jaxlm.engine.phases import Phase
from jaxlm.observe.callbacks import CallbackListener
from jaxlm.observe.hooks import ProgressListener, TrackerListener
from jaxlm.plan.num_steps import epoch_of
from jaxlm.session.phase_data import PhaseData
from jaxlm.session.references import flops_per_token
from jaxlm.session.run import Run


def open_metrics(
    run: Run, phase: Phase, data: PhaseData, control: Control, history: History, skipped: int
) -> AsyncMetrics:
    """The queue of the phase's steps. Args: skipped: number of updates skipped in the run so far."""
    trainer, records = run.plan.config.trainer, run.records
    whole_run = [
        run.writer.health.metrics,
        *(ledger.metrics for ledger in records.ledgers),
        records.loop_state.metrics,
    ]
    follow = CallbackListener(
        records.callbacks,
        whole_run,
        epoch_of=epoch_of(phase, data.data, run.plan.batches.of(phase)),
        last_step=phase.end,
        skipped=skipped,
    )
    progress = ProgressListener(
        run.console,
        phase,
        data.batches.records,
        skipped=skipped,
        guards=phase.guards(run.plan.precision),
        can_show_batches=not history.attempt and data.data.has_examples_per_step,
        tells_end=len(run.plan.phases) > 1,
    )
    listeners = (
        *records.ledgers,
        records.loop_state,
        TrackerListener(records.trackers, whole_run),
        *([follow] if records.callbacks else []),
        progress,
        CrashListener(on_nan=trainer.crash_on_nan, on_inf=trainer.crash_on_inf),
    )
    return AsyncMetrics(phase.name, _workload(run, phase), listeners, trainer.watch, control.after_step)


def _workload(run: Run, phase: Phase) -> Workload:
    """What a step of a phase amounts to, for throughput and MFU."""
    plan, devices = run.plan, jax.devices()
    peak = peak_flops(devices[0].device_kind)
    tokens = plan.tokens_per_example(phase)
    earlier = [workload for number, workload in run.records.workloads.items() if number < phase.index]
    workload = Workload(
        batches=plan.batches.of(phase),
        tokens=tokens,
        flops=flops_per_token(plan, phase).causal * tokens,
        peak_flops=None if peak is None else peak * len(devices),
        num_steps=plan.num_steps,
        previous=earlier[-1].totals(phase.start) if earlier else run.records.previous,
    )
    run.records.workloads[phase.index] = workload
    return workload
