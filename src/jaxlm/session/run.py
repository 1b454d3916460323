"""A run whose folders, checkpoint writer and records are open."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.core.runtime import is_main_process, main_only
from jaxlm.core.stores import check_store_writable, is_url
from jaxlm.data.tokenizer.chat_template import with_templates
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.checkpoint.lease import StillHeld
from jaxlm.engine.checkpoint.writer import CheckpointWriter
from jaxlm.engine.preemption import StopRequest
from jaxlm.engine.sync import FlagSync
from jaxlm.interop.hf.hub import check_upload
from jaxlm.observe.console import Console
from jaxlm.observe.log_file import LogStore
from jaxlm.plan.plan import Plan
from jaxlm.session.export import Exporter
from jaxlm.session.init_from import InitFrom
from jaxlm.session.run_records import Beginning, RunRecords, open_records
from jaxlm.session.saving import open_writer, run_files
from jaxlm.session.source import source_of_run


@dataclass(frozen=True)
class Run:
    """What is open while a run trains.

    Attributes:
        tokenizer: as the run's data is tokenized with it.
        saved_tokenizer: as it is saved with the model.
        source: config.json of the model that training began with; empty for random weights.
        clock: what this process spends its time on.
        flag_sync: how the processes agree to save or stop.
        beginning: what is written when the run begins: its records, and the checkpoint that it resumes from.
    """

    plan: Plan
    tokenizer: Tokenizer
    saved_tokenizer: Tokenizer
    source: Mapping[str, Any]
    console: Console
    clock: ActivityClock
    records: RunRecords
    writer: CheckpointWriter
    flag_sync: FlagSync
    beginning: Beginning

    def exporter(self, dtype: Any) -> Exporter:
        """Writes the run's models with weights of this dtype."""
        return Exporter(self.plan, self.saved_tokenizer, self.source, dtype)


@contextlib.contextmanager
def open_run(
    plan: Plan,
    tokenizer: Tokenizer,
    console: Console,
    stop: StopRequest,
    init_from: InitFrom,
    logs: LogStore,
    still_held: StillHeld,
    clock: ActivityClock,
) -> Iterator[Run]:
    """Opens a run's folders and records, and closes them when the context exits, even after an error."""
    beginning, source = Beginning(), source_of_run(plan, init_from)
    saved_tokenizer = _with_templates(tokenizer, plan)
    files = run_files(plan, tokenizer, saved_tokenizer, source)
    plan.checkpoints.prepare()
    if is_url(exports := plan.config.hf_save_path or ""):
        main_only(lambda: check_store_writable(exports, "hf_save_path"))
    if plan.config.hf_upload:
        main_only(lambda: check_upload("hf_upload"))
    with open_records(plan, console, init_from, clock, beginning, logs.still_held) as records:
        flush = [records.flush, *([logs.upload] if is_main_process() else [])]
        with open_writer(plan, files, init_from, console.log, clock, still_held, flush) as writer:
            opened = (console, clock, records, writer, FlagSync(plan.layout, stop), beginning)
            yield Run(plan, tokenizer, saved_tokenizer, source, *opened)


def _with_templates(tokenizer: Tokenizer, plan: Plan) -> Tokenizer:
    """The tokenizer with the chat templates and the mask token of the phases, so that the saved model does not need more."""
    templates = [template for data in plan.data for template in data.chat_templates()]
    for data in plan.data:
        tokenizer = data.saved_tokenizer(tokenizer)
    return with_templates(tokenizer, templates, "data.format.chat_template")
