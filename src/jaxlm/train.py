"""Trains what a YAML file describes. Read this first.

    jaxlm train --config_path run.yaml --trainer.train_batch_size 512

A run is a list of phases over one state: enter a phase (surgery, trainable parameters, optimizer state), train to its end,
enter the next. A run that has a checkpoint continues from it, bit for bit.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxlm.core.errors import ConfigError, shown
from jaxlm.core.hashing import check_same_files, note
from jaxlm.core.runtime import configure_jax, is_main_process, main_first, main_only, release_ended
from jaxlm.core.stores import AT_START_S, retried
from jaxlm.core.values.logged import Activity
from jaxlm.data.cache.ray_workers import tokenize_on_ray
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.activity import ActivityClock, uncounted_age_s
from jaxlm.engine.checkpoint.lease import LeaseCheck, LeaseLostError, all_held
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.checkpoint.manifest import CHECKSUMS
from jaxlm.engine.checkpoint.store import SaveError
from jaxlm.engine.control import Control
from jaxlm.engine.entry import enter_phase
from jaxlm.engine.loop import TrainingLoop
from jaxlm.engine.open_phase import OpenPhase
from jaxlm.engine.peers import connect_if_it_fails, watch_peers
from jaxlm.engine.phase_runner import PhaseRunner
from jaxlm.engine.phases import Phase
from jaxlm.engine.preemption import metadata_host, stop_on_signals, watch_notices
from jaxlm.engine.state import RunState
from jaxlm.engine.sync import Done, Interrupted, Outcome, StoppedError
from jaxlm.engine.watchdog import Watchdog
from jaxlm.models.base import token_leaves
from jaxlm.observe.console import Console, table
from jaxlm.observe.log_file import LogStore
from jaxlm.observe.records import TRAIN_LOG
from jaxlm.observe.trackers import check_trackers
from jaxlm.plan.load_config import given_distributed, load_config, run_id_of
from jaxlm.plan.num_steps import check_num_steps, with_num_steps_of_data
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.plan.rows import phase_rows
from jaxlm.plan.run_config import RunConfig
from jaxlm.session.compilation.options import enable_compilation_cache, step_options
from jaxlm.session.compilation.step import compile_steps
from jaxlm.session.dry_run import assumed_vocabulary, dry_run
from jaxlm.session.exit_codes import command
from jaxlm.session.final_report import final_report
from jaxlm.session.init_from import (
    InitFrom,
    check_hf_weights,
    check_init_from,
    check_tokenizer,
    expected_cursor,
    find_init_from,
)
from jaxlm.session.leaves_from_tokens import leaves_from_tokens
from jaxlm.session.phase import PhaseData, check_gates_again, open_hooks, open_metrics, open_phase_data, open_probe
from jaxlm.session.references import check_references, load_reference, load_references
from jaxlm.session.resume_checks import (
    SavedRun,
    changed_stages,
    changes,
    check_cursor,
    check_same_data,
    check_same_run,
    check_same_tokenizer,
    evaluated_changes,
    read_again,
    with_past_references,
)
from jaxlm.session.run import PreparedRun, Run, open_run, settle
from jaxlm.session.startup import (
    check_accelerator,
    check_exports_are_new,
    check_opens,
    check_performance,
    check_same_start,
    describe,
)
from jaxlm.session.tables import check_run_tables, tables_after_training
from jaxlm.session.verification import check_evaluation_references, check_sanity

# The plan of a model that grows takes seconds for 32 phases and half a minute for 128: each traces all stacks so far.
_MANY_PHASES = 16


@dataclass(frozen=True)
class TrainResult:
    """Describes how a training run ended.

    Attributes:
        state: after the last step; None for a dry run.
        outcome: why training stopped.
        checkpoint: path or URL of the newest checkpoint; None for a dry run.
        plan: the plan of the run; `metrics.jsonl` is in its `log_folder`.
    """

    state: RunState | None = field(repr=False)
    outcome: Outcome
    checkpoint: Path | str | None
    plan: Plan = field(repr=False)


@command
def main(arguments: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    connect_if_it_fails(lambda: given_distributed(arguments))
    outcome = train(load_config(arguments, "jaxlm.train"), clock=ActivityClock(uncounted_age_s())).outcome
    return outcome.exit_code if isinstance(outcome, Interrupted) else 0


def train(config: RunConfig, console: Console | None = None, clock: ActivityClock | None = None) -> TrainResult:
    """Runs a configuration to its end, from its newest checkpoint if it has one.

    Args:
        clock: counts what the time is spent on; by default, one that begins now.

    Raises:
        ConfigError: the configuration cannot be run, before anything is compiled or written; a dry run found, before or after
            it compiled, that a start would fail; or a reward, an environment or the data failed later.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError(f"train: {shown(config)} given, a configuration expected. jaxlm.read_config(PATH) reads one")
    console, clock = console or Console(), clock or ActivityClock()
    plan = _make_checked_plan(config, console)
    if config.dry_run:
        dry_run(plan, console)
        return TrainResult(None, Done(), None, plan)
    state, outcome = None, Done()
    with (
        _prepared(plan, console) as prepared,
        prepared.plan.layout.use(),
        stop_on_signals() as stop,
        watch_notices(stop, metadata_host() if config.trainer.preemption_notices else None),
        Watchdog(config.trainer.watchdog, clock, prepared.plan.log_folder),
        open_run(prepared, console, stop, clock) as run,
    ):
        plan, init_from = prepared.plan, prepared.init_from
        if init_from.state is not None:
            with clock.during(Activity.RESTORE):
                state = _restore(run, init_from)
            if init_from.state.cursor.step == (ended := plan.phases[init_from.state.cursor.phase]).end:
                check_gates_again(run, ended, state)
        history = init_from.history.settled()
        phase_runner = PhaseRunner(
            plan.state_builder, plan.layout, plan.checkpoints, console.log, init_from.state, history
        )
        while (phase := phase_runner.phase) is not None and not isinstance(outcome, Interrupted):
            try:
                with _open_phase(run, phase, state, phase_runner, init_from) as (state, opened):
                    with clock.during(Activity.STEP):
                        state, outcome = TrainingLoop(state, opened).run()
                    with clock.during(Activity.RESTORE):
                        state = phase_runner.act(outcome, state, opened)
            except StoppedError as stopped:
                outcome = stopped.outcome
            run, opened = replace(run, plan=replace(run.plan, state_builder=phase_runner.state_builder)), None
            if phase_runner.phase not in (None, phase):  # not when it goes back, to where the same programs run
                release_ended()
        run.on_start.run()  # of a run that is complete
    plan = run.plan
    saved = retried(plan.checkpoints.checkpoints, AT_START_S)
    newest = saved[-1].location if saved else None  # a notice may come before the first phase is entered
    if isinstance(outcome, Interrupted):
        where = f"saved as {newest}" if saved else "before training started; nothing was lost"
        console.log(f"stopped by {outcome.cause}; {where}. Run the same command again to continue")
    elif is_main_process():
        final_report(plan, console, has_template=run.saved_tokenizer.chat_template is not None)
    if state is not None and newest is not None and not isinstance(outcome, Interrupted):
        tables_after_training(plan, state, run.tokenizer, newest, console.log)
    run.records.write_ledgers()
    console.close()
    if is_main_process():
        prepared.logs.upload()
    return TrainResult(state, outcome, newest, plan)


