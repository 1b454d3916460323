"""When a phase ends early, and what the checkpoint's cursor remembers."""

import json
import math
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from jaxlm.controllers.base import Controller, Rewind
from jaxlm.controllers.early_stopping import BadStreak, BestEval, EarlyStopping, SkippedStepsError, UntilConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.guards import RewindRule
from jaxlm.engine.checkpoint.manifest import CheckpointName, Cursor, History, in_order
from jaxlm.engine.control import Control
from jaxlm.engine.entry import StateBuilder
from jaxlm.models.base import vocab_axis
from jaxlm.optim.bad_steps import SkipBadSteps
from tests.engine.helpers import F32, MODEL, VOCAB, layout, phase


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
        ({"metric": "train/loss", "below": 3.0}, r"^metric: 'train/loss' given"),
        ({}, "until.below: none of below, above, patience given, at least one expected"),
        ({"below": math.nan}, "until.below: nan given"),
        ({"below": math.inf}, "until.below: inf given"),
        ({"below": 3.0, "mode": "max"}, "until.below: 3.0 given without mode: min, but mode is max"),
        ({"above": 3.0}, "until.above: 3.0 given without mode: max, but mode is min"),
        ({"patience": 0}, "until.patience: 0 given"),
        ({"patience": 2, "min_delta": -0.1}, "until.min_delta: -0.1 given"),
        ({"patience": 2, "min_delta": math.nan}, "until.min_delta: nan given"),
        ({"below": 3.0, "min_delta": 0.1}, "until.min_delta: 0.1 given without patience"),
    ],
)
def test_impossible_conditions_are_refused(keys, named):
    def check() -> None:
        until = UntilConfig(**{"metric": "eval/loss", **keys})
        check_fields(until, "trainer.until")

    with pytest.raises(ConfigError, match=named):
        check()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rewind_after": 0}, "rewind_after: 0 given, an integer of 1 or more"),
        (
            {"rewind_after": 9},
            "max_in_a_row: 8 is the default, but rewind_after is 9, .* <= max_in_a_row expected",
        ),
        ({"rewind_after": 3, "max_rewinds": 0}, "max_rewinds: 0 given, an integer of 1 or more and at most 1000"),
        ({"rewind_after": 3, "max_rewinds": 1001}, "max_rewinds: 1001 given"),
        ({"max_rewinds": 5}, "max_rewinds: 5 given without rewind_after"),
    ],
)
def test_impossible_rewinds_are_refused(keys, named):
    with pytest.raises(ConfigError, match=named):
        check_fields(SkipBadSteps(**keys), "optimizer.skip_bad_steps")
    assert SkipBadSteps().rewind_rule is None
    assert SkipBadSteps(rewind_after=3).rewind_rule == RewindRule(3, 3)


def streak_of(length: int) -> History:
    return History(controllers={"bad_streak": {"state": length}})


def asked(controller: Controller, history: History, skipped: int) -> tuple[Control, Any]:
    """The control of a phase with one controller, and its saver, which saves nothing."""
    saver = SimpleNamespace(history=history, holds=False)
    return Control(phase(controllers=(controller,), end=100), saver, layout(), skipped=skipped), saver  # type: ignore[arg-type]


def after_steps(control: Control, skipped: list[int], first: int) -> list[Rewind | None]:
    return [control.after_step(n, {"train/skipped_steps": float(s)}, True) for n, s in enumerate(skipped, first)]


def test_a_streak_goes_on_after_a_restart_and_ends_with_an_applied_update():
    control, saver = asked(BadStreak(RewindRule(3, 1), 4), streak_of(1), skipped=5)
    found = after_steps(control, [6, 6, 7, 8], 11)
    assert found == [None] * 4
    assert saver.history == streak_of(2)
    assert saver.holds
    (rewind,) = after_steps(control, [9], 15)
    assert rewind is not None
    assert (rewind.first, rewind.last, rewind.max_rewinds) == (13, 15, 1)
    assert rewind.reason == "the updates of steps 13 to 15 were skipped"
    assert saver.history == History()
    assert not saver.holds


