"""An open run: its folders, the checkpoints that it saves, and what it writes about itself."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxlm.core.runtime import from_main, is_main_process, main_only
from jaxlm.core.stores import check_store_writable, is_url
from jaxlm.core.values.logged import TOTAL_GFLOPS, TOTAL_TOKENS, Activity
from jaxlm.data.base import Log
from jaxlm.data.tokenizer.chat_template import with_templates
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.checkpoint.lease import LeaseCheck
from jaxlm.engine.checkpoint.manifest import History
from jaxlm.engine.checkpoint.writer import CheckpointWriter, SaveHealth
from jaxlm.engine.metrics import Totals, Workload
from jaxlm.engine.peers import is_lost_peer
from jaxlm.engine.preemption import StopRequest
from jaxlm.engine.state import RunState
from jaxlm.engine.sync import FlagSync
from jaxlm.interop.hf.folder import parse_export_dtype
from jaxlm.interop.hf.hub import check_upload
from jaxlm.interop.hf.source_folder import SourceFolder
from jaxlm.observe import records
from jaxlm.observe.callbacks import CallbackContext, Callbacks, open_callbacks
from jaxlm.observe.completions import CompletionLog
from jaxlm.observe.console import Console
from jaxlm.observe.decision_notes import described, numbers
from jaxlm.observe.ledger import Ledger
from jaxlm.observe.log_file import LogStore, describe_start
from jaxlm.observe.loop_state import LoopState
from jaxlm.observe.trackers import JsonlTracker, Tracker, TrackerConfig
from jaxlm.observe.trackers.background import BackgroundTracker
from jaxlm.plan.load_config import as_run_config
from jaxlm.plan.plan import Plan
from jaxlm.reading.decode import choice_name, dump
from jaxlm.session.export import Exporter
from jaxlm.session.init_from import InitFrom
from jaxlm.session.resume_checks import EVALUATED, read_evaluated, run_files
from jaxlm.session.source import source_of_run
from jaxlm.session.startup import run_info


class OnStart:
    """Collects what is done once nothing can refuse the start any more. A refused start leaves the run's records alone."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], object]] = []

    def add(self, action: Callable[[], object]) -> None:
        """Adds what is done next."""
        self._actions.append(action)

    def run(self) -> None:
        """Does what has been added since the last call. All processes must call this."""
        while self._actions:
            self._actions.pop(0)()


