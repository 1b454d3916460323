"""What a run writes about itself: metrics for its trackers, the ledger of its time, and calls of the user's callbacks."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxlm.core.runtime import is_main_process, main_only
from jaxlm.core.values.logged import TOTAL_GFLOPS, TOTAL_TOKENS
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.checkpoint.lease import StillHeld
from jaxlm.engine.checkpoint.manifest import History
from jaxlm.engine.metrics import Totals, Workload
from jaxlm.observe import records
from jaxlm.observe.callbacks import CallbackContext, Callbacks, open_callbacks
from jaxlm.observe.completions import CompletionLog
from jaxlm.observe.console import Console
from jaxlm.observe.decisions import DecisionLog
from jaxlm.observe.ledger import Ledger
from jaxlm.observe.log_file import LogFile, describe_start
from jaxlm.observe.loop_state import LoopState
from jaxlm.observe.trackers import JsonlTracker, Tracker, TrackerConfig
from jaxlm.observe.trackers.background import BackgroundTracker
from jaxlm.plan.load_config import as_run_config
from jaxlm.plan.plan import Plan
from jaxlm.reading.decode import choice_name, dump
from jaxlm.session.init_from import InitFrom
from jaxlm.session.startup import run_info


class Beginning:
    """What is done once nothing can refuse the start any more. A start that is refused leaves the run's records alone."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], object]] = []

    def then(self, action: Callable[[], object]) -> None:
        """Adds what is done next."""
        self._actions.append(action)

    def happen(self) -> None:
        """Does what has been added since the last call. All processes must call this."""
        while self._actions:
            self._actions.pop(0)()


@dataclass(frozen=True)
class RunRecords:
    """The open records of a run.

    Attributes:
        loop_state: metrics of the whole run.
        previous: totals of earlier processes of this run.
        callbacks: classes of the user's own; none on processes other than 0.
        ledgers: the ledger of the run's time; empty on processes other than 0.
        trackers: where metrics are logged; empty until the run begins, and on processes other than 0.
        workloads: what a step of each phase that this process has begun amounts to, by its number.
        decision_logs: the log of the controllers' decisions; empty like `trackers`.
    """

    plan: Plan
    console: Console
    loop_state: LoopState
    previous: Totals
    callbacks: Callbacks
    ledgers: tuple[Ledger, ...] = ()
    trackers: list[Tracker] = field(default_factory=list)
    decision_logs: list[DecisionLog] = field(default_factory=list)
    workloads: dict[int, Workload] = field(default_factory=dict)

    def completions(self) -> CompletionLog:
        return CompletionLog(self.plan.config.trainer.completions, self.trackers, self.console)

    def flush(self) -> None:
        """Hands everything to the files of trackers and decisions."""
        for log in (*self.trackers, *self.decision_logs):
            log.flush()

    def decided(self, step: int, controller: str, note: Mapping[str, Any]) -> None:
        """Logs a decision of a controller (`Noted`). Args: step: whose metrics led to it. note: JSON, with an `event`."""
        for log in self.decision_logs:
            log.write(step, controller, note)

    def begin_attempt(self, history: History, step: int) -> None:
        """Tells the trackers and the ledger that the run went back to `step`."""
        for ledger in self.ledgers:
            ledger.begin_attempt(step)
        self.loop_state.go_back(step)
        for tracker in self.trackers:
            tracker.begin_attempt(history.attempt, step, history.abandoned_steps)
        for log in self.decision_logs:
            log.begin_attempt(history.attempt)

    def write_ledgers(self) -> None:
        for ledger in self.ledgers:
            ledger.write()


@contextlib.contextmanager
def open_records(
    plan: Plan, console: Console, init_from: InitFrom, clock: ActivityClock, beginning: Beginning, still_held: StillHeld
) -> Iterator[RunRecords]:
    """Opens a run's records as it begins, and closes them when the context exits, even after an error.

    Raises:
        ConfigError: a file of an earlier start, or the log folder, cannot be read and written.
    """
    main_only(lambda: records.check_rewritable(plan.log_folder))
    begin, metrics = init_from.resume_step or 0, plan.log_folder / records.METRICS
    loop_state = LoopState(records.read_metrics(metrics) if begin else (), begin)
    ledgers = (Ledger(plan.log_folder, clock, begin, console.log),) if is_main_process() else ()
    callbacks = main_only(lambda: _open_callbacks(plan, console, init_from)) or Callbacks({}, console.log)
    opened = RunRecords(plan, console, loop_state, totals_at(metrics, begin), callbacks, ledgers)
    with contextlib.ExitStack() as closing:
        again = {"resume_step": begin, "attempt": init_from.history.attempt}

        def write() -> None:
            for tracker in _open_trackers(plan, console, init_from, {**again, "still_held": still_held}):
                opened.trackers.append(tracker)
                closing.callback(tracker.close)
            file = LogFile(plan.log_folder / records.DECISIONS, console.log, still_held)
            decisions = DecisionLog(file, opened.trackers, console, **again)
            opened.decision_logs.append(decisions)
            closing.callback(decisions.close)
            describe_start(plan.log_folder, dump(as_run_config(plan.config)))
            opened.write_ledgers()
            closing.callback(opened.write_ledgers)

        beginning.then(lambda: main_only(write))
        with callbacks:
            yield opened


def totals_at(metrics: Path, step: int) -> Totals:
    """A run's totals after `step`, from its metrics file; zeros if the file has no such record."""
    for record in reversed(records.read_metrics(metrics) if step else []):
        tokens, gflops = record.get(TOTAL_TOKENS), record.get(TOTAL_GFLOPS)
        if record["step"] == step and tokens is not None and gflops is not None:
            return Totals(step, tokens, gflops)
    return Totals()


def _open_trackers(plan: Plan, console: Console, init_from: InitFrom, again: dict[str, Any]) -> tuple[Tracker, ...]:
    """The `metrics.jsonl` tracker, and the configured trackers, each in a background thread."""
    path, trainer = plan.log_folder / records.METRICS, plan.config.trainer
    jsonl = JsonlTracker(path, **again, warn=console.log, max_completions_bytes=trainer.completions.max_bytes)
    if not trainer.trackers:
        return (jsonl,)
    info = run_info(plan, init_from)

    def in_background(config: TrackerConfig) -> Tracker:
        return BackgroundTracker(choice_name(type(config)), lambda: config.open(info), console.log)

    return (jsonl, *map(in_background, trainer.trackers))


def _open_callbacks(plan: Plan, console: Console, init_from: InitFrom) -> Callbacks | None:
    configs = plan.config.trainer.callbacks
    return open_callbacks(configs, CallbackContext(run_info(plan, init_from), console.log)) if configs else None
