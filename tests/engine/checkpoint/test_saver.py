"""What a phase saves if saves fail or take long: what is made up for, and what is taken back."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from jaxlm.engine.checkpoint.manager import BEFORE_STREAK, Saver
from jaxlm.engine.checkpoint.manifest import Cursor, History
from jaxlm.engine.checkpoint.policy import CheckpointerConfig, KeepRule
from jaxlm.engine.checkpoint.store import SaveError
from jaxlm.engine.checkpoint.writer import SaveHealth
from tests.engine.helpers import phase

POLICY = CheckpointerConfig(save_interval=timedelta(seconds=60), keep=[KeepRule(5)])


class Writer:
    """Stands in for the `CheckpointWriter`: saves named in `failing` fail when they are waited for."""

    def __init__(self, *failing: str):
        self.now = 0.0
        self.said: list[str] = []
        self.health = SaveHealth(POLICY, None, self.said.append, lambda: self.now)
        self.failing = set(failing)
        self.cursors: list[Cursor] = []
        self.pauses: list[Sequence[float]] = []
        self.is_busy = self.has_failed = False
        self._open: Cursor | None = None

    def start(self, state: Any, cursor: Cursor, position: Any) -> None:
        assert self._open is None
        self._open = cursor
        self.cursors.append(cursor)

    def save(self, state: Any, cursor: Cursor, position: Any, pauses_s: Sequence[float]) -> None:
        self.start(state, cursor, position)
        self.pauses.append(pauses_s)
        self._open, self.has_failed = None, False

    def wait(self) -> None:
        cursor, self._open = self._open, None
        if cursor is None:
            return
        self.has_failed = cursor.folder_name in self.failing
        if self.has_failed:
            error = SaveError("no")
            self.health.failed(cursor.folder_name, error, permanent=not cursor.temporary)
        else:
            self.health.saved(cursor.folder_name)


def saver(writer: Any, history: History | None = None, resumed: str | None = None) -> Saver:
    return Saver(writer, POLICY, phase(end=100), [], history or History(), resumed)


def save(made: Saver, step: int, *, forced: bool = False) -> None:
    made.save(None, step, {}, forced=forced)  # type: ignore[arg-type]


def test_a_failed_permanent_checkpoint_is_made_up_for_by_the_next_one():
    writer = Writer("step-5")
    made = saver(writer)
    for step in (5, 7, 8):
        save(made, step)
    assert [(cursor.step, cursor.temporary) for cursor in writer.cursors] == [(5, False), (7, False), (8, True)]


def test_the_next_try_is_due_after_the_pause_and_never_during_a_save():
    writer = Writer("step-3")
    made = saver(writer)
    save(made, 3)
    assert not made.due_by_clock()
    writer.now = 4.9
    assert not made.due_by_clock()
    writer.now = 5.0
    assert made.due_by_clock()
    writer.is_busy = True
    assert not made.due_by_clock()


def test_a_failed_step_may_be_saved_once_more():
    writer = Writer("step-7")
    made = saver(writer)
    save(made, 7)
    made.settle()
    writer.failing.clear()
    save(made, 7, forced=True)
    save(made, 7, forced=True)
    assert [cursor.step for cursor in writer.cursors] == [7, 7]
    assert len(writer.pauses[0]) > 3  # nothing follows, so that it is repeated in place


@pytest.mark.parametrize("fails", [True, False])
def test_pins_and_the_best_evaluation_are_those_of_finished_checkpoints(fails):
    before, after = ({"early_stopping": {"state": {"step": step}, "keeps": "best"}} for step in (5, 9))
    writer = Writer(*(["step-9"] if fails else []))
    made = saver(writer, History(pins={"best": "step-5"}, controllers=before), "step-5")
    made.keep("best", 9, "early_stopping")
    made.history = replace(made.history, controllers=after)
    assert made.due_by_step(9)
    save(made, 9)
    assert writer.cursors[0].history.pins == {"best": "step-9"}
    made.settle()
    assert made.history.pins == {"best": "step-5" if fails else "step-9"}
    assert made.history.controllers == (before if fails else after)
    made.holds = True
    save(made, 11)
    assert writer.cursors[-1].history.pins[BEFORE_STREAK] == ("step-5" if fails else "step-9")


def test_a_first_evaluation_whose_checkpoint_fails_is_forgotten():
    made = saver(Writer("step-9"))
    made.keep("best", 9, "early_stopping")
    made.history = replace(made.history, controllers={"bad_streak": {"state": 1}, "early_stopping": {"state": {}}})
    save(made, 9)
    made.settle()
    assert (made.history.controllers, made.history.pins) == ({"bad_streak": {"state": 1}}, {})