def test_a_run_that_does_not_go_back_ends_at_the_limit():
    control, saver = asked(BadStreak(None, 3), streak_of(1), skipped=5)
    assert after_steps(control, [6], 11) == [None]
    assert saver.history == streak_of(2)
    with pytest.raises(SkippedStepsError, match=r"step 12: the updates of 3 steps in a row were skipped"):
        after_steps(control, [7], 12)
    unlimited, _ = asked(BadStreak(None, None), History(), skipped=7)
    assert after_steps(unlimited, list(range(8, 50)), 8) == [None] * 42


def test_the_cursor_of_a_run_that_never_went_back_has_no_history():
    plain = {"step": 3, "phase": 0, "phase_name": "a", "entering": False, "temporary": True}
    assert json.loads(Cursor(**plain).to_json()) == plain
    assert list(json.loads(Cursor(**plain).to_json())) == list(plain)
    assert Cursor.from_json(json.dumps(plain).encode()) == Cursor(**plain)
    memories = {
        "bad_streak": {"state": 1},
        "early_stopping": {"state": asdict(BestEval(3.0, 2, 3.1, 1)), "keeps": "best"},
        "reduce_on_plateau": {"state": {}, "pending": [{"after": 9, "controls": {"lr_scale": 0.1}}]},
    }
    history = History(2, 7, (5,), memories, {"best": "step-2"}, "step-4", ("step-6",))
    assert Cursor.from_json(Cursor(**plain, history=history).to_json()) == Cursor(**plain, history=history)
    assert history.settled() == History(2, 7, (5,), memories, history.pins, "step-4")
    history = history.settled()
    assert history.in_next_phase() == History(2, 7, (5,), went_back_to="step-4")
    assert history.in_another_run() == History(phase_ends=(5,))
    again = History(
        3, 11, (5,), {}, history.pins, "step-4", rewinds={"a.key": 3}
    )  # earlier attempts may have been for it
    assert history.rewound(4, {}, "a.key") == again
    assert (again.num_rewinds("a.key"), again.num_rewinds("b.key")) == (3, 0)
    assert Cursor.from_json(Cursor(**plain, history=again).to_json()) == Cursor(**plain, history=again)
    others = {name: memory for name, memory in memories.items() if name != "early_stopping"}
    assert history.without_pins() == History(2, 7, (5,), others, {}, "step-4")


def test_the_cursors_of_earlier_versions_have_the_controllers_as_fields():
    cursor = Cursor.from_json(
        b'{"step": 8, "phase": 0, "phase_name": "a", "entering": false, "temporary": true, "history": {"attempt": 1,'
        b' "bad_steps": 2, "best": {"value": 3.25, "step": 6, "reference": Infinity, "stale": 1},'
        b' "pins": {"best": "step-6"}}}'
    )
    best = {"value": 3.25, "step": 6, "reference": math.inf, "stale": 1}
    memories = {"bad_streak": {"state": 2}, "early_stopping": {"state": best, "keeps": "best"}}
    assert cursor.history == History(1, controllers=memories, pins={"best": "step-6"})
    assert Cursor.from_json(cursor.to_json()) == cursor
    control, saver = asked(BadStreak(RewindRule(3, 1), 4), cursor.history, skipped=2)
    (rewind,) = after_steps(control, [3], 9)
    assert rewind is not None
    assert (rewind.first, rewind.last) == (7, 9)
    assert saver.history.controllers == {"early_stopping": memories["early_stopping"]}


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

    def all_due(self, step):
        return self.all_are_due


def test_an_unmeasured_metric_is_an_error_only_if_its_evaluation_was_due():
    """`evals: [{type: loss}, {type: core, every: 8}]` with `until: {metric: eval/core}`."""
    until = UntilConfig("eval/core", above=0.2, mode="max")

    def after_evaluation(**measured: Any) -> Any:
        saver = SimpleNamespace(history=History(), holds=False)
        stopping = phase(controllers=(EarlyStopping(until),))
        return Control(stopping, saver, layout(), Evaluations(**measured)).after_evaluation(1)  # type: ignore[arg-type]

    assert after_evaluation(latest={"eval/loss": 3.0}, all_are_due=False) is None
    with pytest.raises(ConfigError, match=r"until.metric: 'eval/core' given for phase '.*measured eval/loss"):
        after_evaluation(latest={"eval/loss": 3.0}, all_are_due=True)
    assert after_evaluation(latest={"eval/core": 0.3}, all_are_due=False).reason == "eval/core is 0.3000, above 0.2"
