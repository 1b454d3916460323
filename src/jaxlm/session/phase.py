"""An open phase around the loop: its data, who receives its metrics, and what runs between its steps."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxlm.core.devices import peak_flops
from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import location_of
from jaxlm.core.runtime import from_main, main_first
from jaxlm.core.values.logged import Activity
from jaxlm.core.values.sums import Sum
from jaxlm.data.base import Batches, Log
from jaxlm.data.data import Data
from jaxlm.data.examples import check_signals
from jaxlm.data.formats.chat import for_template, given_messages, template_variables
from jaxlm.data.loader import RunServices
from jaxlm.data.sources.record_files import Record
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.checkpoint.manifest import History
from jaxlm.engine.checkpoint.restore import VerifiedCheckpoint
from jaxlm.engine.control import Control
from jaxlm.engine.hooks import Hooks
from jaxlm.engine.metrics import AsyncMetrics, CrashListener, Workload
from jaxlm.engine.open_phase import Probe
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.evals.base import EvalConfig, EvalContext
from jaxlm.evals.objective import ObjectiveEval
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.base import Metrics, ObjectiveConfig
from jaxlm.objectives.next_token import score_batch
from jaxlm.observe.callbacks import CallbackListener
from jaxlm.observe.hooks import AtEarlyEnd, EvalHook, Generated, ProgressListener, ScheduledEval, TrackerListener
from jaxlm.observe.profiler import ProfileHook
from jaxlm.plan.num_steps import epoch_of, small_sources
from jaxlm.plan.plan import Plan, upload_repository
from jaxlm.session.annotate import with_annotations
from jaxlm.session.compilation.options import step_options
from jaxlm.session.compilation.step import StepPrograms
from jaxlm.session.export import ExportHook
from jaxlm.session.references import flops_per_token, load_reference
from jaxlm.session.run import Run
from jaxlm.session.verification import validation_sets
from jaxlm.surgery.base import export_form


@dataclass(frozen=True)
class PhaseData:
    """The open data of a phase.

    Attributes:
        first_step: the step from which the phase is entered or goes on.
        batches: those that the steps train on.
        order: arguments of `Data.batches` that open the same batches once more.
        plain: the data without annotations.
    """

    data: Data
    first_step: int
    batches: Batches
    order: dict[str, Any]
    plain: Data

    def reopened(self) -> Batches:
        """The same batches once more, without annotations, which cannot ask the model."""
        return self.plain.batches(**self.order)


@contextlib.contextmanager
def open_phase_data(run: Run, phase: Phase, resumed: VerifiedCheckpoint | None) -> Iterator[PhaseData]:
    """Opens the phase's data, with annotations if its objective reads some, and closes its batches at the end.

    Args:
        resumed: the checkpoint that the phase goes on from; None if it is entered.
    """
    plan, log = run.plan, run.console.log
    opened = open_data(plan, run.tokenizer, phase, log)
    first_step = phase.start if resumed is None else resumed.cursor.step
    order: dict[str, Any] = {
        "schedule": plan.batches.of(phase),
        "layout": plan.layout,
        "start": phase.start,
        "first_step": first_step,
        "seed": plan.config.order_seed,
    }
    position = {"examples": 0} if resumed is None else resumed.position()
    reopen = lambda: opened.batches(**order)  # noqa: E731
    where = (plan, phase, opened, log, run.records.report, reopen, first_step, position)
    data = with_annotations(*where, run.clock, run.flag_sync.check_stop)
    with contextlib.closing(data.batches(**order, services=_services(run, phase))) as batches:
        if resumed is not None:
            batches.restore(position)
        yield PhaseData(data, first_step, batches, order, opened)


def open_data(plan: Plan, tokenizer: Tokenizer, phase: Phase, log: Log) -> Data:
    """Opens the phase's token caches, and builds them first if they do not exist."""
    section = plan.data[phase.index]
    opened = main_first(lambda: section.open(tokenizer, phase.model.seq_len, log=log))
    if phase.objective.facts.sequences_axis is not None:
        check_signals(opened.train)
    for line in (*small_sources(opened, plan.batches.of(phase).at(phase.start).size), *opened.slow_sources()):
        log(f"warning: {line}")
    return opened


def _services(run: Run, phase: Phase) -> RunServices:
    plan, tokenizer = run.plan, run.saved_tokenizer
    surgeries = plan.state_builder.surgeries_until(phase)

    def export(model: LanguageModel, folder: Any) -> None:
        exporter = replace(run.exporter, dtype=plan.precision.params, stored_format="decode")
        exporter.write(folder, export_form(model, surgeries), phase.model)

    shared = (plan.precision, run.console.log, tokenizer.stop_ids, run.clock.progress)
    options = step_options(plan)
    return RunServices(*shared, run.records.completions().log, export, tuple(options.xla.items()), options.sizes)


