"""The checkpoints that a run saves: the files that each contains, when they are saved, and which replaces which."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxlm.core.runtime import from_main, main_only
from jaxlm.core.values.logged import Activity
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.checkpoint.lease import StillHeld
from jaxlm.engine.checkpoint.writer import CheckpointWriter, SaveHealth
from jaxlm.engine.peers import is_lost_peer
from jaxlm.engine.state import RunState
from jaxlm.plan.load_config import as_run_config
from jaxlm.plan.plan import Plan
from jaxlm.reading.decode import dump
from jaxlm.session.compilation.options import step_options
from jaxlm.session.init_from import InitFrom, Log
from jaxlm.session.references import references_identity
from jaxlm.session.resume_checks import (
    DATA_IDENTITY,
    ENVIRONMENT,
    EVALUATED,
    REFERENCES_IDENTITY,
    RENDERING,
    computing_facts,
    data_identity,
    read_evaluated,
    rendering,
)
from jaxlm.session.source import SOURCE


@contextlib.contextmanager
def open_writer(
    plan: Plan,
    files: dict[str, bytes],
    init_from: InitFrom,
    log: Log,
    clock: ActivityClock,
    still_held: StillHeld,
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
    writer = CheckpointWriter(plan.checkpoints, files, health, log, still_held, flush, clock.progress)
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


def run_files(plan: Plan, of_data: Tokenizer, tokenizer: Tokenizer, source: Mapping[str, Any]) -> dict[str, bytes]:
    """The files in the folder `run/` of every checkpoint. Args: as of `Run`; of_data: its `tokenizer`."""
    texts = {
        "config.yaml": dump(as_run_config(plan.config)),
        DATA_IDENTITY: json.dumps(data_identity(plan)),
        RENDERING: json.dumps(rendering(plan, of_data)),
        ENVIRONMENT: json.dumps(computing_facts(plan.config, step_options(plan)), indent=1),
        SOURCE: json.dumps(source),
    }
    if plan.refs:
        texts[REFERENCES_IDENTITY] = json.dumps(references_identity(plan))
    files = {name: text.encode() for name, text in texts.items()}
    return files | {f"tokenizer/{name}": content for name, content in tokenizer.files().items()}
