"""`--dry_run true`: everything but training. No data, tokenizer or writable folder is needed.

The one thing that it writes is the picture of the schedule, where the run itself will put it; where that cannot be
written, a line says so.
"""

from typing import Any

from jaxlm.config.run import RunConfig
from jaxlm.engine.phases import Phase
from jaxlm.observe.console import Console, table
from jaxlm.observe.plots import schedule_curve
from jaxlm.run.compile import compile_steps, gib
from jaxlm.run.plan import Plan
from jaxlm.run.startup import describe

_COMMON_VOCABULARY = 50_257  # GPT-2's
_MOST_CORNERS = 16  # of a schedule that are listed


def assumed_vocabulary(config: RunConfig) -> tuple[int, str]:
    """A vocabulary size to plan with before a tokenizer is at hand, and where it comes from."""
    data = config.phases[0].data if config.phases and config.phases[0].data else config.data
    if data.vocab_size is not None:
        return data.vocab_size, f"{data.vocab_size:,} (data.vocab_size)"
    return _COMMON_VOCABULARY, f"{_COMMON_VOCABULARY:,} (assumed, GPT-2's: data.vocab_size is not given)"


def dry_run(plan: Plan, console: Console) -> None:
    """Traces and compiles the step of every phase, and shows the plan and the memory."""
    rows = [*describe(plan), ("vocabulary", assumed_vocabulary(plan.config)[1])]
    console.log(table("plan (dry run: no data is read, nothing is trained)", rows))
    with plan.layout.use():
        for phase in plan.phases:
            steps = compile_steps(plan, phase, phase.start, console.log)
            memory = [
                row
                for shape, step in steps.by_shape.items()
                for row in _memory_rows(shape, step.call.memory_analysis())
            ]
            console.log(table(f"phase '{phase.name}'", [("schedule", _corners(phase)), *memory]))
    console.log(f"schedule: {_picture(plan)}")
    console.log("dry run complete: the step compiles")


def _picture(plan: Plan) -> str:
    """Draws the schedule into the log folder, and says where; or why it is not there."""
    path = plan.log_folder / "schedule.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        schedule_curve(plan.phases, path, f"{plan.run_id}: {plan.num_steps} steps")
    except OSError as error:
        return f"not drawn: {error}"
    return str(path)


def _memory_rows(shape: tuple[int, int], memory: Any) -> list[tuple[str, str]]:
    of = f"memory a device, {shape[0]} x {shape[1]} sequences:"
    if memory is None:
        return [(of, "this platform does not tell")]
    return [
        (f"{of} state and batch", gib(memory.argument_size_in_bytes)),
        (f"{of} temporary", gib(memory.temp_size_in_bytes)),
    ]


def _corners(phase: Phase) -> str:
    corners = phase.optimizer.schedule(phase.num_steps).corner_points()
    texts = [f"step {phase.start + step} {name} {rate:.3g}" for step, rate, name in corners]
    if len(texts) > _MOST_CORNERS:
        texts = [*texts[: _MOST_CORNERS - 2], f"... {len(texts) - _MOST_CORNERS + 1} more", texts[-1]]
    return ", ".join(texts)
