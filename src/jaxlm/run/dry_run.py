"""`--dry_run true`: plans and compiles a run without training. Needs no data, tokenizer or writable folder.

It asks for token caches at a URL, and only writes the plot of the learning-rate schedule to the run's log folder. If either
fails, it logs a line.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlm.config.run import RunConfig
from jaxlm.core.errors import ConfigError
from jaxlm.data.sources.config import TRAIN, VALIDATION
from jaxlm.data.sources.named import NamedSource
from jaxlm.observe.console import Console, table
from jaxlm.observe.plots import schedule_curve
from jaxlm.optim.groups import group_schedules
from jaxlm.optim.lr.schedules import Schedule
from jaxlm.run.compilation.step import compile_steps, gib
from jaxlm.run.init_from import import_notes
from jaxlm.run.plan import Plan
from jaxlm.run.startup import describe

_DEFAULT_VOCAB_SIZE = 50_257  # GPT-2's
_ANSWER_S = 10.0  # client libraries repeat an unanswered request for up to a minute
_MAX_CORNERS = 16  # corner points of a schedule to list


def assumed_vocabulary(config: RunConfig) -> tuple[int, str]:
    """The vocabulary size to plan with before a tokenizer is loaded, and a description of where it comes from."""
    data = config.phases[0].data if config.phases and config.phases[0].data else config.data
    if data.vocab_size is not None:
        return data.vocab_size, f"{data.vocab_size:,} (data.vocab_size)"
    return _DEFAULT_VOCAB_SIZE, f"{_DEFAULT_VOCAB_SIZE:,} (GPT-2's, assumed because data.vocab_size is not set)"


def dry_run(plan: Plan, console: Console) -> None:
    """Logs the plan, compiles the training step of every phase, and logs its memory use."""
    rows = [*describe(plan), ("vocabulary", assumed_vocabulary(plan.config)[1]), *_caches(plan)]
    console.log(table("plan (dry run: no data is read, no training)", rows))
    for note in import_notes(plan):
        console.log(f"note: {note}")
    with plan.layout.use():
        for phase in plan.phases:
            steps = compile_steps(plan, phase, phase.start, console.log)
            phase_rows = [("schedule", _corners(phase.start, phase.optimizer.schedule(phase.num_steps)))]
            for name, schedule in group_schedules(phase.optimizer, phase.num_steps).items():
                phase_rows.append((f"schedule of {name}", _corners(phase.start, schedule)))
            for shape, step in steps.by_shape.items():
                phase_rows += _memory_rows(shape, step.call.memory_analysis())
            console.log(table(f"phase '{phase.name}'", phase_rows))
    console.log(f"schedule: {_plot_schedule(plan)}")
    console.log("dry run complete: all training steps compile")


def _caches(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a start will do about each token cache."""
    sources = {source.folder: source for data in plan.data for source in data.sources()}.values()
    answers: dict[tuple[Path, str], str] = {}
    asked = [(source, split) for source in sources for split in (TRAIN, VALIDATION) if source.has(split)]
    # A thread that is still waiting must not delay the end of the process.
    threads = [threading.Thread(target=_ask, args=(*item, answers), daemon=True) for item in asked]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _ANSWER_S
    for thread, (source, split) in zip(threads, asked, strict=True):
        thread.join(max(0.0, until - time.monotonic()))
        answer = answers.get((source.folder, split), f"{source.store.url} has not answered for {_ANSWER_S:g} s")
        yield f"token cache {f'{source.name} {split}'.strip()}", answer


def _ask(source: NamedSource, split: str, answers: dict[tuple[Path, str], str]) -> None:
    try:
        answers[source.folder, split] = source.describe_cache(split)
    except ConfigError as error:
        answers[source.folder, split] = f"a start would end with: {error}"


def _plot_schedule(plan: Plan) -> str:
    """Plots the schedule to the log folder, and returns its path or why it could not be written."""
    path = plan.log_folder / "schedule.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        schedule_curve(plan.phases, path, f"{plan.run_id}: {plan.num_steps} steps")
    except OSError as error:
        return f"not plotted: {error}"
    return str(path)


def _memory_rows(shape: tuple[int, int], memory: Any) -> list[tuple[str, str]]:
    label = f"memory per device, {shape[0]} x {shape[1]} sequences:"
    if memory is None:
        return [(label, "unknown on this platform")]
    return [
        (f"{label} state and batch", gib(memory.argument_size_in_bytes)),
        (f"{label} temporary", gib(memory.temp_size_in_bytes)),
    ]


def _corners(start: int, schedule: Schedule) -> str:
    texts = [f"step {start + step}: {name} at {rate:.3g}" for step, rate, name in schedule.corner_points()]
    if len(texts) > _MAX_CORNERS:
        texts = [*texts[: _MAX_CORNERS - 2], f"... {len(texts) - _MAX_CORNERS + 1} more", texts[-1]]
    return ", ".join(texts)