def _make_checked_plan(config: RunConfig, console: Console) -> Plan:
    """Makes the plan of a run and checks everything that needs neither data nor checkpoints."""
    configure_jax(config.trainer.jax_config)
    config.trainer.distributed.join()
    watch_peers(config.trainer.distributed.heartbeat_timeout.total_seconds())
    run_id = run_id_of(config)
    check_same_start(config, run_id)
    if len(config.phases) >= _MANY_PHASES:
        console.log(f"planning {len(config.phases)} phases ...")
    plan = make_plan(config, run_id, assumed_vocabulary(config)[0])
    for data in plan.data:
        data.corpus.check_not_empty()  # a dry run lists what other machines may have, but no machine has text without a name
    if (vocab_size := plan.data[0].vocab_size) is not None:
        token_leaves(plan.model, vocab_size)  # raises for keys that do not suit it
    check_performance(plan)
    check_accelerator(plan)
    check_num_steps(config)
    check_trackers(config.trainer.trackers)
    return plan


@contextlib.contextmanager
def _prepared(plan: Plan, console: Console) -> Iterator[PreparedRun]:
    """Loads the tokenizer and finds the checkpoint to start from.

    From the first write on, and while the context is open, a second start of the run is refused.
    """
    config = plan.config
    logs = LogStore(plan.log_url, plan.log_folder, console.log)
    main_only(lambda: logs.fetch(replace=False))
    plan.checkpoints.open(console.log)
    check_init_from(plan)
    plan = with_past_references(plan)
    for ref in plan.active_refs.values():
        ref.identity()  # all processes read the references here; the next line is process 0's alone
    saved = main_only(lambda: check_same_run(plan))  # only process 0 may have these files
    for section in (*config.evals, *plan.data):
        section.check()
    enable_compilation_cache(config.trainer.compilation_cache_dir)

    tokenizer = main_first(lambda: plan.data[0].corpus.load_tokenizer(log=console.log))
    check_hf_weights(plan, tokenizer.vocab_size)
    token_leaves(plan.model, tokenizer.vocab_size)  # raises for keys that do not suit the vocabulary
    check_same_data(plan, tokenizer.fingerprint)
    saved = main_only(lambda: saved and check_same_tokenizer(plan, saved, tokenizer))
    cursor = expected_cursor(plan)
    main_only(lambda: check_opens(plan, tokenizer, cursor))
    seq_lens = [phase.model.seq_len for phase in plan.phases]
    tokenize_on_ray(config.trainer.ray, plan.data, tokenizer, seq_lens, console.log)
    config = with_num_steps_of_data(config, plan.batches, tokenizer, console.log)
    plan = plan.updated(config, tokenizer.vocab_size)
    check_references(plan, tokenizer, console.log)
    check_same_files()
    check_run_tables(plan, console.log)
    main_only(lambda: check_exports_are_new(plan, 0 if cursor is None else cursor.step))
    with contextlib.ExitStack() as closing:
        # First what the kernel answers at once. A start that took the lease, and was then refused, would end a paused run.
        leases = (logs.locked, lambda: plan.checkpoints.locked(console.log))
        held = [main_only(lambda lease=lease: closing.enter_context(lease())) for lease in leases]
        check_lease = all_held(filter(None, held))
        main_only(logs.check_writable)
        main_only(lambda: logs.fetch(replace=True))
        if is_main_process():
            closing.callback(_upload, logs, check_lease)
        plan, init_from, started = _start(plan, tokenizer, saved, console)
        try:
            yield PreparedRun(plan, tokenizer, init_from, started, logs, check_lease)
        except SaveError:
            check_lease()  # a save that fails because another start has the folder says so
            raise


