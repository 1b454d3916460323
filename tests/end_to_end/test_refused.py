"""A start that is refused leaves a run as it is: every file but the log has the bytes that it had."""

import fcntl
from pathlib import Path

import pytest

from jaxlm import train
from jaxlm.core.errors import ConfigError
from tests.end_to_end.commands import end_of
from tests.tiers import one_of

RUN = ("--config_path", "run.yaml", "--trainer.num_train_steps", "28")
CALLBACK = """
from dataclasses import dataclass
from jaxlm.observe.callbacks import Callback, CallbackConfig

class Mine(Callback):
    def on_never(self):
        pass

@dataclass(frozen=True)
class Never(CallbackConfig):
    def check(self):
        pass

    def open(self, context):
        return Mine()
"""


@pytest.fixture
def place(again):
    (again.folder / "callbacks_of_mine.py").write_text(CALLBACK)
    return again


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "train.log"}


REFUSALS = {
    "another key": (("--model.hidden_dimm", "3"), "no such key in model"),
    "another model": (
        ("--model.hidden_dim", "64"),
        *("already exists with another model", "model.hidden_dim: 32 -> 64", "--trainer.id"),
    ),
    "another tokenizer": (("--data.vocab_size", "301"), "already exists with another model, other data"),
    "another end": (
        ("--data.enforce_eos", "false"),
        *("data of phase 'train'.enforce_eos: True -> False", "--trainer.id"),
    ),
    "another packing": (
        ("--data.packing", "{type: best_fit}", "--data.enforce_eos", "false"),
        *("data of phase 'train'.packing", "--trainer.id"),
    ),
    "another text": (
        ("--data.train_urls", "[stdlib:validation]"),
        *("data of phase 'train'.train_content", "--trainer.id"),
    ),
    "a step that is over": (("--trainer.num_train_steps", "7"), "step 24", "the configuration has no such step"),
    "no such data": (("--data.validation_urls", "[nothing-here]"), "nothing-here"),
    "a callback": (
        ("--trainer.callbacks", "[{type: 'callbacks_of_mine:Never'}]"),
        "defines on_never, which is never called",
    ),
    "a long sample": (
        ("--evals", "[{type: samples, max_new_tokens: 4000}]"),
        "together exceed model.seq_len",
    ),
    "going back to nothing": (
        ("--trainer.load_checkpoint_path", "checkpoints/run/step-3"),
        "has no checkpoint step-3 to go back to",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_start_changes_no_file_of_the_run(place, in_process, monkeypatch, name):
    monkeypatch.syspath_prepend(place.folder)
    (more, *messages), before = REFUSALS[name], content(place.folder)
    options = dict(zip(RUN[::2], RUN[1::2], strict=True)) | dict(zip(more[::2], more[1::2], strict=True))
    result = in_process(train.main, place, *(word for pair in options.items() for word in pair))
    assert result.code == 2
    assert [message for message in messages if message not in result.err] == [], result.err
    assert content(place.folder) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    one_of(["train.compile_steps", "train.open_phase_data", "train.load_references", "session.phase.open_evaluations"]),
)
def test_a_start_that_is_refused_at_its_last_steps_changes_no_file_of_the_run(place, in_process, monkeypatch, step):
    def refuse(*_args, **_named):
        raise ConfigError("does not fit")

    monkeypatch.setattr(f"jaxlm.{step}", refuse)
    before = content(place.folder)
    result = in_process(train.main, place, *RUN)
    assert (result.code, "does not fit" in result.err) == (2, True), result.err
    assert content(place.folder) == before


@pytest.mark.slow
def test_a_start_while_the_run_is_trained_changes_no_file(place, in_process):
    with open(place.folder / "checkpoints" / ".run.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = content(place.folder)
        result = in_process(train.main, place, *RUN)
        assert (result.code, "already being trained" in result.err) == (2, True), result.err
        assert content(place.folder) == before


@pytest.mark.slow
def test_processes_that_differ_change_no_file(place):
    before = content(place.folder)
    for code, _, err in map(end_of, place.start_each([RUN, (*RUN, "--optimizer.learning_rate", "0.5")])):
        assert code == 2, err
    assert content(place.folder) == before