def open_metrics(
    run: Run, phase: Phase, data: PhaseData, control: Control, history: History, skipped: int
) -> AsyncMetrics:
    """The queue of the phase's steps. Args: skipped: number of updates skipped in the run so far."""
    trainer, records = run.plan.config.trainer, run.records
    whole_run = [
        run.writer.health.metrics,
        *(ledger.metrics for ledger in records.ledgers),
        records.loop_state.metrics,
    ]
    follow = CallbackListener(
        records.callbacks,
        whole_run,
        epoch_of=epoch_of(phase, data.data, run.plan.batches.of(phase)),
        last_step=phase.end,
        skipped=skipped,
    )
    progress = ProgressListener(
        run.console,
        phase,
        data.batches.records,
        run.records.report,
        skipped=skipped,
        guards=phase.guards(run.plan.precision),
        can_show_batches=not history.attempt and data.data.has_examples_per_step,
        tells_end=len(run.plan.phases) > 1,
    )
    listeners = (
        *records.ledgers,
        records.loop_state,
        TrackerListener(records.trackers, whole_run),
        *([follow] if records.callbacks else []),
        progress,
        CrashListener(on_nan=trainer.crash_on_nan, on_inf=trainer.crash_on_inf),
    )
    return AsyncMetrics(phase.name, _workload(run, phase), listeners, trainer.watch, control.after_step)


def _workload(run: Run, phase: Phase) -> Workload:
    plan, devices = run.plan, jax.devices()
    peak = peak_flops(devices[0].device_kind)
    tokens = plan.tokens_per_example(phase)
    earlier = [workload for number, workload in run.records.workloads.items() if number < phase.index]
    workload = Workload(
        batches=plan.batches.of(phase),
        tokens=tokens,
        flops=flops_per_token(plan, phase).causal * tokens,
        peak_flops=None if peak is None else peak * len(devices),
        num_steps=plan.num_steps,
        previous=earlier[-1].totals(phase.start) if earlier else run.records.previous,
    )
    run.records.workloads[phase.index] = workload
    return workload


@contextlib.contextmanager
def open_hooks(
    run: Run, phase: Phase, data: PhaseData, steps: StepPrograms, refs: Mapping[str, LanguageModel]
) -> Iterator[Hooks]:
    """Opens the hooks of a phase.

    Args:
        refs: the references of the phase's step.

    Raises:
        GateError: when the context exits, after the end of the phase is saved: see `EvalHook.check_passed`.
    """
    evaluations = open_evaluations(run, phase, data.data, refs)
    exports = _open_exports(run, phase, evaluations)
    with contextlib.ExitStack() as closing:
        hooks = _open_profiler(run, phase, data, steps)
        profiling = [closing.enter_context(contextlib.closing(hook)) for hook in hooks]
        # The profiler comes first, so that an evaluation after the last recorded step is not in the profile.
        yield Hooks(profiling, evaluations, [AtEarlyEnd(evaluations), *exports])
    evaluations.check_passed()


def check_gates_again(run: Run, phase: Phase, state: RunState) -> None:
    """Checks the limits with `fail_fast` at the end of a phase that an earlier start has saved: it may have ended there
    because of them. Args: state: of the saved end.

    Raises:
        GateError: a limit is violated.
    """
    gates = [
        one for one in _evaluations_of(run, phase) if one.metrics.limits.fail_fast and one.metrics.limits.by_metric
    ]
    if not gates:
        return
    data = open_data(run.plan, run.tokenizer, phase, run.console.log)
    context, meter, generated = _context(run, phase, data, {})
    scheduled = [ScheduledEval(gate.open(context), None, gate.metrics.limits) for gate in gates]
    evaluations = EvalHook(scheduled, 1, phase, (), run.console, generated, before=meter.attach)
    with run.clock.during(evaluations.activity):
        evaluations.run(phase.end, state)
    evaluations.check_passed()


def open_evaluations(run: Run, phase: Phase, data: Data, refs: Mapping[str, LanguageModel]) -> EvalHook:
    """The run's evaluations on the phase's validation data. Args: refs: the references of the phase's step."""
    context, meter, generated = _context(run, phase, data, refs)
    return EvalHook(
        [
            ScheduledEval(config.open(context), config.every, config.metrics.limits)
            for config in _evaluations_of(run, phase)
        ],
        run.plan.config.trainer.steps_per_eval,
        phase,
        run.records.trackers,
        run.console,
        generated,
        run.records.loop_state.evaluated,
        meter.attach,
        run.records.completions(),
    )


