"""The report at the end of a run."""

import gzip
import lzma
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten

from jaxlm.core.guards import SKIPPED
from jaxlm.core.stores import AT_START_S, retried
from jaxlm.core.values.logged import BEST_BPB, EVAL_BPB, EVAL_CORE, EVAL_LOSS, TRAIN_LOSS
from jaxlm.data.formats.base import FormatConfig
from jaxlm.observe.console import Console, table
from jaxlm.observe.curves import needle_grids
from jaxlm.observe.events import layer_tables, phase_history, skipped_steps
from jaxlm.observe.ledger import account, read_lines
from jaxlm.observe.logged_run import LoggedRun, read_run
from jaxlm.observe.page.page import write_page
from jaxlm.observe.page.sections import newest
from jaxlm.observe.plots import layer_bars, loss_curve, needle_maps, schedule_curve, step_time_histogram, step_times
from jaxlm.observe.records import DECISIONS, METRICS, REPORT_PAGE, SAMPLES
from jaxlm.plan.num_steps import steps_of_all_phases
from jaxlm.plan.plan import Plan
from jaxlm.reading.decode import choice_name

_MAX_COMPRESSED_BYTES = 64 << 20
_MAX_SPANS = 8  # of skipped steps, in the report
_MAX_EVENTS, _MAX_EVENT = 8, 40  # kinds of decisions in the report, and characters of each


def final_report(plan: Plan, console: Console, *, has_template: bool) -> None:
    """Logs losses, bits per byte next to those of compressors, and the paths of the results; writes plots and page.

    Args:
        has_template: whether the saved tokenizer has a chat template.
    """
    run = read_run(str(plan.log_folder))
    checkpoint = retried(plan.checkpoints.checkpoints, AT_START_S)[-1].location
    num_done = max((int(series.steps[-1]) for series in run.series.values()), default=plan.num_steps)
    goodput = account(read_lines(plan.log_folder))
    rows = [
        ("steps", f"{num_done} of {plan.num_steps}"),
        ("training loss", newest(run[TRAIN_LOSS])),
        *skipped_updates(run),
        *decisions(run, plan.log_folder),
    ]
    if EVAL_LOSS in run.series:
        best, last = run.latest(BEST_BPB), run.latest(EVAL_BPB)
        better = "" if best in (None, last) else f" (best {best:.4f})"
        rows += [("validation loss", newest(run[EVAL_LOSS])), ("bits per byte", newest(run[EVAL_BPB]) + better)]
        rows += compressors(plan.data[-1].corpus.validation_documents())
    if EVAL_CORE in run.series:
        rows.append(("CORE", newest(run[EVAL_CORE])))
    rows += [
        ("checkpoint", str(checkpoint)),
        *([] if goodput is None else goodput.rows()),
        *write_plots(plan, run),
        ("report page", report_page(run, plan.log_folder)),
        *outputs(plan),
        how_to_use(
            plan, chats=has_template and any(chats(source.config.format) for source in plan.data[-1].corpus.sources)
        ),
    ]
    if plan.phases[-1].scheduled_steps is None:  # otherwise the run has ended early, because it should
        rows += how_to_train_longer(plan)
    if history := phase_history(run):
        console.log(table("phases", [(record.name, record.summary) for record in history]))
    console.log(table("report", rows))


def chats(record_format: FormatConfig) -> bool:
    """Returns whether a model learns to answer in a chat template: texts need none."""
    return record_format.bos_policy == "template" or record_format.given_template() is not None


def how_to_train_longer(plan: Plan) -> list[tuple[str, str]]:
    """A row with the key that doubles the run, or its last phase; none if a preset has written the steps of the phases."""
    epoch, phases = plan.config.epoch, plan.config.phases
    if phases and (last := phases[-1].num_train_steps) is not None:
        if plan.config.preset is not None:
            return []
        key = f"--phases.{len(phases) - 1}.num_train_steps {2 * last}"
        total = steps_of_all_phases(plan.config)
        if total is not None and plan.config.trainer.num_train_steps == total:  # they must agree
            key += f" --trainer.num_train_steps {total + last}"
    else:
        key = f"--epoch {2 * epoch}" if epoch else f"--trainer.num_train_steps {2 * plan.num_steps}"
    return [("to train longer", f"run the same command with {key}")]