def _upload(logs: LogStore, check_lease: LeaseCheck) -> None:
    """Copies the logs, unless another start of the run, whose logs they are now, has taken over."""
    with contextlib.suppress(LeaseLostError):
        check_lease()
        logs.upload()


def _start(
    plan: Plan, tokenizer: Tokenizer, saved: SavedRun | None, console: Console
) -> tuple[Plan, InitFrom, list[tuple[str, str]]]:
    """Opens the log and finds the checkpoint to start from. Returns the plan for it, it, and the rows of the start's table.

    Args:
        saved: what the run was last started with, on process 0.
    """
    config = plan.config
    try:
        console.log_to(plan.log_folder / TRAIN_LOG)
    except OSError as error:
        raise ConfigError(
            f"trainer.log_dir: {plan.log_folder} cannot be written: {error.strerror}. Set it to a writable folder"
        ) from error
    init_from = find_init_from(plan, console.log)
    if (source := init_from.weights or init_from.state) is not None:
        note("the checkpoint that the run starts from", source.checkpoint.read(CHECKSUMS).decode())
    if (resumed_plan := read_again(plan, init_from)).retired_refs != plan.retired_refs:
        plan = resumed_plan
        check_references(plan, tokenizer, console.log)
    started = describe(plan, init_from.describe(plan))
    console.log(table("run", started))
    if init_from.initializes(plan):
        plan = plan.with_token_leaves(leaves_from_tokens(plan, tokenizer, console.log))
    plan = plan.with_phase_ends(init_from.history.phase_ends)
    check_tokenizer(init_from, tokenizer, console.log)
    if init_from.state and init_from.resume_step:
        num_sequences, options = init_from.state.position()["examples"], step_options(plan)  # all processes call both
        for line in changes(saved, config, options, init_from.resume_step, num_sequences) if saved else []:
            console.log(f"changed since the last start: {line}")
    return plan, init_from, started


def _restore(run: Run, init_from: InitFrom) -> RunState:
    plan, checkpoint = run.plan, init_from.state
    assert checkpoint is not None
    phase = check_cursor(checkpoint.cursor, plan)
    state = init_from.load_state(plan, phase, run.console.log)
    complete = checkpoint.cursor.step == plan.num_steps
    progress = f"the run is complete: all {plan.num_steps} steps are done" if complete else "resuming"
    run.console.log(f"{progress}, from {checkpoint.location}")
    for line in changed_stages(checkpoint.cursor, checkpoint.position(), phase, plan):
        run.console.log(line)
    run.on_start.add(lambda: settle(plan, run.writer, init_from, state, run.console.log))
    return state