@dataclass(frozen=True)
class PreparedRun:
    """A run that nothing refuses so far: what is known before its folders are written.

    Attributes:
        plan: for the tokenizer, and for where the run goes on.
        started: rows of the table of the start.
        logs: the store of the logs.
        check_lease: raises if another start has taken the run over.
    """

    plan: Plan
    tokenizer: Tokenizer
    init_from: InitFrom
    started: list[tuple[str, str]]
    logs: LogStore
    check_lease: LeaseCheck


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
        files: the first of the trackers, which has the decisions of controllers and other events; empty like `trackers`.
        on_start: what is written when the run begins.
    """

    plan: Plan
    console: Console
    loop_state: LoopState
    previous: Totals
    callbacks: Callbacks
    ledgers: tuple[Ledger, ...] = ()
    trackers: list[Tracker] = field(default_factory=list)
    files: list[JsonlTracker] = field(default_factory=list)
    workloads: dict[int, Workload] = field(default_factory=dict)
    on_start: OnStart = field(default_factory=OnStart)

    def completions(self) -> CompletionLog:
        return CompletionLog(self.plan.config.trainer.completions, self.trackers, self.console)

    def flush(self) -> None:
        """Hands everything to the files of trackers and decisions."""
        for tracker in self.trackers:
            tracker.flush()

    def decided(self, step: int, controller: str, note: Mapping[str, Any]) -> None:
        """Logs a decision of a controller (`Noted`). Args: step: whose metrics led to it. note: JSON, with an `event`."""
        for file in self.files:
            file.log_decision(step, controller, note)
        for tracker in self.trackers:
            tracker.log(step, numbers(controller, note))
        self.console.log(f"step {step}: {controller} {described(note)}")

    def report(self, step: int, text: str, kind: str, **fields: Any) -> None:
        """Shows what has happened after `step` steps on the console, and writes it as an event of a kind."""
        self.console.log(text)
        self.write(step, kind, **fields)

    def write(self, step: int, kind: str, **fields: Any) -> None:
        """Writes an event as soon as the run has begun."""
        log = lambda: [file.log_event(step, kind, fields) for file in self.files]  # noqa: E731
        log() if self.files else self.on_start.add(log)

    def begin_attempt(self, history: History, step: int) -> None:
        """Tells the trackers and the ledger that the run went back to `step`."""
        for ledger in self.ledgers:
            ledger.begin_attempt(step)
        self.loop_state.go_back(step)
        for tracker in self.trackers:
            tracker.begin_attempt(history.attempt, step, history.abandoned_steps)

    def write_ledgers(self) -> None:
        for ledger in self.ledgers:
            ledger.write()


@contextlib.contextmanager
def open_records(
    plan: Plan, console: Console, init_from: InitFrom, clock: ActivityClock, on_start: OnStart, check_lease: LeaseCheck
) -> Iterator[RunRecords]:
    """Opens a run's records as it begins, and closes them when the context exits, even after an error.

    Raises:
        ConfigError: a file of an earlier start, or the log folder, cannot be read and written.
    """
    main_only(lambda: records.check_rewritable(plan.log_folder))
    begin = init_from.resume_step or 0
    before = records.read_metrics(plan.log_folder / records.METRICS) if begin else []
    ledgers = (Ledger(plan.log_folder, clock, begin, console.log),) if is_main_process() else ()
    configs = plan.config.trainer.callbacks
    context = CallbackContext(run_info(plan, init_from), console.log)
    callbacks = main_only(lambda: open_callbacks(configs, context)) or Callbacks({}, console.log)
    totals = LoopState(before, begin), totals_at(before, begin)
    opened = RunRecords(plan, console, *totals, callbacks, ledgers, on_start=on_start)
    with contextlib.ExitStack() as closing:

        def write() -> None:
            files, others = _open_trackers(plan, console, init_from, check_lease)
            opened.files.append(files)
            for tracker in (files, *others):
                opened.trackers.append(tracker)
                closing.callback(tracker.close)
            describe_start(plan.log_folder, dump(as_run_config(plan.config)))
            opened.write_ledgers()
            closing.callback(opened.write_ledgers)

        on_start.add(lambda: main_only(write))
        with callbacks:
            yield opened


def totals_at(metrics: Sequence[Mapping[str, Any]], step: int) -> Totals:
    """A run's totals after `step`, from the records of its metrics; zeros if there is no such record."""
    for record in reversed(metrics):
        tokens, gflops = record.get(TOTAL_TOKENS), record.get(TOTAL_GFLOPS)
        if record["step"] == step and tokens is not None and gflops is not None:
            return Totals(step, tokens, gflops)
    return Totals()


def _open_trackers(
    plan: Plan, console: Console, init_from: InitFrom, check_lease: LeaseCheck
) -> tuple[JsonlTracker, list[Tracker]]:
    """The tracker that writes files, and the configured trackers, each in a background thread."""
    trainer = plan.config.trainer
    files = JsonlTracker(
        plan.log_folder / records.METRICS,
        resume_step=init_from.resume_step,
        attempt=init_from.history.attempt,
        warn=console.log,
        max_completions_bytes=trainer.completions.max_bytes,
        check_lease=check_lease,
    )
    info = run_info(plan, init_from)

    def in_background(config: TrackerConfig) -> Tracker:
        return BackgroundTracker(choice_name(type(config)), lambda: config.open(info), console.log)

    return files, list(map(in_background, trainer.trackers))


@contextlib.contextmanager
def open_writer(
    plan: Plan,
    files: dict[str, bytes],
    init_from: InitFrom,
    log: Log,
    clock: ActivityClock,
    check_lease: LeaseCheck,
    flush: Sequence[Callable[[], None]],
) -> Iterator[CheckpointWriter]:
    """Opens what writes the run's checkpoints, and waits for it when the context exits.

    After an error, it only waits for the save in progress, which needs the trackers and the lease that are closed next. If
    another process is gone, that save cannot end.

    Args:
        files: of `run_files`.
        flush: called before a checkpoint becomes visible.
    """
    checkpoint = init_from.state
    newest = checkpoint.checkpoint.name if checkpoint is not None and init_from.is_newest else None
    health = SaveHealth(plan.config.trainer.checkpointer, newest, log)
    if init_from.resume_step is not None and checkpoint is not None:
        files[EVALUATED] = json.dumps(from_main(lambda: read_evaluated(checkpoint.checkpoint))).encode()
    writer = CheckpointWriter(plan.checkpoints, files, health, log, check_lease, flush, clock.progress)
    try:
        yield writer
    except Exception as error:
        if not is_lost_peer(error):
            with clock.during(Activity.SAVE):
                writer.join()
        raise
    with clock.during(Activity.SAVE):
        writer.close()


