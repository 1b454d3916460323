"""The open resources of a run: its folders, checkpoint writer, trackers and evaluations."""

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.core.devices import peak_flops
from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import location_of
from jaxlm.core.runtime import is_main_process, main_first, main_only
from jaxlm.core.stores import check_writable, is_url
from jaxlm.data.base import Batches
from jaxlm.data.data import Data, ValidationData
from jaxlm.data.examples import check_signals
from jaxlm.data.loader import RunServices
from jaxlm.data.tokenizer.chat_template import ChatTemplate, with_templates
from jaxlm.engine.activity import Activity, ActivityClock
from jaxlm.engine.checkpoint.health import SaveHealth
from jaxlm.engine.checkpoint.lock import StillHeld
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.checkpoint.manifest import History
from jaxlm.engine.checkpoint.writer import CheckpointWriter
from jaxlm.engine.conductor import Conductor
from jaxlm.engine.control import Control
from jaxlm.engine.metric_names import TOTAL_GFLOPS, TOTAL_TOKENS
from jaxlm.engine.metrics import CrashListener, Listener, Totals, Workload
from jaxlm.engine.peers import is_lost_peer
from jaxlm.engine.phases import Phase
from jaxlm.engine.signals import StopRequest
from jaxlm.engine.state import RunState
from jaxlm.engine.sync import FlagSync
from jaxlm.evals.base import EvalContext, ValidationSet
from jaxlm.interop.hf.folder import parse_dtype
from jaxlm.interop.hf.hub import check_upload
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.next_token import score_batch
from jaxlm.observe import records
from jaxlm.observe.callbacks import CallbackContext, CallbackListener, Callbacks, open_callbacks
from jaxlm.observe.completions import CompletionLog
from jaxlm.observe.console import Console
from jaxlm.observe.hooks import EvalHook, Generated, ProgressListener, ScheduledEval, TrackerListener
from jaxlm.observe.ledger import Ledger
from jaxlm.observe.log_store import LogStore, describe_start
from jaxlm.observe.loop_state import LoopState
from jaxlm.observe.profiler import ProfileHook
from jaxlm.observe.trackers import JsonlTracker, Tracker, TrackerConfig
from jaxlm.observe.trackers.background import BackgroundTracker
from jaxlm.plan.load_config import as_run_config
from jaxlm.plan.num_steps import epoch_of, small_sources
from jaxlm.plan.plan import Plan, upload_repository
from jaxlm.reading.decode import choice_name, dump
from jaxlm.session.compilation.options import step_options
from jaxlm.session.compilation.step import StepPrograms
from jaxlm.session.export import ExportHook, weights_exporter
from jaxlm.session.init_from import InitFrom
from jaxlm.session.objective_meter import ObjectiveMeter
from jaxlm.session.references import flops_per_token, references_identity
from jaxlm.session.resume_checks import (
    DATA_IDENTITY,
    ENVIRONMENT,
    REFERENCES_IDENTITY,
    computing_facts,
    data_identity,
)
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
class Run:
    """The open resources of one run.

    Attributes:
        trackers: where metrics are logged; empty until the run begins, and on processes other than 0.
        previous: totals of earlier processes of this run.
        flag_sync: how the processes agree to save or stop.
        stop: records a signal to stop.
        clock: what this process spends its time on.
        ledgers: the ledger of the run's time; empty on processes other than 0.
        loop_state: metrics of the whole run.
        callbacks: classes of the user's own; none on processes other than 0.
        beginning: what is written when the run begins: its records, and the checkpoint that it resumes from.
    """

    plan: Plan
    tokenizer: Any
    console: Console
    writer: CheckpointWriter
    trackers: Sequence[Tracker]
    logs: LogStore
    previous: Totals
    flag_sync: FlagSync
    stop: StopRequest
    clock: ActivityClock
    ledgers: tuple[Ledger, ...]
    loop_state: LoopState
    callbacks: Callbacks
    beginning: Beginning

    def open_data(self, phase: Phase) -> Data:
        """Opens the phase's token caches, and builds them first if they do not exist."""
        plan = self.plan
        data = plan.data[phase.index]
        opened = main_first(lambda: data.open(self.tokenizer, phase.model.seq_len, log=self.console.log))
        if phase.objective.sequences_axis is not None:
            check_signals(opened.train)
        for line in (*small_sources(opened, plan.batches.train.first.size), *opened.slow_sources()):
            self.console.log(f"warning: {line}")
        return opened

    def services(self, phase: Phase) -> RunServices:
        """What batches that ask the model may use."""
        plan, tokenizer = self.plan, _with_templates(self.tokenizer, self.plan)
        completions = CompletionLog(plan.config.trainer.completions, self.trackers, self.console)
        export = weights_exporter(plan, phase, tokenizer)
        of_run = (plan.precision, self.console.log, tokenizer.stop_ids, self.clock.progress)
        return RunServices(*of_run, completions.log, export)

    def eval_hook(self, phase: Phase, data: Data, refs: Mapping[str, LanguageModel] | None = None) -> EvalHook:
        """The run's evaluations on the phase's validation data. Args: refs: the references of the phase's step."""
        plan = self.plan
        trainer = plan.config.trainer

        def validation_set(data_set: ValidationData) -> ValidationSet:
            def batches() -> Iterator[Any]:
                size, most = plan.batches.eval, trainer.max_eval_batches
                for batch in data_set.batches(batch_size=size, max_batches=most, layout=plan.layout):
                    self.clock.progress()
                    yield batch

            return ValidationSet(data_set.source.name, tuple(data_set.source.config.tags), batches)

        generated = Generated()
        meter = ObjectiveMeter(phase.objective, refs or {})
        context = EvalContext(
            layout=plan.layout,
            precision=plan.precision,
            tokenizer=_with_templates(self.tokenizer, plan),
            token_bytes=self._token_bytes(phase),
            validation=tuple(map(validation_set, data.validation)),
            log=self.console.log,
            seq_len=phase.model.seq_len,
            score=score_batch,
            dummy_prefix=self.tokenizer.dummy_prefix(),
            log_sample=generated.add_sample,
            log_completions=generated.add_completions,
            chat_prompt=functools.partial(_chat_prompt, self.tokenizer, plan),
            enforce_bos=plan.data[phase.index].prompt_bos,
            progress=self.clock.progress,
            measure=meter,
        )
        evals = [ScheduledEval(config.open(context), config.every) for config in plan.config.evals]
        outputs = (self.trackers, self.console, generated)
        of_run = lambda step, metrics: self.loop_state.evaluated(step, metrics)  # noqa: E731
        completions = CompletionLog(trainer.completions, self.trackers, self.console)
        return EvalHook(evals, trainer.steps_per_eval, phase, *outputs, of_run, meter.attach, completions)

    def _token_bytes(self, phase: Phase) -> np.ndarray | None:
        known = self.tokenizer.known_token_bytes(self.console.log)
        for key, metric in [item for each in phase.controllers for item in each.metrics.items()]:
            if known is None and metric.endswith(("/bpb", "/macro_bpb", "/best_bpb")):
                raise ConfigError(
                    f"{key}: '{metric}' given for phase '{phase.name}', but the number of bytes of the tokens is unknown, so"
                    " no bits per byte are measured. Set it to eval/loss, or use another tokenizer"
                )
        return known

    def profile_hooks(self, phase: Phase, first_step: int, program: Callable[[int], str]) -> list[ProfileHook]:
        """The profiler hook, if configured. Args: program: returns the HLO text of the program that runs a given step."""
        config = self.plan.config.trainer.profiler
        if config is None:
            return []
        folder = self.plan.log_folder / "profile" / phase.name
        begin = min(first_step + config.start_step, phase.end - 1)
        return [
            ProfileHook(
                config,
                folder,
                phase,
                first_step=first_step,
                until=self.plan.batches.train.next_shape_change(begin, phase.end),
                program=functools.partial(program, begin),
                log=self.console.log,
            )
        ]

    def conductor(self, init_from: InitFrom) -> Conductor:
        """Leads the run through its phases from where it starts."""
        plan, log = self.plan, self.console.log
        history = init_from.history.settled()
        return Conductor(plan.state_builder, plan.layout, plan.checkpoints, log, init_from.state, history)

    def control(self, phase: Phase, evaluations: EvalHook, saver: Saver, state: RunState) -> Control:
        """Asks the controllers of a phase, from a state on."""
        return Control(phase, evaluations, saver, self.plan.layout, skipped=int(state.guard.skipped))

    def begin_attempt(self, history: History, step: int) -> None:
        """Tells the trackers and the ledger that the run went back to `step`."""
        for ledger in self.ledgers:
            ledger.begin_attempt(step)
        self.loop_state.go_back(step)
        for tracker in self.trackers:
            tracker.begin_attempt(history.attempt, step, history.abandoned_steps)

    def listeners(
        self, phase: Phase, state: RunState, data: Data, batches: Batches, history: History
    ) -> tuple[Listener, ...]:
        """The listeners that receive every step's metrics. Args: batches: the batches that the steps train on."""
        trainer = self.plan.config.trainer
        guards, skipped = phase.guards(self.plan.precision), int(state.guard.skipped)
        can_show = not history.attempt and data.has_examples_per_step
        of_run = [self.writer.health.metrics, *(ledger.metrics for ledger in self.ledgers), self.loop_state.metrics]
        epochs = epoch_of(phase, data, self.plan.batches.train)
        follow = CallbackListener(self.callbacks, of_run, epoch_of=epochs, last_step=phase.end, skipped=skipped)
        return (
            *self.ledgers,
            self.loop_state,
            TrackerListener(self.trackers, of_run),
            *([follow] if self.callbacks else []),
            ProgressListener(
                self.console, phase, batches.records, skipped=skipped, guards=guards, can_show_batches=can_show
            ),
            CrashListener(on_nan=trainer.crash_on_nan, on_inf=trainer.crash_on_inf),
        )

    def write_programs(self, phase: Phase, steps: StepPrograms) -> None:
        """Writes the phase's jaxprs and HLO to the log folder, if configured."""
        trainer = self.plan.config.trainer
        enabled = {"jaxpr": trainer.log_jaxprs, "hlo": trainer.log_xla_hlo}
        texts = {"jaxpr": lambda step: str(step.traced.jaxpr), "hlo": lambda step: step.call.as_text() or ""}
        folder = self.plan.log_folder / "artifacts"
        for form in (form for form in texts if enabled[form] and is_main_process()):
            folder.mkdir(parents=True, exist_ok=True)
            for (num_microbatches, microbatch), step in steps.by_shape.items():
                shape = f".{num_microbatches}x{microbatch}" if len(steps.by_shape) > 1 else ""
                (folder / f"{phase.name}{shape}.{form}.txt").write_text(texts[form](step))

    def settle(self, state: RunState, init_from: InitFrom) -> None:
        """Makes the checkpoint from which the run goes on its newest one, and blocks until that is written.

        A checkpoint of another run, or one that this run goes back to, is saved once more. Checkpoints that it abandons are
        set aside afterwards, or by the next start.
        """
        checkpoint, history = init_from.state, init_from.history
        assert checkpoint is not None
        if not init_from.is_newest:
            complete = checkpoint.cursor.step == self.plan.num_steps
            cursor = replace(checkpoint.cursor, temporary=not complete, history=history)
            self.writer.save(state, cursor, checkpoint.position())
        if history.abandoned:
            main_only(lambda: self._abandon(history.abandoned))

    def _abandon(self, names: Sequence[str]) -> None:
        folder = self.plan.checkpoints
        for name in sorted(set(names) & set(folder.names())):
            self.console.log(f"checkpoint {name} was set aside as {folder.abandon(name)}")

    def export_hooks(self, phase: Phase, evaluations: EvalHook) -> list[ExportHook]:
        """The hook that exports models for transformers, if configured."""
        config, dtype = self.plan.config, self.plan.precision.params
        if config.hf_save_path is None:
            return []
        if config.hf_save_dtype is not None:
            dtype = parse_dtype(config.hf_save_dtype, "hf_save_dtype")
        folder, tokenizer = location_of(config.hf_save_path), _with_templates(self.tokenizer, self.plan)
        target = (folder, config.hf_save_steps, phase, self.plan, tokenizer, dtype, self.console.log)
        return [ExportHook(*target, latest=lambda: evaluations.latest, upload=upload_repository(config))]

    def saver(self, phase: Phase, conductor: Conductor) -> Saver:
        """The checkpoint policy, applied to a phase."""
        begin_lines = [ledger.begin_line for ledger in self.ledgers]
        history, resumed = conductor.history, conductor.resumed
        newest = None if resumed is None else replace(resumed.cursor, history=history).folder_name
        return Saver(self.writer, self.plan.config.trainer.checkpointer, phase, begin_lines, history, newest)

    def workload(self, phase: Phase) -> Workload:
        """What a step of a phase amounts to, for throughput and MFU."""
        plan = self.plan
        devices = jax.devices()
        peak = peak_flops(devices[0].device_kind)
        tokens = plan.tokens_per_example(phase)
        return Workload(
            batches=plan.batches.train,
            tokens=tokens,
            flops=flops_per_token(plan, phase).causal * tokens,
            peak_flops=None if peak is None else peak * len(devices),
            num_steps=plan.num_steps,
            previous=self.previous,
        )


