"""When the orchestrator decides, what it tries, and when it goes back: its decisions for metrics that are made up."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jaxlm.controllers.base import Branch, Branched, Decision, DoneStep, Keep, Noted, PhaseFacts, Rewind, SetControls
from jaxlm.core.errors import ConfigError
from jaxlm.core.values import logged
from jaxlm.systems.orchestrate.orchestrator import (
    NowcastTrials,
    Orchestrator,
    OrchestratorConfig,
    PlannedSwitch,
    RollbacksError,
    Safety,
)

STRATEGIES = {
    "plain": {"strategy": 0.0, "lr_scale": 1.0},
    "fast": {"strategy": 1.0, "lr_scale": 3.0},
    "spike_resistant": {"strategy": 2.0, "lr_scale": 0.3},
}
FACTS = PhaseFacts(1e-3, STRATEGIES, telemetry_window=128, nowcast_window=20, has_validation=True)
QUIET = {
    logged.LOSS: 3.0,
    logged.LOSS_REFERENCE: 3.0,
    logged.GRAD_NORM_RATIO: 1.0,
    logged.IS_SPIKE: 0.0,
    logged.NUM_SPIKES: 0.0,
    logged.IS_PLATEAU: 0.0,
}
DELAY = 4
STEPS = 10_000


def rewound(controller: Orchestrator, state: Any, step: int) -> Any:
    change = controller.persistence.rewound
    assert change is not None
    return change(state, step)


@dataclass
class Driven:
    """A controller that is asked as `engine/control.py` asks it.

    Attributes:
        decisions: (step, decision), without the snapshots.
    """

    controller: Orchestrator
    losses: Callable[[str], float] = lambda name: 3.0
    num_steps: int = STEPS
    step: int = 0
    state: Any = None
    decisions: list[tuple[int, Decision]] = field(default_factory=list)
    keeps: list[tuple[int, str]] = field(default_factory=list)
    notes: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    taken: int = 0
    gone_back: bool = False
    skipped: Callable[[int], bool] = lambda step: False
    trips: bool = False  # whether the last step of each branch goes wrong

    def run(self, until: int, **changes: Any) -> "Driven":
        """Trains to a step, or until the run goes back. Args: changes: metrics that differ, by the last part of their names;
        functions get the step."""
        self.state = self.controller.init() if self.state is None else self.state
        while self.step < until:
            self.step += 1
            self.taken += 1
            self.gone_back = False
            values = {f"telemetry/{name}": it(self.step) if callable(it) else it for name, it in changes.items()}
            self._told(*self.controller.after(self._done(DELAY), QUIET | values, self._read()))
            if self.gone_back:
                break
        return self

    def _told(self, state: Any, answer: Any) -> None:
        self.state = state
        if isinstance(answer, Noted):
            self.notes += [(self.step, note) for note in answer.notes]
            answer = answer.decision
        if isinstance(answer, Keep):
            self.keeps.append((self.step, answer.purpose))
        elif answer is not None:
            self.decisions.append((self.step, answer))
        if isinstance(answer, Branch):
            losses = {name: self.losses(name) for name in answer.candidates}
            winner = min(losses, key=lambda name: losses[name])
            self.step += answer.num_steps
            self.taken += answer.num_steps * len(losses)
            result = Branched(answer.purpose, 3.0, losses, winner, answer.num_steps)
            self._told(*self.controller.after(replace(self._done(1), branched=result), {}, self._read()))
            if self.trips:
                bad = QUIET | {"telemetry/grad_norm_ratio": 1000.0}
                self._told(*self.controller.after(self._done(DELAY), bad, self._read()))
        if isinstance(answer, Rewind):
            self.step, self.gone_back = self.state["trusted"], True
            self.state = rewound(self.controller, self._read(), self.step)

    def _done(self, delay: int) -> DoneStep:
        progress = self.step / self.num_steps
        return DoneStep(self.step, self.step == self.num_steps, self.skipped(self.step), progress, self.step + delay)

    def _read(self) -> Any:
        """The state as a checkpoint has it."""
        return json.loads(json.dumps(self.state, allow_nan=False))

    def events(self, *names: str) -> list[tuple[int, Mapping[str, Any]]]:
        return [(step, note) for step, note in self.notes if note["event"] in names]


def driven(losses: Callable[[str], float] = lambda name: 3.0, num_steps: int = STEPS, **keys: Any) -> Driven:
    return Driven(OrchestratorConfig(**keys).build(FACTS), losses, num_steps)


def branches(run: Driven) -> list[int]:
    return [step for step, decision in run.decisions if isinstance(decision, Branch)]


def test_decisions_come_at_the_interval_and_never_sooner():
    run = driven(interval=100, horizon=10, branch_budget=1.0, min_steps_between_switches=0, num_steps=10**9)
    run.run(1000)
    assert branches(run) == [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    assert run.events("switch") == []


def test_after_a_switch_no_boundary_counts_for_a_while():
    calls = iter(range(10**6))
    run = driven(
        lambda name: -next(calls),
        interval=100,
        horizon=10,
        branch_budget=1.0,
        min_steps_between_switches=150,
        num_steps=10**9,
    )
    run.run(1000)  # the last candidate always wins
    switches = [note["effective"] - 1 for _, note in run.events("switch")]
    assert switches == branches(run)  # the winner has made the updates from the first step of the branch on
    gaps = [after - before for before, after in zip(switches, branches(run)[1:], strict=False)]
    assert set(gaps) == {10 + 150}


@pytest.mark.parametrize(("key", "reason"), [("num_spikes", "spike"), ("is_plateau", "plateau")])
def test_spikes_and_plateaus_are_boundaries_once(key, reason):
    run = driven(interval=10_000, horizon=10, branch_budget=1.0, num_steps=10**9)
    run.run(300, **{key: lambda step: 3.0 if step >= 250 else 0.0})
    assert branches(run) == [250]
    assert [note["reason"] for _, note in run.events("branch")] == [reason]
    run.run(449, **{key: 3.0})
    assert branches(run) == [250]
    run.run(500, **{key: 3.0})
    assert branches(run) == ([250, 450] if reason == "spike" else [250])  # a plateau has to end first


def test_the_beginning_and_the_end_of_a_phase_are_boundaries():
    run = driven(interval=10_000, horizon=10, branch_budget=1.0, num_steps=1000).run(1000)
    assert branches(run) == [100, 700]
    assert [note["reason"] for _, note in run.events("branch")] == ["phase_change", "phase_change"]


@pytest.mark.slow
def test_the_budget_bounds_the_steps_of_losing_candidates():
    run = driven(interval=500, horizon=100, num_steps=10**9).run(20_000)
    losing = run.taken - run.step
    probes = 4 * sum(len(decision.candidates) + 1 for _, decision in run.decisions if isinstance(decision, Branch))
    assert losing + probes / 3 <= run.state["extra"] <= losing + probes / 3 + len(run.decisions)
    assert 0.08 < run.state["extra"] / run.step <= 0.1
    assert run.events("boundary")[0][0] == 500  # a candidate costs 104 steps, but only 50 are allowed there
    assert branches(run)[0] == 1500
    free = driven(interval=500, horizon=100, branch_budget=0.0).run(5000)
    assert branches(free) == []


def test_a_branch_that_the_run_goes_back_from_is_paid_and_remembered():
    keys: dict[str, Any] = {"interval": 100, "horizon": 10, "max_candidates": 2, "min_steps_between_switches": 0}
    safety = Safety(snapshot_interval=50, max_rollbacks_in_a_row=100)
    run = driven(lambda name: 3.0 if name == "plain" else 3.1, num_steps=10**9, safety=safety, **keys)
    run.trips = True
    furthest, paid = 0, 0
    while run.step < 1500:
        run.run(1500)
        furthest = max(furthest, run.step)
        assert run.state["extra"] >= paid
        paid = run.state["extra"]
    num_branches = len(branches(run))
    assert num_branches == len(run.events("rollback")) == len(run.events("branch")) > 5
    assert paid == num_branches * (10 + 4) <= 0.1 * furthest  # a losing candidate, and 12 held-out batches
    assert sum(run.state["bandit"]["counts"].values()) > 1


def test_what_a_winner_does_in_its_branch_decides_nothing_else():
    run = driven(interval=100, horizon=10, branch_budget=1.0, min_steps_between_switches=0, num_steps=1000).run(100)
    assert branches(run) == [100]
    before = dict(run.state)
    for step in (101, 105, 110):
        done = DoneStep(step, False, False, step / 1000, step + DELAY)
        state, answer = run.controller.after(done, QUIET | {"telemetry/is_plateau": 1.0}, run.state)
        assert answer is None
        assert state | {"healthy": before["healthy"]} == before


@pytest.mark.slow
def test_the_strategy_that_wins_is_the_one_that_is_tried_most():
    rewards = {"plain": 3.0, "fast": 2.9, "spike_resistant": 3.05}
    run = driven(rewards.__getitem__, interval=100, horizon=10, max_candidates=2, branch_budget=1.0, num_steps=10**9)
    run.run(6000)
    assert run.state["strategy"] == "fast"
    assert [note["to"] for _, note in run.events("switch")][-1] == "fast"


def test_without_trials_it_takes_what_has_done_best():
    run = driven(interval=100, max_candidates=1, min_steps_between_switches=0, num_steps=10**9)
    assert not run.controller.may_branch
    run.run(600)
    assert branches(run) == []
    tried = [decision.values["strategy"] for _, decision in run.decisions if isinstance(decision, SetControls)]
    assert set(tried) == {1.0, 2.0, 0.0}  # each is tried once before one is repeated


def test_a_bad_gradient_leads_back_to_a_trusted_checkpoint_with_the_safe_strategy():
    safety = Safety(snapshot_interval=50, quarantine=20)
    run = driven(interval=10_000, safety=safety).run(115)
    assert [step + DELAY for step, _ in run.keeps] == [5, 55, 105]
    assert [purpose for _, purpose in run.keeps] == ["orchestrator_0", "orchestrator_1", "orchestrator_0"]
    run.run(116, grad_norm_ratio=1000.0)
    ((step, back),) = run.decisions
    assert step == 116
    assert isinstance(back, Rewind)
    assert (back.first, back.last, back.purposes) == (56, 116, ("orchestrator_1",))  # 105 is in quarantine
    assert back.controls == STRATEGIES["spike_resistant"]
    ((_, note),) = run.events("rollback")
    assert note["reason"] == "safety"
    assert "1,000 times its median" in note["cause"]
    assert run.step == 55
    run.run(200)
    assert (run.state["strategy"], len(run.decisions)) == ("spike_resistant", 1)


def test_the_fourth_time_in_a_row_the_run_ends():
    run = driven(interval=10_000, safety=Safety(snapshot_interval=50, quarantine=20)).run(60)
    for _ in range(3):
        run.run(run.step + 3, loss=9.0)
    assert [decision.first for _, decision in run.decisions if isinstance(decision, Rewind)] == [6, 6, 6]
    with pytest.raises(RollbacksError, match=r"step \d+: the mean loss is 9\.0000 .* 3 times in a row already"):
        run.run(run.step + 3, loss=9.0)
    apart = driven(interval=10_000, safety=Safety(snapshot_interval=50, quarantine=20)).run(60)
    for _ in range(6):
        apart.run(apart.step + 3, loss=9.0)
        apart.run(apart.step + 120)


def test_before_the_first_checkpoint_only_the_strategy_changes():
    run = driven(interval=10_000).run(10).run(12, loss=9.0)
    assert [decision for _, decision in run.decisions] == [SetControls(STRATEGIES["spike_resistant"])]


@pytest.mark.parametrize(
    ("limits", "metrics"),
    [
        ({"max_loss_increase": None}, {"loss": 9.0}),
        ({"max_grad_increase": None}, {"grad_norm_ratio": 1e6}),
        ({}, {"loss": 4.0}),
        ({}, {"grad_norm_ratio": math.inf}),
        ({"max_loss_delta": 1.5, "max_loss_increase": None}, {"loss": 4.4}),
    ],
)
def test_metrics_within_the_limits_do_not_trip(limits, metrics):
    assert driven(interval=10_000, safety=Safety(**limits)).run(300).run(310, **metrics).decisions == []
    assert driven(interval=10_000, safety=None).run(300).run(310, loss=9.0, grad_norm_ratio=1e6).decisions == []


def test_updates_that_are_skipped_again_and_again_lead_back():
    run = driven(interval=10_000).run(300)
    skipped = [number % 32 >= 17 or number > 320 for number in range(500)]
    run.skipped = lambda step: skipped[step]
    run.run(400)
    ((_, back),) = run.decisions
    assert isinstance(back, Rewind)
    assert back.reason == "the updates of 16 steps in a row were skipped (max_skipped: 16)"


def test_a_difference_of_losses_may_be_the_limit():
    run = driven(safety=Safety(max_loss_delta=1.5, max_loss_increase=None), interval=10_000).run(300).run(301, loss=4.6)
    assert isinstance(run.decisions[0][1], Rewind)


def test_switches_that_are_written_come_at_their_step():
    run = driven(
        interval=10_000, switch_at=[PlannedSwitch(300, "fast"), PlannedSwitch(700, "plain")], num_steps=10**9
    ).run(1000)
    assert [(note["effective"], note["reason"], note["to"]) for _, note in run.events("switch")] == [
        (300, "manual", "fast"),
        (700, "manual", "plain"),
    ]
    early = driven(interval=10_000, switch_at=[PlannedSwitch(101, "plain"), PlannedSwitch(103, "fast")])
    early.step = 100  # a phase begins
    assert early.run(110).events("switch") == [
        (101, {"event": "switch", "reason": "manual", "from": "plain", "to": "fast", "effective": 105})
    ]
    assert [decision for _, decision in run.decisions] == [
        SetControls(STRATEGIES["fast"]),
        SetControls(STRATEGIES["plain"]),
    ]


@pytest.mark.slow
def test_extrapolation_is_tried_now_and_then_and_given_up():
    losses = {"as it is": 3.0, "nowcast": 3.1}
    run = driven(losses.__getitem__, interval=10_000, nowcast=NowcastTrials(100, 200, 50, max_rejections=3)).run(2000)
    assert branches(run) == [200, 300, 400]
    assert [note["accepted"] for _, note in run.events("nowcast")] == [False] * 3
    branch = run.decisions[0][1]
    assert isinstance(branch, Branch)
    assert (branch.candidates["nowcast"], branch.ending, branch.num_steps) == ({"nowcast": 50.0}, {"nowcast": 0.0}, 1)
    rare = driven(losses.__getitem__, interval=10_000, nowcast=NowcastTrials(500, 200, 50)).run(1000)
    assert branches(rare) == [200, 700]
    better = driven(lambda name: -len(name), interval=10_000, nowcast=NowcastTrials(100, 200, 50, 3)).run(1500)
    assert len(branches(better)) == 3  # "as it is" is longer
    assert driven(interval=10_000, nowcast=NowcastTrials()).controller.controls()["nowcast"] == 0.0


@pytest.mark.slow
def test_to_monitor_is_to_decide_at_the_same_steps():
    keys = {"interval": 100, "horizon": 20, "num_steps": 10**9}
    decided = [driven(mode=mode, **keys).run(3000).events("branch", "boundary") for mode in ("active", "monitor")]
    boundaries = [[(note["event"], note["reason"]) for _, note in notes] for notes in decided]
    assert len(boundaries[0]) > 20
    assert boundaries[0] == boundaries[1][: len(boundaries[0])]


def test_to_monitor_is_to_note_what_would_happen():
    run = driven(mode="monitor", interval=100, horizon=10, branch_budget=1.0, safety=Safety(snapshot_interval=50))
    assert run.controller.controls() == {}
    assert not run.controller.may_branch
    run.run(300).run(305, loss=9.0)
    assert (run.decisions, run.keeps) == ([], [])
    assert {note["event"] for _, note in run.notes} == {"branch", "rollback"}
    assert all(note["would"] for _, note in run.notes)


def with_keys(run: Driven, table: Mapping[str, Mapping[str, float]] = STRATEGIES, **keys: Any) -> Any:
    """What the orchestrator of a run that resumes with other keys remembers and sets."""
    other = OrchestratorConfig(**{"safety": None, **keys}).build(PhaseFacts(1e-3, table, 128, has_validation=True))
    return other.persistence.resumed(run._read())


def test_a_run_resumes_with_other_keys():
    run = driven(interval=10_000, switch_at=[PlannedSwitch(50, "fast")]).run(100)
    assert with_keys(run) is None
    assert with_keys(run, interval=7, horizon=3) is None
    more = {
        "new": {"strategy": 0.0, "lr_scale": 1.0},
        "fast": {"strategy": 1.0, "lr_scale": 2.0},
        "plain": STRATEGIES["plain"],
    }
    state, controls = with_keys(run, more)
    assert (state["strategy"], controls) == ("fast", more["fast"])
    with pytest.raises(ConfigError, match="of the run has chosen 'fast'"):
        with_keys(run, {"plain": STRATEGIES["plain"]})
    state, controls = with_keys(run, mode="monitor")  # without controls, the initial strategy makes the updates
    assert (state["strategy"], controls) == ("plain", {})
    unswitched = driven(interval=10_000).run(30)
    state, controls = with_keys(unswitched, dict(reversed(STRATEGIES.items())))
    assert (state["strategy"], controls) == ("spike_resistant", STRATEGIES["spike_resistant"])


def test_a_planned_switch_that_is_added_later_comes_at_its_step():
    run = driven(interval=10_000, switch_at=[PlannedSwitch(50, "fast")]).run(100)
    later = driven(interval=10_000, switch_at=[PlannedSwitch(80, "spike_resistant"), PlannedSwitch(200, "plain")])
    later.state, later.step = run._read(), run.step
    later.run(300)
    assert [(note["effective"], note["to"]) for _, note in later.events("switch")] == [(200, "plain")]


def test_another_controller_may_make_the_run_go_back_at_any_time():
    run = driven(interval=100, horizon=10, branch_budget=1.0, min_steps_between_switches=0, num_steps=10**9).run(99)
    state, answer = run.controller.after(DoneStep(100, False, False, 0.0, 104), QUIET, run._read())
    assert isinstance(answer, Branch)
    assert state["trying"] == "periodic"
    run.state, run.step = rewound(run.controller, json.loads(json.dumps(state)), 40), 40
    run.run(150)
    assert branches(run) == [140]
    assert run.keeps[-1][0] >= 40 > run.keeps[0][0]  # its checkpoints are those of another attempt


def test_spikes_are_noted():
    run = driven(interval=10_000).run(5, is_spike=lambda step: float(step == 3))
    assert run.notes == [(3, {"event": "spike", "loss": 3.0})]


def test_losses_that_are_not_finite_are_written_as_null():
    losses = {"plain": 3.0, "fast": math.inf, "spike_resistant": math.inf}
    run = driven(losses.__getitem__, interval=100, horizon=10, branch_budget=1.0).run(100)
    (_, note) = run.events("branch")[0]
    assert note["losses"] == {"plain": 3.0, "fast": None, "spike_resistant": None}
    json.dumps(run.notes, allow_nan=False)


@pytest.mark.parametrize(
    ("facts", "keys", "message"),
    [
        (PhaseFacts(1e-3), {}, r"only one way to update. Set optimizer: \{type: portfolio\}"),
        (PhaseFacts(1e-3, STRATEGIES), {}, r"Set optimizer\.telemetry: true"),
        (
            FACTS,
            {"safety": Safety(strategy="calm")},
            r"safety\.strategy: 'calm', but .* plain, fast, spike_resistant",
        ),
        (FACTS, {"switch_at": [PlannedSwitch(5, "calm")]}, r"switch_at\.0\.to: 'calm', but"),
        (
            FACTS,
            {"switch_at": [PlannedSwitch(9, "fast"), PlannedSwitch(9, "plain")]},
            r"the steps \[9, 9\] given, ascending",
        ),
        (
            FACTS,
            {"switch_at": [PlannedSwitch(4, "fast")]},
            r"switch_at\.0\.step: 4 given, at least 5 .* Set optimizer\.initial: fast",
        ),
        (
            FACTS,
            {"safety": Safety("fast", max_loss_increase=None, max_grad_increase=None, max_skipped=None)},
            r"safety: max_loss_increase, .* are null, .* Set one of them, or safety: null",
        ),
        (FACTS, {"max_spikes": 129}, r"max_spikes: 129 given, at most 128 expected: .*optimizer\.telemetry\.window"),
        (PhaseFacts(1e-3, STRATEGIES, 128), {"nowcast": NowcastTrials()}, r"Set optimizer\.nowcast too"),
        (
            replace(FACTS, nowcast_window=300),
            {"nowcast": NowcastTrials(every=300)},
            r"nowcast\.start: 200, at least 300 expected",
        ),
        (FACTS, {"nowcast": NowcastTrials(every=10)}, r"nowcast\.every: 10, at least 20 expected"),
        (FACTS, {"nowcast": NowcastTrials(start=10)}, r"nowcast\.start: 10, at least 20 expected"),
        (replace(FACTS, has_validation=False), {}, "compares candidates on held-out data, but there is none"),
        (replace(FACTS, is_annotated=True), {}, "reads batches again for each candidate, but the objective reads what"),
    ],
)
def test_keys_that_do_not_fit_the_optimizer_are_refused(facts, keys, message):
    with pytest.raises(ConfigError, match=message):
        OrchestratorConfig(**keys).build(facts)
