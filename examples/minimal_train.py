"""A whole training run in one file, of jaxlm's public parts. Read it from top to bottom, or copy it and change it.

    python examples/minimal_train.py --config_path config/quickstart.yaml --trainer.num_train_steps 50

It reads the same YAML as `jaxlm train`, has the same losses to the last bit, and writes the same checkpoints: either program
continues the other's. Run the same command again after a stop or a crash, and it goes on from the newest checkpoint.

    configuration -> tokenizer -> plan -> where to start
        -> each phase: data, compiled step, state -> for each batch: state, report = step(state, batch) -> checkpoints

What src/jaxlm/train.py has beyond this: evaluations and exports between steps, trackers, controllers (which end a phase
early, go back after bad steps, or stop a run whose updates are all skipped), data that a model writes, logs at a URL, a
watchdog, notices of machines that will stop.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxlm.controllers.early_stopping import BadStreak
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import OBJECTIVE
from jaxlm.core.runtime import configure_jax, main_first, main_only
from jaxlm.core.values.logged import LEARNING_RATE, StepInfo
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.checkpoint.lease import LeaseCheck
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.checkpoint.manifest import History
from jaxlm.engine.checkpoint.restore import VerifiedCheckpoint
from jaxlm.engine.checkpoint.writer import CheckpointWriter
from jaxlm.engine.entry import OpenBatches, enter_phase
from jaxlm.engine.metrics import CrashListener
from jaxlm.engine.peers import watch_peers
from jaxlm.engine.phases import Phase
from jaxlm.engine.preemption import stop_on_signals
from jaxlm.engine.state import RunState
from jaxlm.engine.step import StepReport
from jaxlm.engine.sync import FlagSync, Interrupted
from jaxlm.observe.console import Console, table
from jaxlm.observe.records import METRICS
from jaxlm.observe.trackers import JsonlTracker
from jaxlm.plan.load_config import load_config, refuse_dry_run, run_id_of
from jaxlm.plan.num_steps import with_num_steps_of_data
from jaxlm.plan.plan import Plan, make_plan, plan_phases
from jaxlm.plan.run_config import RunConfig
from jaxlm.session.compilation.options import enable_compilation_cache
from jaxlm.session.compilation.step import compile_steps
from jaxlm.session.exit_codes import command
from jaxlm.session.init_from import InitFrom, check_hf_weights, check_init_from, check_tokenizer, find_init_from
from jaxlm.session.leaves_from_tokens import leaves_from_tokens
from jaxlm.session.phase import open_data
from jaxlm.session.references import check_references, load_reference, load_references
from jaxlm.session.resume_checks import check_cursor, check_same_data, check_same_run, check_same_tokenizer
from jaxlm.session.run import open_writer, run_files, tokenizer_to_save
from jaxlm.session.source import source_of_run
from jaxlm.session.startup import check_accelerator, check_performance, describe


@dataclass(frozen=True)
class Run:
    """What all phases use.

    Attributes:
        tracker: writes `metrics.jsonl`; None on processes other than 0.
        sync: makes all processes save and stop after the same step.
    """

    plan: Plan
    tokenizer: Tokenizer
    start: InitFrom
    console: Console
    tracker: JsonlTracker | None
    writer: CheckpointWriter
    sync: FlagSync


@command  # prints a mistake in the configuration as one message, with exit code 2
def main(arguments: Sequence[str]) -> int:
    """Trains to the end, or until a signal. Returns the exit code."""
    # The YAML file, and over it the options of the command line. The result is a tree of frozen dataclasses.
    config = load_config(arguments, "examples.minimal_train")
    refuse_dry_run(config, "this program only trains")
    configure_jax(config.trainer.jax_config)  # before jax opens the devices
    config.trainer.distributed.join()  # a run may have several processes; alone, this does nothing
    watch_peers(config.trainer.distributed.heartbeat_timeout.total_seconds())
    enable_compilation_cache(config.trainer.compilation_cache_dir)
    console = Console()  # prints on process 0 only

    plan, tokenizer = make_checked_plan(config, console)
    plan.checkpoints.open(console.log)  # a folder on a disk or in a bucket
    with contextlib.ExitStack() as closing:
        # A second start of the run is refused as long as this one lives.
        check_lease = main_only(lambda: closing.enter_context(plan.checkpoints.locked(console.log))) or (lambda: None)
        plan, start = find_start(plan, tokenizer, console)
        console.log(table("run", describe(plan, start.describe(plan))))
        # The layout says how everything that is traced inside is sharded over the mesh.
        with open_run(plan, tokenizer, start, console, check_lease) as run, plan.layout.use():
            signal = train(run)
    if signal:
        console.log("stopped and saved. Run the same command again to continue")
        return Interrupted(signal).exit_code
    console.log(f"trained: jaxlm sample --checkpoint {plan.checkpoints} --prompt 'Once'")
    return 0


def make_checked_plan(config: RunConfig, console: Console) -> tuple[Plan, Tokenizer]:
    """What will run where: phases, the mesh and the layout of the devices, batch sizes, the shapes of the state.

    Nothing is on the devices yet. A plan that cannot be trained raises `ConfigError` here.
    """
    _, sections = plan_phases(config)  # of data, one for each phase
    for section in sections:
        section.check()  # looks up all files
    # `main_first`: process 0 trains the tokenizer if need be, and the others then load what it has written.
    tokenizer = main_first(lambda: sections[0].corpus.load_tokenizer(console.log))
    plan = make_plan(config, run_id_of(config), tokenizer.vocab_size)
    # With `epoch` or `data.stop_strategy`, the number of steps follows from the data.
    plan = plan.updated(with_num_steps_of_data(config, plan.batches, tokenizer, console.log), tokenizer.vocab_size)
    for phase, section in zip(plan.phases, plan.data, strict=True):
        check_is_simple(phase, section.batching.has_examples_per_step)
    check_accelerator(plan)
    check_performance(plan)
    check_references(plan, tokenizer, console.log)

    trainer, keys = config.trainer, ("tracker", "callbacks", "watch", "profiler", "log_jaxprs", "log_xla_hlo", "ray")
    left_out = {"evals": config.evals, "tables": config.tables, "hf_save_path": config.hf_save_path}
    left_out |= {f"trainer.{key}": getattr(trainer, key) for key in keys}
    if names := [name for name, value in left_out.items() if value]:
        console.log(f"note: no effect here, only in jaxlm train: {', '.join(names)}")
    return plan, tokenizer


def check_is_simple(phase: Phase, has_examples_per_step: bool) -> None:
    """Raises `ConfigError` for a phase that would train differently here: what it needs is in jaxlm train alone."""
    decides = any(not isinstance(controller, BadStreak) for controller in phase.controllers)
    reasons = {
        "controllers, `until` or `rewind_after`": decides or phase.optimizer.facts.rewind_rule is not None,
        "an objective with stored annotations": phase.objective.facts.annotation_key is not None,
        "data that a model writes": not has_examples_per_step,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(f"phase '{phase.name}' has {' and '.join(found)}. Use jaxlm train, or extend this file")


def find_start(plan: Plan, tokenizer: Tokenizer, console: Console) -> tuple[Plan, InitFrom]:
    """What the run starts from: its own newest checkpoint, another run's, weights, or the seed."""
    check_init_from(plan)
    check_hf_weights(plan, tokenizer.vocab_size)
    # A run resumes only with the same model, data and tokenizer.
    saved = main_only(lambda: check_same_run(plan))
    main_only(lambda: saved and check_same_tokenizer(plan, saved, tokenizer))
    check_same_data(plan, tokenizer.fingerprint)  # on all processes
    start = find_init_from(plan, console.log)  # verifies checksums, and sets damaged checkpoints aside
    check_tokenizer(start, tokenizer, console.log)
    if start.history.attempt or start.history.phase_ends:
        raise ConfigError("this run has gone back, or has ended a phase early. Continue it with jaxlm train")
    if start.initializes(plan):  # some models have parameters that follow from the training tokens
        plan = plan.with_token_leaves(leaves_from_tokens(plan, tokenizer, console.log))
    return plan, start