@contextlib.contextmanager
def open_run(
    plan: Plan,
    tokenizer: Any,
    console: Console,
    stop: StopRequest,
    init_from: InitFrom,
    logs: LogStore,
    still_held: StillHeld,
    clock: ActivityClock,
) -> Iterator[Run]:
    """Opens a run's folders and trackers, and closes them when the context exits, even after an error."""
    config_text = dump(as_run_config(plan.config))
    identity = json.dumps(data_identity(plan))
    tokenizer_files = _tokenizer_files(_with_templates(tokenizer, plan))
    facts = json.dumps(computing_facts(plan.config, step_options(plan)), indent=1)
    files = {"config.yaml": config_text.encode(), DATA_IDENTITY: identity.encode(), ENVIRONMENT: facts.encode()}
    files |= tokenizer_files
    if plan.refs:
        files[REFERENCES_IDENTITY] = json.dumps(references_identity(plan)).encode()
    with contextlib.ExitStack() as closing:
        plan.checkpoints.prepare()
        if is_url(exports := plan.config.hf_save_path or ""):
            main_only(lambda: check_writable(exports, "hf_save_path"))
        if plan.config.hf_upload:
            main_only(lambda: check_upload("hf_upload"))
        trackers: list[Tracker] = []
        previous = totals_at(plan.log_folder / records.METRICS, init_from.resume_step or 0)
        begin = init_from.resume_step or 0
        loop_state = LoopState(records.read_metrics(plan.log_folder / records.METRICS) if begin else (), begin)
        ledgers = (Ledger(plan.log_folder, clock, begin, console.log),) if is_main_process() else ()

        def write_records() -> None:
            for tracker in _open_trackers(plan, console, init_from):
                trackers.append(tracker)
                closing.callback(tracker.close)
            describe_start(plan.log_folder, config_text)
            for ledger in ledgers:
                ledger.write()
                closing.callback(ledger.write)

        beginning = Beginning()
        beginning.then(lambda: main_only(write_records))
        checkpoint = init_from.state
        newest = checkpoint.checkpoint.name if checkpoint is not None and init_from.is_newest else None
        health = SaveHealth(plan.config.trainer.checkpointer, newest, console.log)
        flush = [lambda: [tracker.flush() for tracker in trackers], *([logs.upload] if is_main_process() else [])]
        writer = CheckpointWriter(plan.checkpoints, files, health, console.log, still_held, flush, clock.progress)
        sync = FlagSync(plan.layout)
        callbacks = main_only(lambda: _open_callbacks(plan, console, init_from)) or Callbacks({}, console.log)
        with callbacks, _finished(writer, clock):
            parts = (plan, tokenizer, console, writer, trackers, logs, previous, sync, stop, clock, ledgers, loop_state)
            yield Run(*parts, callbacks, beginning)


