"""The report at the end of a run."""

import gzip
import lzma
from collections.abc import Iterable

from jaxlm.observe.console import Console, table
from jaxlm.observe.plots import Records, loss_curve, schedule_curve, step_time_histogram, step_times
from jaxlm.observe.trackers import read_jsonl
from jaxlm.run.plan import Plan

_MAX_COMPRESSED_BYTES = 64 << 20


def final_report(plan: Plan, console: Console) -> None:
    """Logs the final losses, bits per byte next to those of compressors, and the paths of the results; writes the plots."""
    records = read_jsonl(plan.log_folder / "metrics.jsonl")
    latest = {name: value for record in records for name, value in record.items() if value is not None}
    checkpoint = plan.checkpoints.checkpoints()[-1].location
    rows = [
        ("steps", f"{int(latest.get('step', plan.num_steps))} of {plan.num_steps}"),
        ("training loss", _number(latest, "train/loss")),
    ]
    if "eval/loss" in latest:
        rows += [("validation loss", _number(latest, "eval/loss")), ("bits per byte", _number(latest, "eval/bpb"))]
        rows += compressors(plan.data[-1].validation_documents())
    rows += [
        ("checkpoint", str(checkpoint)),
        *write_plots(plan, records),
        ("metrics", str(plan.log_folder / "metrics.jsonl")),
        ("to sample", f'jaxlm sample --checkpoint {plan.checkpoints.location} --prompt "..."'),
    ]
    if plan.phases[-1].scheduled_steps is None:  # otherwise the run has ended early, because it should
        rows.append(("to train longer", f"run the same command with --trainer.num_train_steps {2 * plan.num_steps}"))
    console.log(table("report", rows))


def write_plots(plan: Plan, records: Records) -> list[tuple[str, str]]:
    """Writes `loss.png`, `schedule.png` and `step_time.png` to the log folder, and returns report rows for them."""
    try:
        return _write_plots(plan, records)
    except OSError as error:
        return [("plots", f"not written: {error}")]


def _write_plots(plan: Plan, records: Records) -> list[tuple[str, str]]:
    title = f"{plan.run_id}: {plan.num_steps} steps"
    loss, schedule, times = (plan.log_folder / f"{name}.png" for name in ("loss", "schedule", "step_time"))
    loss_curve(records, loss, title)
    schedule_curve(plan.phases, schedule, title)
    rows = [("loss curve", str(loss)), ("schedule", str(schedule))]
    measured = step_times(records, exclude={phase.start + 1 for phase in plan.phases})
    if measured is not None:
        step_time_histogram(measured, times, title)
        durations = f"median {measured.median_ms:.1f} ms, 99th percentile {measured.p99_ms:.1f} ms"
        rows.append(("step time", f"{durations}: {times}"))
    return rows


def compressors(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Report rows with the bits per byte of general-purpose compressors on the concatenated texts, as a baseline.

    Empty if the texts are larger than 64 MiB, which would take too long to compress.
    """
    raw = bytearray()
    for text in texts:
        raw += text.encode()
        if len(raw) > _MAX_COMPRESSED_BYTES:
            return []
    if not raw:  # the last phase has no validation text; an earlier one had
        return []
    sizes = {"gzip -9": len(gzip.compress(raw, 9)), "xz -9": len(lzma.compress(raw, preset=9))}
    return [
        (f"  {name} on all text", f"{8 * size / len(raw):.4f} ({len(raw):,} bytes)") for name, size in sizes.items()
    ]


def _number(latest: dict[str, float], name: str) -> str:
    return f"{latest[name]:.4f}" if name in latest else "none"
