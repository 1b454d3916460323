"""The data of a phase: its token caches, and the batches that its steps train on."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxlm.core.runtime import main_first
from jaxlm.data.base import Batches
from jaxlm.data.data import Data
from jaxlm.data.examples import check_signals
from jaxlm.data.loader import RunServices
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.checkpoint.restore import VerifiedCheckpoint
from jaxlm.engine.phases import Phase
from jaxlm.plan.num_steps import small_sources
from jaxlm.plan.plan import Plan
from jaxlm.session.annotate import Log, with_annotations
from jaxlm.session.compilation.options import step_options
from jaxlm.session.run import Run
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
    data = with_annotations(plan, phase, opened, log, reopen, first_step, position, run.clock, run.flag_sync.check_stop)
    with contextlib.closing(data.batches(**order, services=_services(run, phase))) as batches:
        if resumed is not None:
            batches.restore(position)
        yield PhaseData(data, first_step, batches, order, opened)


def open_data(plan: Plan, tokenizer: Tokenizer, phase: Phase, log: Log) -> Data:
    """Opens the phase's token caches, and builds them first if they do not exist."""
    section = plan.data[phase.index]
    opened = main_first(lambda: section.open(tokenizer, phase.model.seq_len, log=log))
    if phase.objective.sequences_axis is not None:
        check_signals(opened.train)
    for line in (*small_sources(opened, plan.batches.of(phase).at(phase.start).size), *opened.slow_sources()):
        log(f"warning: {line}")
    return opened


def _services(run: Run, phase: Phase) -> RunServices:
    """What batches that ask the model may use."""
    plan, tokenizer = run.plan, run.saved_tokenizer
    exporter, surgeries = run.exporter(plan.precision.params), plan.state_builder.surgeries_until(phase)
    export = lambda model, folder: exporter.write(folder, export_form(model, surgeries), phase.model)  # noqa: E731
    shared = (plan.precision, run.console.log, tokenizer.stop_ids, run.clock.progress)
    options = step_options(plan)
    return RunServices(*shared, run.records.completions().log, export, tuple(options.xla.items()), options.sizes)