@contextlib.contextmanager
def _finished(writer: CheckpointWriter, clock: ActivityClock) -> Iterator[None]:
    """Closes the writer at the end. After an error, it only waits for the save in progress, which needs the trackers and the
    lease that are closed next. If another process is gone, that save cannot end.
    """
    try:
        yield
    except Exception as error:
        if not is_lost_peer(error):
            with clock.during(Activity.SAVE):
                writer.join()
        raise
    with clock.during(Activity.SAVE):
        writer.close()


def totals_at(metrics: Path, step: int) -> Totals:
    """A run's totals after `step`, from its metrics file; zeros if the file has no such record."""
    for record in reversed(records.read_metrics(metrics) if step else []):
        tokens, gflops = record.get(TOTAL_TOKENS), record.get(TOTAL_GFLOPS)
        if record["step"] == step and tokens is not None and gflops is not None:
            return Totals(step, tokens, gflops)
    return Totals()


def _open_trackers(plan: Plan, console: Console, init_from: InitFrom) -> tuple[Tracker, ...]:
    """The `metrics.jsonl` tracker, and the configured trackers, each in a background thread."""
    path, trainer = plan.log_folder / records.METRICS, plan.config.trainer
    begin = {"resume_step": init_from.resume_step or 0, "attempt": init_from.history.attempt}
    jsonl = JsonlTracker(path, **begin, warn=console.log, max_completions_bytes=trainer.completions.max_bytes)
    if not trainer.trackers:
        return (jsonl,)
    info = run_info(plan, init_from)

    def in_background(config: TrackerConfig) -> Tracker:
        return BackgroundTracker(choice_name(type(config)), lambda: config.open(info), console.log)

    return (jsonl, *map(in_background, trainer.trackers))


def _open_callbacks(plan: Plan, console: Console, init_from: InitFrom) -> Callbacks | None:
    configs = plan.config.trainer.callbacks
    return open_callbacks(configs, CallbackContext(run_info(plan, init_from), console.log)) if configs else None


def _chat_prompt(
    tokenizer: Any, plan: Plan, messages: Sequence[Mapping[str, Any]], where: str
) -> tuple[str, list[int]]:
    text = ChatTemplate.load(None, _with_templates(tokenizer, plan), "data.tokenizer").prompt(messages, where)
    return text, tokenizer.encode_like_transformers(text, add_special_tokens=False)


def _with_templates(tokenizer: Any, plan: Plan) -> Any:
    """The tokenizer with the chat templates of the phases, so that the saved model does not need their files."""
    given = [template for data in plan.data for template in data.chat_templates()]
    return with_templates(tokenizer, given, "data.format.chat_template")


def _tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return {f"tokenizer/{path.name}": path.read_bytes() for path in Path(folder).iterdir()}
