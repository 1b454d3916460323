"""When a phase ends early, and what the checkpoint's cursor remembers."""

import json
import math
from dataclasses import dataclass

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.guards import RewindRule
from jaxlm.core.types import StepInfo
from jaxlm.engine.bad_streak import BadStreak, SkippedStepsError
from jaxlm.engine.checkpoint.manifest import BestEval, CheckpointName, Cursor, History, in_order
from jaxlm.engine.early_stopping import EarlyStopping
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.outcome import Rewind
from jaxlm.engine.until import UntilConfig
from jaxlm.models.base import vocab_axis
from jaxlm.optim.bad_steps import SkipBadSteps, bad_step_guards
from tests.engine.helpers import F32, MODEL, VOCAB, phase


def followed(until: UntilConfig, values: list[float]) -> list[BestEval]:
    best, seen = None, []
    for step, value in enumerate(values, 1):
        best = until.after(best, value, step)
        seen.append(best)
    return seen


def test_the_best_is_the_lowest_and_patience_counts_from_the_last_clear_improvement():
    seen = followed(UntilConfig("eval/loss", patience=3, min_delta=0.1), [3.0, 2.95, math.nan, 2.91, 2.8, 2.8])
    assert [best.step for best in seen] == [1, 2, 2, 4, 5, 5]
    assert [best.stale for best in seen] == [0, 1, 2, 3, 0, 1]
    assert seen[3] == BestEval(2.91, 4, 3.0, 3)


def test_higher_is_better_with_mode_max():
    seen = followed(UntilConfig("eval/a/acc", patience=3, min_delta=0.1, mode="max"), [0.2, 0.25, 0.1, 0.4])
    assert [(best.step, best.stale) for best in seen] == [(1, 0), (2, 1), (2, 2), (4, 0)]


def test_values_that_are_never_finite_only_cost_patience():
    assert [best.stale for best in followed(UntilConfig("eval/loss", patience=2), [math.nan, math.nan])] == [1, 2]


def test_bounds():
    assert UntilConfig("eval/loss", below=3.2).reached(3.2) is None
    assert UntilConfig("eval/loss", below=3.2).reached(math.nan) is None
    assert UntilConfig("eval/loss", below=3.2).reached(3.1) == "eval/loss is 3.1000, below 3.2"
    assert UntilConfig("eval/acc", above=0.5, mode="max").reached(0.75) == "eval/acc is 0.7500, above 0.5"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"metric": "train/loss", "below": 3.0}, r"trainer.until.metric: 'train/loss' given"),
        ({}, "no condition given"),
        ({"below": math.nan}, "until.below: nan given"),
        ({"below": math.inf}, "until.below: inf given"),
        ({"below": 3.0, "mode": "max"}, "until.below: 3.0 given with mode: max"),
        ({"above": 3.0}, "until.above: 3.0 given with mode: min"),
        ({"patience": 0}, "until.patience: 0 given"),
        ({"patience": 2, "min_delta": -0.1}, "until.min_delta: -0.1 given"),
        ({"patience": 2, "min_delta": math.nan}, "until.min_delta: nan given"),
        ({"below": 3.0, "min_delta": 0.1}, "no effect without patience"),
    ],
)
def test_impossible_conditions_are_refused(keys, named):
    def check() -> None:
        until = UntilConfig(**{"metric": "eval/loss", **keys})
        check_fields(until, "trainer.until")
        until.check("trainer.until")

    with pytest.raises(ConfigError, match=named):
        check()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rewind_after": 0}, "rewind_after: 0 given, an integer of 1 or more"),
        ({"rewind_after": 9}, "rewind_after: 9 given, null or 1 to 8"),
        ({"rewind_after": 3, "max_rewinds": 0}, "max_rewinds: 0 given, an integer of 1 or more and at most 1000"),
        ({"rewind_after": 3, "max_rewinds": 1001}, "max_rewinds: 1001 given"),
        ({"max_rewinds": 5}, "no effect without rewind_after"),
    ],
)
def test_impossible_rewinds_are_refused(keys, named):
    def check() -> None:
        guard = SkipBadSteps(**keys)
        check_fields(guard, "optimizer.skip_bad_steps")
        bad_step_guards(guard)

    with pytest.raises(ConfigError, match=named):
        check()
    assert SkipBadSteps().rewind_rule is None
    assert SkipBadSteps(rewind_after=3).rewind_rule == RewindRule(3, 3)


class Saving:
    """The history of a saver, without checkpoints."""

    def __init__(self, history: History):
        self.history = history


def test_a_streak_goes_on_after_a_restart_and_ends_with_an_applied_update():
    saver = Saving(History(bad_steps=1))
    streak = BadStreak(RewindRule(3, 1), 4, saver, skipped=5)  # type: ignore[arg-type]
    found = [streak.after(StepInfo(n, "train", {"train/skipped_steps": s})) for n, s in enumerate([6, 6, 7, 8, 9], 11)]
    assert found == [None, None, None, None, Rewind(13, 15)]
    assert saver.history.bad_steps == 3


