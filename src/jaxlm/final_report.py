"""The report at the end of a run."""

import gzip
import itertools
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxlm.config.decode import choice_name
from jaxlm.core.guards import SKIPPED
from jaxlm.core.install import install_command
from jaxlm.core.stores import AT_START_S, retried
from jaxlm.engine.metric_names import BEST_BPB, EVAL_BPB, EVAL_CORE, EVAL_LOSS, TRAIN_LOSS
from jaxlm.observe.console import Console, table
from jaxlm.observe.ledger import account, read_lines
from jaxlm.observe.page.logged_run import read_run
from jaxlm.observe.page.page import has_library, write_page
from jaxlm.observe.plots import Records, loss_curve, schedule_curve, step_time_histogram, step_times
from jaxlm.observe.records import METRICS, REPORT_PAGE, SAMPLES, read_metrics
from jaxlm.run.plan import Plan

_MAX_COMPRESSED_BYTES = 64 << 20
_MAX_SPANS = 8  # of skipped steps, in the report


def final_report(plan: Plan, console: Console) -> None:
    """Logs losses, bits per byte next to those of compressors, and the paths of the results; writes plots and page."""
    records = read_metrics(plan.log_folder / METRICS)
    latest = {name: value for record in records for name, value in record.items() if value is not None}
    checkpoint = retried(plan.checkpoints.checkpoints, AT_START_S)[-1].location
    rows = [
        ("steps", f"{int(latest.get('step', plan.num_steps))} of {plan.num_steps}"),
        ("training loss", training_loss(records)),
        *skipped_updates(records),
    ]
    if EVAL_LOSS in latest:
        rows += [("validation loss", _number(latest, EVAL_LOSS)), ("bits per byte", _bits_per_byte(latest))]
        rows += compressors(plan.data[-1].validation_documents())
    if EVAL_CORE in latest:
        rows.append(("CORE", _number(latest, EVAL_CORE)))
    rows += [
        ("checkpoint", str(checkpoint)),
        *time_spent(plan.log_folder),
        *write_plots(plan, records),
        ("report page", report_page(plan.log_folder)),
        *outputs(plan),
        how_to_use(plan),
    ]
    if plan.phases[-1].scheduled_steps is None:  # otherwise the run has ended early, because it should
        epoch = plan.config.epoch
        key = f"--epoch {2 * epoch}" if epoch else f"--trainer.num_train_steps {2 * plan.num_steps}"
        rows.append(("to train longer", f"run the same command with {key}"))
    console.log(table("report", rows))


def how_to_use(plan: Plan) -> tuple[str, str]:
    """A row with a command that does what the model was trained for."""
    location = plan.checkpoints.location
    if plan.phases[-1].objective.trains_writing:
        return "to sample", f'jaxlm sample --checkpoint {location} --prompt "..."'
    folder = f"{plan.run_id}-hf"
    convert = f"jaxlm convert to-hf --checkpoint {location} --output_dir {folder}"
    return (
        "to score text",
        f"{convert}, then open {folder} in transformers, or in a run with rewards: [{{type: model}}]",
    )


def time_spent(log_folder: Path) -> list[tuple[str, str]]:
    """A row with what the wall time of the run was spent on, over all of its starts."""
    goodput = account(read_lines(log_folder))
    return [] if goodput is None else goodput.rows()


def outputs(plan: Plan) -> list[tuple[str, str]]:
    """Where the numbers and texts of the run are, and how to open those that went to trackers."""
    rows = [("metrics", str(plan.log_folder / METRICS))]
    if (samples := plan.log_folder / SAMPLES).exists():
        rows.append(("samples", str(samples)))
    opened = ((choice_name(type(c)), c.how_to_open(plan.run_id)) for c in plan.config.trainer.trackers)
    return rows + [(name, how) for name, how in opened if how is not None]


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
    schedule_curve(plan.phases, schedule, title, records)
    rows = [("loss curve", str(loss)), ("schedule", str(schedule))]
    measured = step_times(records, exclude={phase.start + 1 for phase in plan.phases})
    if measured is not None:
        step_time_histogram(measured, times, title)
        durations = f"median {measured.median_ms:.1f} ms, 99th percentile {measured.p99_ms:.1f} ms"
        rows.append(("step time", f"{durations}: {times}"))
    return rows


def report_page(folder: Path) -> str:
    """Writes the HTML page of a run to its log folder. Returns its path, or why there is none."""
    if not has_library():
        return f"{install_command('report')}, then jaxlm report {folder}"
    try:
        write_page([read_run(str(folder))], folder / REPORT_PAGE)
    except Exception as error:  # the run is complete: no fault of the page may end it
        return f"not written: {type(error).__name__}: {error}"
    return str(folder / REPORT_PAGE)


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
    # A dictionary beyond the text changes nothing but the time, which goes into clearing 64 MiB and more.
    xz = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": min(_MAX_COMPRESSED_BYTES, max(4096, len(raw)))}
    sizes = {"gzip -9": len(gzip.compress(raw, 9)), "xz -9": len(lzma.compress(raw, filters=[xz]))}
    return [
        (f"  {name} on all text", f"{8 * size / len(raw):.4f} ({len(raw):,} bytes)") for name, size in sizes.items()
    ]


def training_loss(records: Records) -> str:
    """The loss of the last step. If it is not finite, the last finite loss too."""
    losses = [(_count(record, "step"), record[TRAIN_LOSS]) for record in records if TRAIN_LOSS in record]
    finite = [(step, loss) for step, loss in losses if loss is not None]
    if not finite:
        return "never finite" if losses else "none"
    step, loss = finite[-1]
    return f"{loss:.4f}" if losses[-1][0] == step else f"not finite; {loss:.4f} at step {step}"


def skipped_updates(records: Records) -> list[tuple[str, str]]:
    """A report row with the steps whose update was skipped, as far as the records go back; none if there are none."""
    steps = [(_count(record, "step"), _count(record, SKIPPED)) for record in records if SKIPPED in record]
    spans: list[list[int]] = []
    for (_, before), (step, after) in itertools.pairwise([(0, 0), *steps]):
        if after > before and spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        elif after > before:
            spans.append([step, step])
    if not spans:
        return []
    shown = [f"{first}" if first == last else f"{first} to {last}" for first, last in spans]
    listed = ", ".join(shown if len(shown) <= _MAX_SPANS else [*shown[:_MAX_SPANS], "..."])
    return [("skipped updates", f"{steps[-1][1]} of {len(steps)} steps: {listed}")]


def _count(record: Mapping[str, float | None], name: str) -> int:
    return int(record[name] or 0)


def _bits_per_byte(latest: dict[str, float]) -> str:
    best = latest.get(BEST_BPB, latest.get(EVAL_BPB))
    is_best = best is None or best == latest.get(EVAL_BPB)
    return _number(latest, EVAL_BPB) + ("" if is_best else f" (best {best:.4f})")


def _number(latest: dict[str, float], name: str) -> str:
    return f"{latest[name]:.4f}" if name in latest else "none"