@contextlib.contextmanager
def open_run(
    plan: Plan, tokenizer: Tokenizer, start: InitFrom, console: Console, check_lease: LeaseCheck
) -> Iterator[Run]:
    """Opens what writes the metrics and the checkpoints, and handles SIGTERM and Ctrl-C."""
    plan.checkpoints.prepare()  # creates the folder, and removes what a killed start has left unfinished
    # Every checkpoint says how it was made: it can be sampled and resumed without anything else.
    files = run_files(plan, tokenizer, tokenizer_to_save(tokenizer, plan), source_of_run(plan, start))
    # The records of steps after the checkpoint are removed, because these steps run again.
    path, options = plan.log_folder / METRICS, {"resume_step": start.resume_step, "check_lease": check_lease}
    tracker = main_only(lambda: JsonlTracker(path, **options))
    flush = [] if tracker is None else [tracker.flush]  # metrics up to step N are on disk before `step-N` is visible
    try:
        with (
            open_writer(plan, files, start, console.log, ActivityClock(), check_lease, flush) as writer,
            stop_on_signals() as stop,
        ):
            yield Run(plan, tokenizer, start, console, tracker, writer, FlagSync(plan.layout, stop))
    finally:
        if tracker is not None:
            tracker.close()


def train(run: Run) -> int:
    """Trains all phases that are left. Returns the number of the signal that has ended training; 0 if it is complete."""
    plan, start = run.plan, run.start
    state, resumed, number = None, start.state, 0
    if resumed is not None:
        phase = check_cursor(resumed.cursor, plan)
        state = start.load_state(plan, phase, run.console.log)  # every array directly into its shards
        run.console.log(f"resuming, from {resumed.location}")
        number = phase.index
        if resumed.cursor.step == phase.end:  # that phase is complete: enter the next one with its last state
            resumed, number = None, number + 1
    for phase in plan.phases[number:]:
        state, signal = train_phase(run, phase, state, resumed)
        resumed = None
        if signal:
            return signal
    return 0