def how_to_use(plan: Plan, *, chats: bool) -> tuple[str, str]:
    """Writes a row with a command that does what the model was trained for. Args: chats: it was trained on conversations."""
    location = plan.checkpoints.location
    if chats and plan.phases[-1].objective.facts.trains_writing:
        return "to chat", f"jaxlm chat --checkpoint {location}"
    if plan.phases[-1].objective.facts.trains_writing:
        return "to sample", f'jaxlm sample --checkpoint {location} --prompt "..."'
    folder = f"{plan.run_id}-hf"
    use = f"then open {folder} in transformers, or in a run with rewards: [{{type: model}}]"
    return "to score text", f"jaxlm convert to-hf --checkpoint {location} --output_dir {folder}, {use}"


def outputs(plan: Plan) -> list[tuple[str, str]]:
    """Lists where the numbers and texts of the run are, and how to open those that went to trackers."""
    rows = [("metrics", str(plan.log_folder / METRICS))]
    if (samples := plan.log_folder / SAMPLES).exists():
        rows.append(("samples", str(samples)))
    opened = ((choice_name(type(c)), c.how_to_open(plan.run_id)) for c in plan.config.trainer.trackers)
    return rows + [(name, how) for name, how in opened if how is not None]


def write_plots(plan: Plan, run: LoggedRun) -> list[tuple[str, str]]:
    """Writes `loss.png`, `schedule.png`, `step_time.png` and what surgeries say of layers (`layers_0.png`), and the grids of
    `needle` (`needle.png`), to the log folder. Returns report rows for them.
    """
    title = f"{plan.run_id}: {plan.num_steps} steps"
    loss, schedule, times = (plan.log_folder / f"{name}.png" for name in ("loss", "schedule", "step_time"))
    try:
        loss_curve(run, loss, title)
        schedule_curve(plan.phases, run, schedule, title)
        rows = [("loss curve", str(loss)), ("schedule", str(schedule))]
        measured = step_times(run, exclude={phase.start + 1 for phase in plan.phases})
        if measured is not None:
            step_time_histogram(measured, times, title)
            durations = f"median {measured.median_ms:.1f} ms, 99th percentile {measured.p99_ms:.1f} ms"
            rows.append(("step time", f"{durations}: {times}"))
        for number, numbers in enumerate(layer_tables(run)):
            path = plan.log_folder / f"layers_{number}.png"
            layer_bars(numbers, path, title)
            rows.append((numbers.source, str(path)))
        if grids := needle_grids(run):
            needle_maps(grids, path := plan.log_folder / "needle.png", title)
            rows.append(("needles", str(path)))
        return rows
    except OSError as error:
        return [("plots", f"not written: {error}")]


def report_page(run: LoggedRun, folder: Path) -> str:
    """Writes the HTML page of a run to its log folder. Returns its path, or why there is none."""
    try:
        write_page([run], folder / REPORT_PAGE)
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


def skipped_updates(run: LoggedRun) -> list[tuple[str, str]]:
    """A report row with the steps whose update was skipped, as far as the records go back; none if there are none."""
    spans: list[list[int]] = []
    for step in (skipped.step for skipped in skipped_steps(run)):
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    if not spans:
        return []
    shown = [f"{first}" if first == last else f"{first} to {last}" for first, last in spans]
    listed = ", ".join([*shown[:_MAX_SPANS], *(["..."] if shown[_MAX_SPANS:] else [])])
    return [("skipped updates", f"{run.latest(SKIPPED):.0f} of {len(run[SKIPPED].steps)} steps: {listed}")]


def decisions(run: LoggedRun, folder: Path) -> list[tuple[str, str]]:
    """A report row with what the run's controllers decided; none if they decided nothing."""
    counts = Counter(shorten(decision.note["event"], _MAX_EVENT) for decision in run.decisions)
    listed = ", ".join(f"{event} {count}" for event, count in counts.most_common(_MAX_EVENTS))
    return [("decisions", f"{listed}: {folder / DECISIONS}")] if counts else []
