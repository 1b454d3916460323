"""What came out: the few lines at the end of a run."""

import gzip
import lzma
from collections.abc import Iterable

from jaxlm.observe.console import Console, table
from jaxlm.observe.plots import Records, loss_curve, schedule_curve, step_time_histogram, step_times
from jaxlm.observe.trackers import read_jsonl
from jaxlm.run.plan import Plan

_MAX_COMPRESSED_BYTES = 64 << 20


def final_report(plan: Plan, console: Console) -> None:
    """Shows validation loss, bits per byte beside compressors', and where everything is; draws the pictures."""
    records = read_jsonl(plan.log_folder / "metrics.jsonl")
    latest = {name: value for record in records for name, value in record.items() if value is not None}
    checkpoint = plan.checkpoints.checkpoints()[-1].place
    rows = [
        ("steps", f"{int(latest.get('step', plan.num_steps))} of {plan.num_steps}"),
        ("training loss", _number(latest, "train/loss")),
    ]
    if "eval/loss" in latest:
        rows += [("validation loss", _number(latest, "eval/loss")), ("bits per byte", _number(latest, "eval/bpb"))]
        rows += compressors(plan.data[-1].validation_documents())
    rows += [
        ("checkpoint", str(checkpoint)),
        *draw_pictures(plan, records),
        ("numbers", str(plan.log_folder / "metrics.jsonl")),
        ("to sample", f'python -m jaxlm.sample --checkpoint {plan.checkpoints.place} --prompt "..."'),
        ("to go on", f"the same command with --trainer.num_train_steps {2 * plan.num_steps}"),
    ]
    console.log(table("report", rows))


def draw_pictures(plan: Plan, records: Records) -> list[tuple[str, str]]:
    """Draws `loss.png`, `schedule.png` and `step_time.png` into the log folder, and says where they are."""
    title = f"{plan.run_id}: {plan.num_steps} steps"
    loss, schedule, times = (plan.log_folder / f"{name}.png" for name in ("loss", "schedule", "step_time"))
    loss_curve(records, loss, title)
    schedule_curve(plan.phases, schedule, title)
    rows = [("loss curve", str(loss)), ("schedule", str(schedule))]
    measured = step_times(records, exclude={phase.start + 1 for phase in plan.phases})
    if measured is not None:
        step_time_histogram(measured, times, title)
        rows.append(("step time", f"median {measured.median_ms:.1f} ms, 99 % within {measured.p99_ms:.1f} ms: {times}"))
    return rows


def compressors(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Bits per byte of general compressors on all the texts as one stream: what a model has to beat.

    Nothing, where the texts are larger than is reasonable to hold and compress at the end of a run.
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
        (f"  {name} on all of it", f"{8 * size / len(raw):.4f} ({len(raw):,} bytes)") for name, size in sizes.items()
    ]


def _number(latest: dict[str, float], name: str) -> str:
    return f"{latest[name]:.4f}" if name in latest else "none"