def test_a_run_that_does_not_go_back_ends_at_the_limit():
    saver = Saving(History(bad_steps=1))
    streak = BadStreak(None, 3, saver, skipped=5)  # type: ignore[arg-type]
    assert streak.after(StepInfo(11, "train", {"train/skipped_steps": 6})) is None
    with pytest.raises(SkippedStepsError, match=r"step 12: the updates of 3 steps in a row were skipped"):
        streak.after(StepInfo(12, "train", {"train/skipped_steps": 7}))
    assert saver.history.bad_steps == 3
    unlimited = BadStreak(None, None, saver, skipped=7)  # type: ignore[arg-type]
    assert [unlimited.after(StepInfo(n, "train", {"train/skipped_steps": n})) for n in range(8, 50)] == [None] * 42


def test_the_cursor_of_a_run_that_never_went_back_has_no_history():
    plain = {"step": 3, "phase": 0, "phase_name": "a", "entering": False, "temporary": True}
    assert json.loads(Cursor(**plain).to_json()) == plain
    assert list(json.loads(Cursor(**plain).to_json())) == list(plain)
    assert Cursor.from_json(json.dumps(plain).encode()) == Cursor(**plain)
    history = History(2, 7, (5,), 1, BestEval(3.0, 2, 3.1, 1), {"best": "step-2"}, "step-4", ("step-6",))
    assert Cursor.from_json(Cursor(**plain, history=history).to_json()) == Cursor(**plain, history=history)
    assert history.settled() == History(2, 7, (5,), 1, history.best, history.pins, "step-4")
    history = history.settled()
    assert history.in_next_phase() == History(2, 7, (5,), went_back_to="step-4")
    assert history.in_another_run() == History(phase_ends=(5,))
    assert history.rewound(4) == History(3, 11, (5,), 0, history.best, history.pins, "step-4")


def test_later_attempts_are_newer_whatever_their_step():
    cursors = [
        Cursor(9, 0, "a", False, True),
        Cursor(4, 0, "a", True, True, History(1)),
        Cursor(4, 1, "b", True, True, History(2)),
    ]
    assert [cursor.folder_name for cursor in cursors] == ["step-9", "step-4-attempt-1", "step-4-b-attempt-2"]
    names = [CheckpointName.parse(cursor.folder_name) for cursor in cursors]
    assert sorted([names[1], names[2], names[0]]) == names  # type: ignore[type-var]
    assert CheckpointName.parse("step-4-attempt-1.damaged") is None
    runs = [["step-4", "step-9", "step-5-attempt-1"], ["step-3", "step-8"]]
    merged = in_order([(name, f"{run}/{name}") for name in names] for run, names in enumerate(runs))
    assert merged == ["0/step-4", "0/step-9", "1/step-3", "0/step-5-attempt-1", "1/step-8"]


def test_phases_follow_where_the_one_before_really_ended():
    planned = (
        phase(name="a", end=20),
        phase(index=1, name="b", start=20, end=50),
        phase(index=2, name="c", start=50, end=60),
    )
    builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, planned)
    assert builder.with_phase_ends(()).phases == planned
    shifted = builder.with_phase_ends((12,)).phases
    assert [(p.start, p.end, p.num_steps) for p in shifted] == [(0, 12, 20), (12, 42, 30), (42, 52, 10)]
    again = builder.with_phase_ends((12,)).with_phase_ends((12, 20)).phases
    assert [(p.start, p.end, p.num_steps) for p in again] == [(0, 12, 20), (12, 20, 30), (20, 30, 10)]


@dataclass
class Evaluations:
    """A stand-in for the hook that runs the evaluations."""

    latest: dict[str, float]
    all_are_due: bool

    def due(self, step):
        return True

    def all_due(self, step):
        return self.all_are_due


def test_an_evaluation_that_is_not_due_is_no_mistake():
    """`evals: [{type: loss}, {type: core, every: 8}]` with `until: {metric: eval/core}`."""
    until = UntilConfig("eval/core", above=0.2, mode="max")
    stopping = lambda **measured: EarlyStopping(until, phase(), Evaluations(**measured), None)  # noqa: E731
    assert stopping(latest={"eval/loss": 3.0}, all_are_due=False).run(1, None) is None
    with pytest.raises(ConfigError, match=r"'eval/core' given for phase '.*measured eval/loss"):
        stopping(latest={"eval/loss": 3.0}, all_are_due=True).run(1, None)
    assert (
        stopping(latest={"eval/core": 0.3}, all_are_due=False).run(1, None).reason == "eval/core is 0.3000, above 0.2"
    )