def settle(plan: Plan, writer: CheckpointWriter, init_from: InitFrom, state: RunState, log: Log) -> None:
    """Makes the checkpoint from which the run goes on its newest one, and blocks until that is written.

    A checkpoint of another run, or one that this run goes back to, is saved once more. Checkpoints that it abandons are
    set aside afterwards, or by the next start.
    """
    checkpoint, history = init_from.state, init_from.history
    assert checkpoint is not None
    if not init_from.is_newest:
        complete = checkpoint.cursor.step == plan.num_steps
        cursor = replace(checkpoint.cursor, temporary=not complete, history=history)
        writer.save(state, cursor, checkpoint.position())

    def abandon() -> None:
        folder = plan.checkpoints
        for name in sorted(set(history.abandoned) & set(folder.names())):
            log(f"checkpoint {name} was set aside as {folder.abandon(name)}")

    if history.abandoned:
        main_only(abandon)


@dataclass(frozen=True)
class Run:
    """Holds what is open while a run trains.

    Attributes:
        tokenizer: as the run's data is tokenized with it.
        saved_tokenizer: as it is saved with the model.
        source: the folder of the model that training began with.
        clock: what this process spends its time on.
        flag_sync: how the processes agree to save or stop.
        on_start: what is written when the run begins: its records, and the checkpoint that it resumes from.
    """

    plan: Plan
    tokenizer: Tokenizer
    saved_tokenizer: Tokenizer
    source: SourceFolder
    console: Console
    clock: ActivityClock
    records: RunRecords
    writer: CheckpointWriter
    flag_sync: FlagSync
    on_start: OnStart

    @property
    def exporter(self) -> Exporter:
        """Writes the run's models as its configuration says."""
        return _exporter(self.plan, self.saved_tokenizer, self.source)


@contextlib.contextmanager
def open_run(prepared: PreparedRun, console: Console, stop: StopRequest, clock: ActivityClock) -> Iterator[Run]:
    """Opens a run's folders and records, and closes them when the context exits, even after an error."""
    plan, tokenizer, init_from, logs = prepared.plan, prepared.tokenizer, prepared.init_from, prepared.logs
    on_start, source = OnStart(), source_of_run(plan, init_from)
    saved_tokenizer = tokenizer_to_save(tokenizer, plan)
    files = run_files(plan, tokenizer, saved_tokenizer, source)
    if plan.config.hf_save_path is not None:
        for model in {phase.model: None for phase in plan.phases}:
            _exporter(plan, saved_tokenizer, source).check(model, plan.state_builder.Vocab.size)
    plan.checkpoints.prepare()
    if is_url(exports := plan.config.hf_save_path or ""):
        main_only(lambda: check_store_writable(exports, "hf_save_path"))
    if plan.config.hf_upload:
        main_only(lambda: check_upload("hf_upload"))
    with open_records(plan, console, init_from, clock, on_start, logs.check_lease) as records:
        flush = [records.flush, *([logs.upload] if is_main_process() else [])]
        with open_writer(plan, files, init_from, console.log, clock, prepared.check_lease, flush) as writer:
            records.write(init_from.resume_step or 0, "start", rows=prepared.started)
            opened = (console, clock, records, writer, FlagSync(plan.layout, stop), on_start)
            yield Run(plan, tokenizer, saved_tokenizer, source, *opened)


def _exporter(plan: Plan, tokenizer: Tokenizer, source: SourceFolder) -> Exporter:
    name = plan.config.hf_save_dtype
    dtype = plan.precision.params if name is None else parse_export_dtype(name, "hf_save_dtype")
    return Exporter(plan, tokenizer, source, dtype, plan.config.hf_save_parts, plan.config.hf_stored_format)


def tokenizer_to_save(tokenizer: Tokenizer, plan: Plan) -> Tokenizer:
    """The tokenizer with the chat templates and the mask token of the phases, so that the saved model does not need more."""
    templates = [template for data in plan.data for template in data.corpus.chat_templates()]
    for data in plan.data:
        if (masking := data.batching.masking) is not None:
            tokenizer = tokenizer.with_mask_token(masking.mask_id(tokenizer))
    return with_templates(tokenizer, templates, "data.format.chat_template")
