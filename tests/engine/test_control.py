"""When the decisions of controllers take effect, and what a restart between decision and effect changes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from jaxlm.controllers.base import (
    Controller,
    Decision,
    DoneStep,
    Keep,
    Next,
    Persistence,
    PhaseFacts,
    Rewind,
    SetControls,
    unchanged,
)
from jaxlm.controllers.reduce_on_plateau import ReduceOnPlateauConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.core.values.logged import Activity, StepInfo
from jaxlm.engine.checkpoint.manifest import Cursor, History
from jaxlm.engine.control import Control
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.loop import TrainingLoop
from jaxlm.engine.metrics import MAX_IN_FLIGHT
from jaxlm.engine.phase_runner import PhaseRunner
from jaxlm.engine.sync import Done, Interrupted, Outcome
from jaxlm.models.base import vocab_axis
from jaxlm.optim.elementwise import AdamConfig
from tests.engine.helpers import (
    F32,
    MODEL,
    VOCAB,
    Ready,
    Saver,
    TinyRun,
    arrays,
    batch,
    layout,
    one_device,
    open_phase,
    phase,
)

STEPS = 16
CONSTANT = AdamConfig(learning_rate=1e-2, warmup=0, lr_schedule="constant")  # learning rates show the control
BATCHES = [arrays(seed) for seed in range(STEPS)]


@dataclass(frozen=True)
class Scripted(Controller):
    """Decides what a table says. Its state counts how often it was asked."""

    decisions: Mapping[int, Any]
    metric: str = "train/loss"

    name = "scripted"  # type: ignore[assignment]

    @property
    def metrics(self) -> Mapping[str, str]:
        return {"scripted.metric": self.metric}

    def controls(self) -> Mapping[str, float]:
        return {"lr_scale": 1.0}

    def init(self) -> int:
        return 0

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: int) -> tuple[int, Decision | None]:
        assert metrics.keys() == {self.metric}
        return state + 1, self.decisions.get(step.number)


@dataclass
class Evaluations:
    """An evaluation after every fourth step."""

    latest: dict[str, float] = field(default_factory=dict)
    every: int = 4
    activity: Activity = Activity.EVAL

    def due(self, step: int) -> bool:
        return step % self.every == 0

    all_due = due

    def run(self, step: int, state: Any) -> None:
        self.latest = {"eval/loss": 1.0 + step / 100}


def saving(history: History | None = None, at: tuple[int, ...] = ()) -> tuple[Saver, dict[int, tuple[Any, str]]]:
    """A saver, and what it has saved: step -> the state, and the history as JSON."""
    saved: dict[int, tuple[Any, str]] = {}

    def save(state: Any, step: int) -> None:
        saved[step] = jax.tree.map(np.asarray, state), json.dumps(saver.history.to_json())

    saver = Saver(history or History(), at, save)
    return saver, saved


def trained(
    controller: Controller, saver: Saver | None = None, state: Any = None, first: int = 0, where: Layout | None = None
) -> tuple[dict[int, float], Outcome, Saver, TinyRun, Any]:
    """The learning rate of each step, how the phase ended, what was saved, and the state."""
    run = TinyRun(where or one_device(), phase(end=STEPS, optimizer=CONSTANT, controllers=(controller,)))
    saver, seen = saver or Saver(), list[StepInfo]()
    state = run.state if state is None else jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), state, run.state)
    with run.where.use():
        batches = Ready([batch(columns, run.where) for columns in BATCHES[first:]])
        opened = open_phase(run.where, run.phase, run.loop_step, batches, seen.append, saver, evaluations=Evaluations())
        state, outcome = TrainingLoop(opened.control.begin(state), opened).run()
    assert not isinstance(outcome, Interrupted)
    assert isinstance(outcome, Rewind) or [info.step for info in seen] == list(range(first + 1, int(state.step) + 1))
    return {info.step: info.metrics["optim/learning_rate"] for info in seen}, outcome, saver, run, state


def scales(rates: Mapping[int, float]) -> dict[int, float]:
    """The first step of each learning rate -> its ratio to the first one."""
    first = min(rates)
    changes = [step for step in rates if step == first or rates[step] != rates[step - 1]]
    return {step: round(float(rates[step] / np.float32(1e-2)), 6) for step in changes}


TRAINING = Scripted(
    {2: SetControls({"lr_scale": 0.5}), 3: SetControls({"lr_scale": 0.25}), 9: SetControls({"lr_scale": 2})}
)
EFFECT = {1: 1.0, 2 + MAX_IN_FLIGHT: 0.5, 3 + MAX_IN_FLIGHT: 0.25, 9 + MAX_IN_FLIGHT: 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("at", [(), (3, 4, 5), tuple(range(1, STEPS))], ids=str)
def test_what_follows_from_a_training_step_does_not_depend_on_when_it_is_fetched(at):
    """Saves drain the queue, so that a decision is known earlier."""
    rates, outcome, *_ = trained(TRAINING, Saver(at=at))
    assert isinstance(outcome, Done)
    assert scales(rates) == EFFECT


@pytest.mark.slow
def test_what_follows_from_an_evaluation_takes_effect_with_the_next_step():
    rates, *_ = trained(Scripted({4: SetControls({"lr_scale": 0.5}), 12: SetControls({"lr_scale": 0.1})}, "eval/loss"))
    assert scales(rates) == {1: 1.0, 5: 0.5, 13: 0.1}


@pytest.mark.slow
def test_a_restart_between_decision_and_effect_changes_nothing():
    saver, saved = saving(at=tuple(range(1, STEPS)))
    whole, *_, state = trained(TRAINING, saver)
    for step in (1, 2, 3, 5, 6, 8, 12, 13):
        then, history = saved[step]
        again = Saver(History.from_json(json.loads(history)))
        rest, _, last, _, resumed = trained(TRAINING, again, then, step)
        assert rest == {number: rate for number, rate in whole.items() if number > step}, step
        assert last.history == saver.history, step
        assert all(map(np.array_equal, jax.tree.leaves(resumed), jax.tree.leaves(state))), step


@pytest.mark.slow
def test_the_history_says_which_controls_are_in_effect():
    """A new controller does not start with the arrays of the checkpoint."""
    saver, saved = saving(at=(8,))
    trained(TRAINING, saver)
    then, history = saved[8]
    assert json.loads(history)["controllers"]["scripted"] == {"state": 8, "controls": {"lr_scale": 0.25}}
    assert float(then.slots["controls"]["lr_scale"]) == 0.25
    rates, *_ = trained(Scripted({}), Saver(), then, 8)
    assert scales(rates) == {9: 1.0}


@pytest.mark.slow
def test_new_controls_are_placed_as_the_compiled_step_reads_them():
    """On all devices. It refuses arrays of other shapes or shardings."""
    rates, *_ = trained(TRAINING, where=layout())
    assert scales(rates) == EFFECT
    assert "controls" not in TinyRun(one_device(), phase()).state.slots


def test_a_phase_that_a_training_step_ends_ends_at_the_same_step():
    ends = Scripted({6: Next("enough")})
    for at in ((), (6, 7, 8)):
        saver, saved = saving(at=at)
        rates, outcome, *_, state = trained(ends, saver)
        assert outcome == Next("enough")
        assert int(state.step) == max(rates) == 6 + MAX_IN_FLIGHT - 1
    then, history = saved[8]
    assert json.loads(history)["controllers"]["scripted"]["pending"] == [
        {"after": 9, "next": {"reason": "enough", "weights": None}}
    ]
    _, outcome, _, _, state = trained(ends, Saver(History.from_json(json.loads(history))), then, 8)
    assert (outcome, int(state.step)) == (Next("enough"), 9)


def test_an_evaluation_ends_a_phase_early_unless_it_was_the_last_step():
    _, outcome, *_, state = trained(Scripted({8: Next("enough")}, "eval/loss"))
    assert (outcome, int(state.step)) == (Next("enough"), 8)
    _, outcome, *_ = trained(Scripted({STEPS: Next("enough")}, "eval/loss"))
    assert isinstance(outcome, Done)
    _, outcome, *_ = trained(Scripted({STEPS: Next("it is done", "best")}, "eval/loss"))
    assert outcome == Next("it is done", "best")


def test_an_evaluation_keeps_its_step_and_a_training_step_a_later_one():
    _, _, saver, *_ = trained(Scripted({8: Keep("best")}, "eval/loss"))
    assert saver.kept == [("best", 8)]
    assert saver.history.controllers == {"scripted": {"state": 4, "keeps": "best"}}
    _, _, saver, *_ = trained(Scripted({2: Keep("good")}))
    assert saver.kept == [("good", 2 + MAX_IN_FLIGHT)]
    assert saver.history.controllers == {"scripted": {"state": STEPS}}


class Surviving(Scripted):
    persistence = Persistence(rewound=unchanged)  # type: ignore[assignment]


def test_going_back_restores_what_a_controller_remembered_then_unless_it_survives():
    back = Rewind(5, 7, "three bad steps", 1, "a.key")
    assert trained(Scripted({7: back}))[1] == back
    now, then = (History(controllers={"scripted": {"state": asked}}) for asked in (7, 4))
    for controller, expected in ((Scripted({}), 4), (Surviving({}), 7)):
        control = Control(phase(controllers=(controller,)), Saver(now), layout())  # type: ignore[arg-type]
        assert control.after_rewind(then.controllers, 4)["scripted"]["state"] == expected


def test_a_metric_that_no_step_measures_is_refused():
    with pytest.raises(
        ConfigError, match=r"scripted.metric: 'train/x' given for phase 'train', but step 1 measured .*grad/norm"
    ):
        trained(Scripted({}, "train/x"))
    with pytest.raises(ConfigError, match=r"'throughput/duration' given for phase 'train', but step 1 measured"):
        trained(Scripted({}, "throughput/duration"))
    with pytest.raises(ConfigError, match=r"'eval/x' given .* but the evaluation after step 4 measured eval/loss"):
        trained(Scripted({}, "eval/x"))


def test_plateaus_reduce_the_learning_rate_of_the_run():
    """The loss of the evaluations rises."""
    rates, *_ = trained(ReduceOnPlateauConfig(patience=0, factor=0.5, min_lr=2e-3).build(PhaseFacts(1e-2)))
    assert scales(rates) == {1: 1.0, 9: 0.5, 13: 0.25}


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_plateau_goes_on_with_the_schedule(goes_on: bool):
    controllers = (ReduceOnPlateauConfig().build(PhaseFacts(1e-2)),)
    first = phase(controllers=controllers)
    second = replace(first, index=1, name="second", start=20, end=40, schedule_start=0 if goes_on else None)
    memories = {
        "reduce_on_plateau": {"state": {"scale": 0.1}, "controls": {"lr_scale": 0.1}},
        "bad_streak": {"state": 2},
    }
    builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (first, second))
    at_its_end = SimpleNamespace(cursor=Cursor(20, 0, "train", False, False))
    history = History(1, controllers=memories)
    phase_runner = PhaseRunner(builder, layout(), cast(Any, None), print, cast(Any, at_its_end), history)
    assert phase_runner.phase == second
    staying = {"reduce_on_plateau": memories["reduce_on_plateau"]} if goes_on else {}
    assert phase_runner.history == History(1, controllers=staying)