def open_probe(run: Run, phase: Phase, data: Data, refs: Mapping[str, LanguageModel]) -> Probe:
    """Measures the phase's objective on the first batches of its validation data, as many of each source, at least one.

    Args:
        refs: the references of its step.
    """
    opened = functools.cache(lambda: _context(run, phase, data, refs)[:2])  # only controllers that branch need it

    def probe(state: RunState, num_batches: int) -> float:
        context, meter = opened()
        if not context.validation or phase.objective.facts.annotation_key is not None:
            raise ConfigError(
                f"phase '{phase.name}': a controller branches, which compares candidates on validation data, and reads"
                " batches again, so that nothing may be stored about them (objective.cache). Set data.validation_urls, remove"
                " the cache, or give the phase other controllers"
            )
        of_each = max(1, num_batches // len(context.validation))
        meter.attach(state)
        with run.clock.during(Activity.EVAL):
            loss = ObjectiveEval(context, of_each).run(state.model)["objective"]
        return from_main(lambda: loss)  # the processes must choose alike

    return probe


def _evaluations_of(run: Run, phase: Phase) -> list[EvalConfig]:
    return [evaluation for evaluation in run.plan.config.evals if evaluation.scope.includes(phase.name)]


def _context(
    run: Run, phase: Phase, data: Data, refs: Mapping[str, LanguageModel]
) -> tuple[EvalContext, "ObjectiveMeter", Generated]:
    """Returns what evaluations may use, what measures the objective in it, and where they put the model's texts."""
    plan, saved_tokenizer = run.plan, run.saved_tokenizer

    generated, meter = Generated(), ObjectiveMeter(phase.objective, refs)
    batching = {"batch_size": plan.batches.eval_of(phase), "max_batches": plan.config.trainer.max_eval_batches}
    context = EvalContext(
        layout=plan.layout,
        precision=plan.precision,
        tokenizer=saved_tokenizer,
        token_bytes=_token_bytes(run.tokenizer, phase, run.console.log),
        validation=validation_sets(data.validation, progress=run.clock.progress, layout=plan.layout, **batching),
        log=run.console.log,
        seq_len=phase.model.seq_len,
        score=score_batch,
        dummy_prefix=run.tokenizer.dummy_prefix(),
        log_sample=generated.add_sample,
        log_completions=generated.add_completions,
        chat_prompt=functools.partial(_chat_prompt, saved_tokenizer, run.tokenizer),
        enforce_bos=plan.data[phase.index].corpus.prompt_bos,
        progress=run.clock.progress,
        measure=meter,
        reference=lambda name: refs[name] if name in refs else load_reference(plan, name, run.console.log),
    )
    return context, meter, generated


def _open_exports(run: Run, phase: Phase, evaluations: EvalHook) -> list[ExportHook]:
    config = run.plan.config
    if config.hf_save_path is None:
        return []
    folder = location_of(config.hf_save_path)
    target = (folder, config.hf_save_steps, phase, run.exporter, run.console.log)
    return [ExportHook(*target, latest=lambda: evaluations.latest, upload=upload_repository(config))]


def _open_profiler(run: Run, phase: Phase, data: PhaseData, steps: StepPrograms) -> list[ProfileHook]:
    config, sizes = run.plan.config.trainer.profiler, run.plan.batches.of(phase)
    if config is None:
        return []
    begin = min(data.first_step + config.start_step, phase.end - 1)
    return [
        ProfileHook(
            config,
            run.plan.log_folder / "profile" / phase.name,
            phase,
            first_step=data.first_step,
            until=sizes.next_shape_change(begin, phase.end),
            program=lambda: steps.by_shape[sizes.at(begin).shape].call.as_text() or "",
            log=run.console.log,
        )
    ]


def _token_bytes(tokenizer: Tokenizer, phase: Phase, log: Log) -> np.ndarray | None:
    known = tokenizer.known_token_bytes(log)
    for key, metric in [item for controller in phase.controllers for item in controller.metrics.items()]:
        if known is None and metric.endswith(("/bpb", "/macro_bpb", "/best_bpb")):
            raise ConfigError(
                f"{key}: '{metric}' given for phase '{phase.name}', but the number of bytes of the tokens is unknown, so"
                " no bits per byte are measured. Set it to eval/loss, or use another tokenizer"
            )
    return known


def _chat_prompt(
    saved_tokenizer: Tokenizer, tokenizer: Tokenizer, values: Mapping[str, Any], key: str, where: str
) -> tuple[str, list[int]]:
    template, record = ChatTemplate.load(None, saved_tokenizer, "data.tokenizer"), Record(where, dict(values), 0)
    text = template.prompt(for_template(given_messages(record, key)), where, template_variables(record, template))
    return text, tokenizer.encode_like_transformers(text, add_special_tokens=False)


class ObjectiveMeter:
    """Measures an objective with its references on validation batches, as the step does on training batches.

    The objective's own state is that of the state which `attach` was last called with.
    """

    def __init__(self, objective: ObjectiveConfig, refs: Mapping[str, LanguageModel]):
        self._objective = objective
        self._refs = dict(refs)
        self._slot: Any = None
        self._program = jax.jit(self._measured)

    def attach(self, state: RunState) -> None:
        """Measures with the objective's state in `state` from now on."""
        self._slot = state.slots.get("objective")

    def __call__(self, model: LanguageModel, batch: Any) -> tuple[dict[str, Sum], Metrics]:
        """The loss terms and metrics of a batch {batch, ...}. Args: model: in the dtypes of the computation."""
        return self._program(model, self._refs, self._slot, batch)

    def _measured(
        self, model: LanguageModel, refs: dict[str, LanguageModel], slot: Any, batch: Any
    ) -> tuple[dict[str, Sum], Metrics]:
        objective = self._objective
        batch = objective.annotate(refs, objective.prepare_batch(batch, None), slot, model)
        terms, metrics, _ = objective.terms(model, batch, slot, key=None)
        return terms, metrics