def train_phase(
    run: Run, phase: Phase, state: RunState | None, resumed: VerifiedCheckpoint | None
) -> tuple[RunState, int]:
    """Trains a phase to its end, or until a signal. Returns the state, and the signal's number or 0.

    Args:
        state: at the end of the phase before, or that of `resumed`; None at the start of the run.
        resumed: the checkpoint in this phase from which it goes on; None if it begins.
    """
    plan, log = run.plan, run.console.log
    first_step = phase.start if resumed is None else resumed.cursor.step

    # Data: token caches (made if they are missing), and an endless stream of batches. Which sequences the batch of a step has
    # depends on the seed and the step alone, so a position in the stream is a few numbers.
    data = open_data(plan, run.tokenizer, phase, log)
    order: dict[str, Any] = {"start": phase.start, "first_step": first_step, "seed": plan.config.order_seed}
    open_batches = lambda: data.batches(plan.batches.of(phase), plan.layout, **order)  # noqa: E731

    # The step is a pure function (state, references, batch, flags) -> (state, report), compiled from shapes alone. So a step
    # that does not fit into memory is a message before there is a state. engine/step.py says what it computes.
    step_programs = compile_steps(plan, phase, first_step, log)
    step_programs.check_fits_memory()

    if resumed is None:
        state = enter(run, phase, state, open_batches)
    assert state is not None
    refs = load_references(plan, phase, log)  # models that the loss reads, such as a teacher; mostly there are none

    # The saver decides which checkpoints are due (trainer.checkpointer), and writes them in the background. A checkpoint has
    # the state, the position in the data, and what `run_files` has made.
    newest = None if resumed is None else resumed.cursor.folder_name
    saver = Saver(run.writer, plan.config.trainer.checkpointer, phase, [], History(), newest)

    with contextlib.closing(open_batches()) as batches:
        if resumed is None:
            saver.save_entry(state, batches.state())
        else:
            batches.restore(resumed.position())
        signal, flags, pending = 0, None, None
        for step in range(first_step + 1, phase.end + 1):
            batch = next(batches)
            wants_save = saver.due_by_clock()
            # Returns at once: the devices compute while Python goes on. The old state's memory is used again.
            state, report = step_programs(state, refs, batch, run.sync.raised(save=wants_save))
            batches.read_ahead()  # loads the next batch meanwhile
            # The numbers of the step before: to wait for those of this step would leave the devices without work.
            if pending is not None:
                flags = log_step(run, phase, *pending)
            pending = step, report

            # A signal, or process 0's clock, reaches one process. All of them act on it after the same step.
            agreed = run.sync.agreed(flags, save=wants_save)
            signal = agreed.stop
            is_last = step == phase.end or signal != 0
            if is_last or agreed.save or saver.due_by_step(step):
                log_step(run, phase, *pending)
                flags = pending = None
                saver.save(state, step, batches.state(), forced=is_last)  # `forced` waits until it is written
            if signal:
                break
    saver.settle()
    return state, signal


def enter(run: Run, phase: Phase, before: RunState | None, open_batches: OpenBatches) -> RunState:
    """The state at the start of a phase: its surgeries change the model, and the optimizer starts anew."""
    plan, log = run.plan, run.console.log
    weights, num_applied = run.start.load_weights(plan, log) if before is None else (None, 0)  # None: from the seed
    refs = {name: load_reference(plan, name, log) for name in phase.surgery_references}
    report = lambda decided: log(decided.text)  # noqa: E731 - what a surgery decides from measurements
    options = {"num_applied": num_applied, "refs": refs, "open_batches": open_batches, "report": report}
    return enter_phase(plan.state_builder, phase, plan.layout, before, weights, **options)()


def log_step(run: Run, phase: Phase, step: int, report: StepReport) -> np.ndarray:
    """Waits for a step, and logs its numbers. Returns the flags that the processes agree on."""
    metrics = {name: float(value) for name, value in jax.device_get(report.metrics).items()}
    if run.tracker is not None:
        run.tracker.log(step, metrics)
    rate = metrics[LEARNING_RATE]
    line = f"{phase.name}: step {step} of {run.plan.num_steps}, loss {metrics[OBJECTIVE]:.4f}, learning rate {rate:.3g}"
    run.console.progress(line, last=step == phase.end)
    trainer = run.plan.config.trainer
    CrashListener(on_nan=trainer.crash_on_nan, on_inf=trainer.crash_on_inf)(StepInfo(step, phase.name, metrics))
    return np.asarray(report.flags)


if __name__ == "__main__":
    sys.exit(main())