@contextlib.contextmanager
def _open_phase(
    run: Run, phase: Phase, state: RunState | None, phase_runner: PhaseRunner, init_from: InitFrom
) -> Iterator[tuple[RunState, OpenPhase]]:
    """Enters a phase, or continues in the middle of it. Yields the state to train from, and the phase with all it needs.

    Args:
        state: at the end of the phase before, or in the middle of this one; None at the start of a run.
    """
    plan, log = run.plan, run.console.log
    with open_phase_data(run, phase, phase_runner.resumed) as data:
        evaluated = check_same_files()
        enter = _entry(run, phase, state, data, init_from) if phase_runner.resumed is None else None
        # Compiled before the state is made: a step that does not fit into memory ends in a message, not in a killed machine.
        with run.clock.during(Activity.COMPILE):
            steps = compile_steps(plan, phase, data.first_step, log)
        steps.check_fits_memory()
        refs = load_references(plan, phase, log)
        if enter is not None:
            check_sanity(plan, phase, refs, data.reopened, log)
            check_evaluation_references(plan, phase, data.reopened, log)
        with open_hooks(run, phase, data, steps, refs) as hooks:
            for line in evaluated_changes(run.writer.run_files, phase.name, evaluated | check_same_files()):
                log(f"changed since the last start: {line}")
            run.on_start.run()
            if enter is not None:
                state, enter = enter(), None  # frees the references that its surgeries have read
            assert state is not None
            check_same_files()  # also what the loading of weights has read
            saver = _begin_phase(run, phase, state, data, phase_runner)
            skipped = int(state.guard.skipped)
            note = run.records.decided
            control = Control(phase, saver, plan.layout, hooks.evaluations, skipped=skipped, note=note)
            rows = phase_rows(plan, phase, state.model, state.opt_state)
            facts = {"name": phase.name, "start": phase.start, "end": phase.end, "num_phases": len(plan.phases)}
            text = table(f"phase '{phase.name}': parameters", rows)
            run.records.report(data.first_step, text, "phase", **facts, rows=rows)
            steps.write(plan.config.trainer, plan.log_folder / "artifacts", phase.name)
            opened = OpenPhase(
                phase,
                lambda state, batch, flags: steps(state, refs, batch, flags),
                data.batches,
                open_metrics(run, phase, data, control, saver.history, skipped),
                control,
                saver,
                run.flag_sync,
                run.clock,
                log,
                hooks,
                open_probe(run, phase, data.data, refs),
            )
            yield control.begin(state), opened


def _entry(
    run: Run, phase: Phase, state: RunState | None, data: PhaseData, init_from: InitFrom
) -> Callable[[], RunState]:
    """Returns what makes the state at the start of a phase from the state before it or the weights to start a run with."""
    plan, log = run.plan, run.console.log
    refs = {name: load_reference(plan, name, log) for name in phase.surgery_references}
    check_sanity(plan, phase, refs, data.reopened, log)
    weights, num_applied = init_from.load_weights(plan, log) if state is None else (None, 0)
    return enter_phase(
        plan.state_builder,
        phase,
        plan.layout,
        state,
        weights,
        num_applied=num_applied,
        refs=refs,
        open_batches=data.reopened,
        report=lambda table: run.records.report(phase.start, table.text, "layers", **vars(table)),
    )


def _begin_phase(run: Run, phase: Phase, state: RunState, data: PhaseData, phase_runner: PhaseRunner) -> Saver:
    """Saves the state with which a phase is entered, or to which the run went back. Returns what saves from here on."""
    history, resumed = phase_runner.history, phase_runner.resumed
    before_save = [ledger.begin_line for ledger in run.records.ledgers]
    newest = None if resumed is None else replace(resumed.cursor, history=history).folder_name
    saver = Saver(run.writer, run.plan.config.trainer.checkpointer, phase, before_save, history, newest)
    if resumed is None:
        with run.clock.during(Activity.SAVE):
            saver.save_entry(state, data.batches.state())
    elif phase_runner.num_skipped:
        data.batches.skip(phase_runner.num_skipped)
        saver.save_rewound(state, resumed.cursor, data.batches.state())
        run.records.begin_attempt(saver.history, data.first_step)
    return saver


class _Module(types.ModuleType):
    __call__ = staticmethod(train)  # importing this module makes it `jaxlm.train`, which programs call


sys.modules[__name__].__class__ = _Module

if __name__ == "__main__":
    sys.exit(main())
