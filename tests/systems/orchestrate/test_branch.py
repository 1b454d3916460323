"""Branches: candidates from one state, over the same batches, compared with runs that had only one of them."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.controllers.base import (
    Branch,
    Controller,
    DoneStep,
    Next,
    Noted,
    Persistence,
    PhaseFacts,
    Rewind,
    SetControls,
    unchanged,
)
from jaxlm.core import tree
from jaxlm.core.sharding import Layout
from jaxlm.core.values.logged import Activity, StepInfo
from jaxlm.engine.checkpoint.manifest import History
from jaxlm.engine.loop import TrainingLoop
from jaxlm.engine.preemption import StopRequest
from jaxlm.engine.sync import Done, FlagSync, Interrupted, Outcome
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.systems.orchestrate.orchestrator import NowcastTrials, OrchestratorConfig
from jaxlm.systems.orchestrate.portfolio import Nowcast, PortfolioConfig
from jaxlm.systems.orchestrate.strategies import AdamW
from tests.engine.helpers import Ready, Saver, TinyRun, arrays, batch, layout, one_device, open_phase, phase
from tests.engine.test_step import assert_identical
from tests.tiers import one_of

STEPS = 12
BEGIN = 4  # metrics of step 1 take effect before step 5
OPTIMIZER = AdamConfig(learning_rate=1e-2, warmup=0, lr_schedule="constant")
BATCHES = [arrays(seed) for seed in range(STEPS)]
THREE = {"as it is": {}, "double": {"lr_scale": 2.0}, "half": {"lr_scale": 0.5}}


@dataclass(frozen=True)
class Branches(Controller):
    """Branches after the first step. Its state is what came of it."""

    candidates: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: THREE)
    num_steps: int = 4
    ending: Mapping[str, float] = field(default_factory=dict)
    then: Any = None

    name = "branches"  # type: ignore[assignment]

    @property
    def metrics(self) -> Mapping[str, str]:
        return {"branches.metric": "train/loss"}

    def controls(self) -> Mapping[str, float]:
        return {"lr_scale": 1.0}

    def init(self) -> None:
        return None

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Any) -> tuple[Any, Any]:
        if (result := step.branched) is None:
            return (
                ("asked", Branch("test", self.candidates, self.num_steps, 3, self.ending))
                if step.number == 1
                else (state, None)
            )
        assert (state, metrics) == ("asked", {})
        return [step.number, result.winner, result.num_steps], Noted(
            self.then, [{"event": "branch", "of": result.purpose}]
        )


@dataclass(frozen=True)
class Sets(Branches):
    """Sets a control instead, for the steps of the branch alone."""

    value: float = 1.0

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Any) -> tuple[Any, Any]:
        values = {1: self.value, 1 + self.num_steps: 1.0}
        return None, SetControls({"lr_scale": values[step.number]}) if step.number in values else None


@dataclass
class Trained:
    state: Any
    outcome: Outcome
    rates: dict[int, float]
    saver: Saver
    taken: list[int]
    notes: list[tuple[int, str, Mapping[str, Any]]]


class Due:
    """Something that needs the state after some steps."""

    activity = Activity.EVAL

    def __init__(self, steps: tuple[int, ...]):
        self.steps, self.ran = steps, list[int]()

    def due(self, step: int) -> bool:
        return step in self.steps

    def run(self, step: int, state: Any) -> None:
        assert step == int(state.step)
        self.ran.append(step)


def trained(
    controller: Controller,
    probe: Any = lambda state, num_batches: 0.0,
    *,
    saver: Saver | None = None,
    state: Any = None,
    first: int = 0,
    where: Layout | None = None,
    hooks: Mapping[str, Any] | None = None,
    stop: StopRequest | None = None,
    batches: Ready | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Trained:
    run = TinyRun(where or one_device(), phase(end=STEPS, optimizer=OPTIMIZER, controllers=(controller,)))
    saver, seen, notes = saver or Saver(), list[StepInfo](), list[tuple[int, str, Mapping[str, Any]]]()
    state = run.state if state is None else jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), state, run.state)
    with run.where.use():
        ready = batches or Ready([batch(columns, run.where) for columns in BATCHES])
        ready.restore({"next": first})
        opened = open_phase(
            run.where,
            run.phase,
            run.loop_step,
            ready,
            seen.append,
            saver,
            probe,
            lambda *note: notes.append(note),
            stop,
            log,
            **(hooks or {}),
        )
        state, outcome = TrainingLoop(opened.control.begin(state), opened).run()
    rates = {info.step: info.metrics["optim/learning_rate"] for info in seen}
    assert [info.step for info in seen] == sorted(rates)  # each step is logged once
    return Trained(jax.tree.map(np.asarray, state), outcome, rates, saver, ready.taken, notes)


def scripted(losses: list[float]) -> Any:
    """A probe that returns these losses, one after the other."""
    values = iter(losses)
    return lambda state, num_batches: next(values)


def assert_equal(left: Any, right: Any) -> None:
    """The same bits, without the slot of the controls."""
    for one, other in zip(*(jax.tree.leaves(replace(state, slots={})) for state in (left, right)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("devices", one_of(["eight", "one"]))
def test_a_run_goes_on_from_the_best_candidate_as_if_it_had_been_the_only_one(devices):
    where = one_device() if devices == "one" else layout()
    for winner, losses in (("as it is", [2.0, 1.0, 1.0, 1.5]), ("half", [2.0, np.nan, 1.5, 1.0])):
        result = trained(Branches(ending={"lr_scale": 1.0}), scripted(losses), where=where)
        alone = trained(Sets(value=THREE[winner].get("lr_scale", 1.0)), where=where)
        assert isinstance(result.outcome, Done)
        assert_equal(result.state, alone.state)
        assert result.rates == alone.rates
        assert result.taken == [*range(4), *3 * [4, 5, 6, 7], *range(8, STEPS)]
        memory = result.saver.history.controllers["branches"]
        assert memory == {"state": [8, winner, 4], "controls": {"lr_scale": 1.0}}
        assert result.notes == [(8, "branches", {"event": "branch", "of": "test"})]


@pytest.mark.slow
def test_without_another_candidate_nothing_changes_and_without_a_finite_loss_nothing_else_wins():
    plain = trained(Sets(value=1.0))
    assert_equal(trained(Branches({"as it is": {}})).state, plain.state)
    result = trained(Branches(), scripted([np.nan, np.nan, np.inf, np.nan]))
    assert result.saver.history.controllers["branches"]["state"][1] == "as it is"
    assert_equal(result.state, plain.state)


@pytest.mark.slow
def test_the_winners_controls_and_a_decision_hold_from_the_end_of_the_branch():
    result = trained(Branches(), scripted([2.0, 3.0, 1.0, 3.0]))
    assert {step for step, rate in result.rates.items() if rate == np.float32(2e-2)} == set(range(5, STEPS + 1))
    result = trained(Branches(then=SetControls({"lr_scale": 0.25})), scripted([2.0, 3.0, 1.0, 3.0]))
    assert {step for step, rate in result.rates.items() if rate == np.float32(2.5e-3)} == set(range(9, STEPS + 1))


@pytest.mark.slow
def test_the_console_says_what_a_branch_tries_before_it_ends():
    losses, lines, before = iter([2.0, 1.0, np.nan, 1.5]), list[str](), list[int]()

    def probe(state: Any, num_batches: int) -> float:
        before.append(len(lines))
        return next(losses)

    trained(Branches(), probe, log=lines.append)
    assert lines == [
        "branch at step 4: trying as it is, double, half for 4 steps each, with a loss of 2.0000 before",
        "branch at step 4: as it is ends with a loss of 1.0000, 1 of 3",
        "branch at step 4: double ends with a loss of nan, 2 of 3",
        "branch at step 4: half ends with a loss of 1.5000, 3 of 3",
    ]
    assert before == [0, 1, 2, 3]  # each line comes before the next candidate trains


@pytest.mark.slow
def test_a_branch_ends_where_the_state_is_needed():
    for due, begin, end in (((6,), 6, 10), ((4, 6), 4, 6), ((6, 7, 8, 9, 10), 6, 7)):
        exports = Due(due)
        result = trained(Branches(), scripted([2.0, 1.0, 1.0, 1.0]), hooks={"exports": [exports]})
        assert exports.ran == list(due)
        assert result.saver.history.controllers["branches"]["state"] == [end, "as it is", end - begin]
    looks = Due((6,))
    trained(Branches(), scripted([2.0, 1.0, 1.0, 1.0]), hooks={"first": [LooksLater(looks)]})
    assert looks.ran == [8]  # such as the profiler, which depends on when a process began


class LooksLater:
    """A hook that runs after the branch in which it was due."""

    activity = Activity.SAVE

    def __init__(self, due: Due):
        self.due, self._due = due.due, due

    def run(self, step: int, state: Any) -> None:
        self._due.ran.append(step)


@pytest.mark.slow
def test_a_restart_at_any_step_decides_and_trains_the_same():
    saved: dict[int, tuple[Any, History]] = {}

    def save(state: Any, step: int) -> None:
        saved[step] = jax.tree.map(np.asarray, state), History.from_json(saver.history.to_json())

    losses = [2.0, 3.0, 1.0, 3.0]
    saver = Saver(at=(2, 3, 4, 8, 10), on_save=save)
    whole = trained(Branches(), scripted(losses), saver=saver)
    assert saved.keys() == {2, 3, 4, 8, 10, 12}
    for step in (2, 3, 4, 8, 10):
        state, history = saved[step]
        again = trained(Branches(), scripted(losses), saver=Saver(history), state=state, first=step)
        assert_equal(again.state, whole.state)
        assert again.saver.history == whole.saver.history
        assert again.rates == {number: rate for number, rate in whole.rates.items() if number > step}


class Stops(Ready):
    """Asks the run to stop when a number of batches has been taken."""

    def __init__(self, batches: Any, stop: StopRequest, after: int):
        super().__init__(batches)
        self.stop, self.after = stop, after

    def __next__(self) -> Any:
        if len(self.taken) == self.after:
            self.stop.signal = signal.SIGTERM
        return super().__next__()


@pytest.mark.slow
@pytest.mark.parametrize("after", [5, 9, 15])
def test_a_run_that_is_stopped_in_a_branch_is_saved_as_before_it_and_decides_again(after):
    saved: list[tuple[Any, int, History]] = []
    losses = [2.0, 3.0, 1.0, 3.0]
    saver = Saver(on_save=lambda state, step: saved.append((jax.tree.map(np.asarray, state), step, saver.history)))
    where, stop = one_device(), StopRequest()
    with where.use():
        batches = Stops([batch(columns, where) for columns in BATCHES], stop, after)
    stopped = trained(Branches(), scripted(losses), saver=saver, stop=stop, batches=batches)
    assert stopped.outcome == Interrupted(signal.SIGTERM)
    ((state, step, history),) = saved
    assert (step, batches.state()) == (BEGIN, {"next": BEGIN})
    whole = trained(Branches(), scripted(losses))
    again = trained(Branches(), scripted(losses), saver=Saver(history), state=state, first=step)
    assert_equal(again.state, whole.state)
    assert again.saver.history == whole.saver.history


class Fails(Ready):
    """A batch that cannot be read in the second candidate."""

    def __next__(self) -> Any:
        if len(self.taken) == 9:
            raise OSError("the disk is gone")
        return super().__next__()


@pytest.mark.slow
def test_a_batch_that_cannot_be_made_loses_no_step():
    saved: list[tuple[int, Any]] = []
    where = one_device()
    with where.use():
        batches = Fails([batch(columns, where) for columns in BATCHES])
    saver = Saver(on_save=lambda state, step: saved.append((step, batches.state())))
    with pytest.raises(OSError, match="the disk is gone") as failed:
        trained(Branches(), scripted([2.0, 3.0, 1.0]), saver=saver, batches=batches)
    assert saved == [(BEGIN, {"next": BEGIN})]
    assert "The run is saved at step 4" in failed.value.__notes__[0]


@dataclass(frozen=True)
class Ends(Branches):
    """Ends the phase because of a step before the branch, or of one of its steps."""

    because: int = 3

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Any) -> tuple[Any, Any]:
        if step.number == self.because:
            return state, Next("enough")
        return super().after(step, metrics, state)


@pytest.mark.slow
@pytest.mark.parametrize("because", [3, 5])
def test_a_phase_that_ends_in_a_branch_ends_with_it(because):
    result = trained(Ends(because=because), scripted([2.0, 3.0, 1.0, 3.0]))
    assert result.outcome == Next("enough")
    assert max(result.rates) == 8


@dataclass(frozen=True)
class GoesBack(Branches):
    """Goes back because of a step of the branch."""

    persistence = Persistence(rewound=unchanged)  # type: ignore[assignment]

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Any) -> tuple[Any, Any]:
        if step.number == 6:
            return state, Rewind(5, 6, "a bad step", 3, "a.key", ("good",), {"lr_scale": 0.1})
        return super().after(step, metrics, state)


@pytest.mark.slow
def test_a_step_of_the_winner_may_make_the_run_go_back():
    result = trained(GoesBack(), scripted([2.0, 3.0, 1.0, 3.0]))
    assert isinstance(result.outcome, Rewind)
    assert max(result.rates) == 6
    remembered = result.saver.history.controllers["branches"]
    assert remembered["controls"] == {"lr_scale": 0.1}
    assert remembered["state"] == [8, "double", 4]
    assert [fields["event"] for _, _, fields in result.notes] == ["branch"]


@pytest.mark.slow
def test_a_portfolio_of_one_with_an_orchestrator_is_the_optimizer_alone():
    one = PortfolioConfig(
        learning_rate=1e-2,
        warmup=2,
        weight_decay=0.1,
        telemetry=True,
        strategies={"only": AdamW(max_grad_norm=1.0)},
    )
    facts = PhaseFacts(1e-2, one.facts.strategies, telemetry_window=128, has_validation=True)
    asked = OrchestratorConfig(interval=2, min_steps_between_switches=0, safety=None).build(facts)
    states = []
    for controllers in ((), (asked,)):
        run = TinyRun(one_device(), phase(end=STEPS, optimizer=one, controllers=controllers))
        with run.where.use():
            batches = Ready([batch(columns, run.where) for columns in BATCHES])
            opened = open_phase(run.where, run.phase, run.loop_step, batches)
            state, outcome = TrainingLoop(opened.control.begin(run.state), opened).run()
        assert isinstance(outcome, Done)
        states.append(state)
    assert states[1].slots.keys() - states[0].slots.keys() == {"controls"}
    assert_equal(*states)


@pytest.mark.soak
def test_weights_that_walk_at_random_are_not_extrapolated_and_the_tries_leave_no_trace():
    """Random targets: the trend of the weights is noise, and the held-out loss says so."""
    optimizer = PortfolioConfig(
        learning_rate=1e-2, warmup=0, lr_schedule="constant", telemetry=True, nowcast=Nowcast(window=4)
    )
    facts = PhaseFacts(1e-2, optimizer.facts.strategies, telemetry_window=128, nowcast_window=4, has_validation=True)
    usual = OrchestratorConfig(interval=1000, branch_budget=1.0, probe_batches=1, safety=None)
    rng = np.random.default_rng(0)
    noise = [{**arrays(0), "targets": rng.integers(0, 64, (16, 16)).astype(np.int32)} for _ in range(61)]
    states, notes = [], list[Mapping[str, Any]]()
    for config in (usual, replace(usual, nowcast=NowcastTrials(every=10, start=20))):
        run = TinyRun(one_device(), phase(end=60, optimizer=optimizer, controllers=(config.build(facts),)))
        with run.where.use():
            batches = [batch(columns, run.where) for columns in noise]

            def held_out_loss(state: Any, num_batches: int, run: TinyRun = run, held_out: Any = batches[-1]) -> float:
                _, report = run.loop_step(jax.tree.map(jnp.copy, state), held_out, FlagSync.unset(run.where))
                return float(report.metrics["train/loss"])

            opened = open_phase(
                run.where,
                run.phase,
                run.loop_step,
                Ready(batches),
                probe=held_out_loss,
                note=lambda step, name, fields: notes.append(fields),
            )
            state, outcome = TrainingLoop(opened.control.begin(run.state), opened).run()
        assert isinstance(outcome, Done)
        states.append({path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(state)})
    tries = [note for note in notes if note["event"] == "nowcast"]
    assert [(note["accepted"], note["losses"]["nowcast"] > note["before"]) for note in tries] == 4 * [(False, True)]
    without, tried = states
    assert tried.keys() - without.keys() == {"slots.controls.nowcast"}
    assert_identical(without, {path: array for path, array in tried.items() if path in without})
