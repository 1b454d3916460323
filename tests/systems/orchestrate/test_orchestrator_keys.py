"""Keys of the orchestrator whose effect no test of its decisions shows."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxlm.controllers.base import Branch, Rewind
from jaxlm.engine.metrics import MAX_IN_FLIGHT
from jaxlm.systems.orchestrate.orchestrator import (
    _DELAY,
    NowcastTrials,
    OrchestratorConfig,
    PlannedSwitch,
    RollbacksError,
    Safety,
)
from tests.systems.orchestrate.test_orchestrator import DELAY, Driven, branches, driven

LOSSES = {"plain": 3.0, "fast": 2.95, "spike_resistant": 3.1}


def with_trials(losses: Callable[[str], float] = LOSSES.__getitem__, **keys: Any) -> Driven:
    """A controller that may try as much as it wants."""
    return driven(losses, **{"interval": 100, "horizon": 10, "branch_budget": 1.0, "num_steps": 10**9, **keys})


def first_branch(run: Driven) -> Branch:
    return next(decision for _, decision in run.decisions if isinstance(decision, Branch))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (("plain", "fast", "spike_resistant"), 10, 4)),
        ({"max_candidates": 2, "horizon": 7, "probe_batches": 9}, (("plain", "fast"), 7, 9)),
    ],
)
def test_a_branch_is_as_the_keys_say(keys, expected):
    branch = first_branch(with_trials(**keys).run(100))
    assert (tuple(branch.candidates), branch.num_steps, branch.probe_batches) == expected


@pytest.mark.parametrize("most", [2, 5])
def test_as_many_spikes_as_the_key_says_are_a_boundary(most):
    run = with_trials(interval=10_000, max_spikes=most)
    assert branches(run.run(400, num_spikes=float(most - 1))) == []
    assert branches(run.run(401, num_spikes=float(most))) == [401]


@pytest.mark.parametrize(("key", "metric"), [("when_unstable", "num_spikes"), ("on_plateau", "is_plateau")])
def test_favored_strategies_are_tried_first(key, metric):
    for name in ("fast", "spike_resistant"):
        favored: dict[str, Any] = {key: [name]}
        run = with_trials(max_candidates=2, max_spikes=128, **favored).run(100, **{metric: 2.0})
        assert list(first_branch(run).candidates) == ["plain", name]


def test_rewards_are_measured_on_the_scale_and_fade_with_the_discount():
    sums = with_trials().run(100).state["bandit"]["sums"]  # 1/2 + (3 - loss) / 0.2, and 0.98 for each later one
    assert [sums[name] for name in LOSSES] == pytest.approx([0.5 * 0.98**2, 0.75 * 0.98, 0.0])
    wide = with_trials(reward_scale=1.0, discount=0.5).run(100).state["bandit"]["sums"]
    assert [wide[name] for name in LOSSES] == pytest.approx([0.5 * 0.25, 0.525 * 0.5, 0.45])


def test_a_larger_bonus_tries_what_did_worse_before():
    def tried(exploration: float) -> set[str]:
        """What is tried beside the best one after each has been tried once."""
        run = with_trials(max_candidates=2, exploration=exploration, min_steps_between_switches=0).run(1500)
        found = [decision for _, decision in run.decisions if isinstance(decision, Branch)][5:]
        return {name for branch in found for name in branch.candidates}

    assert tried(0.0) == {"fast", "plain"}  # what is second is tried for ever
    assert tried(3.0) == set(LOSSES)


def test_as_many_rollbacks_in_a_row_as_the_key_says():
    def count(most: int) -> int:
        safety = Safety(snapshot_interval=50, quarantine=20, max_rollbacks_in_a_row=most)
        run = driven(interval=10_000, safety=safety).run(60)
        with contextlib.suppress(RollbacksError):
            for _ in range(20):
                run.run(run.step + 3, loss=9.0)
        return len(run.decisions)

    assert (count(1), count(4)) == (1, 4)


@pytest.mark.parametrize(("quarantine", "first"), [(5, 106), (20, 56)])
def test_a_checkpoint_is_trusted_after_its_quarantine(quarantine, first):
    run = driven(interval=10_000, safety=Safety(strategy="fast", snapshot_interval=50, quarantine=quarantine)).run(115)
    run.run(116, grad_norm_ratio=1000.0)
    assert [decision.first for _, decision in run.decisions if isinstance(decision, Rewind)] == [first]
    assert run.state["strategy"] == "fast"


@pytest.mark.parametrize(("most", "last"), [(2, 302), (6, 306), (None, None)])
def test_so_many_skipped_updates_in_a_row_lead_back(most, last):
    run = driven(interval=10_000, safety=Safety(max_skipped=most)).run(300)
    run.skipped = lambda step: step > 300
    run.run(310)
    assert [decision.last for _, decision in run.decisions if isinstance(decision, Rewind)] == ([last] if last else [])


def named(num_steps: int, **keys: Any) -> list[str]:
    """The keys reported as without effect for a run of `num_steps` steps."""
    return [re.split("[: ]", line)[0] for line in OrchestratorConfig(**keys).without_effect([range(1, num_steps + 1)])]


LENGTHS = [*range(5, 35), 130, 500]
QUICK: dict[str, Any] = {"min_steps_between_switches": 0, "branch_budget": 0.0, "max_candidates": 3, "safety": None}


@pytest.mark.slow
def test_an_interval_is_said_to_have_no_effect_if_nothing_is_decided_because_of_it():
    assert _DELAY == MAX_IN_FLIGHT
    for num_steps in LENGTHS:
        limit = 0.6 * num_steps
        for interval in {1, 2, num_steps // 2, *range(max(1, int(limit) - 3), int(limit) + 4), num_steps}:
            keys: dict[str, Any] = QUICK | {"interval": interval}
            boundaries = driven(num_steps=num_steps, **keys).run(num_steps).events("boundary")
            acts = any(note["reason"] == "periodic" and step + DELAY <= num_steps for step, note in boundaries)
            assert ("interval" in named(num_steps, **keys)) == (not acts), (num_steps, interval)


@pytest.mark.parametrize("horizon", [1, 5, 20])
def test_a_horizon_is_said_to_have_no_effect_if_no_trial_is_affordable(horizon):
    affordable = []
    for num_steps in LENGTHS:
        keys = QUICK | {"interval": 1, "horizon": horizon, "branch_budget": 0.1}
        starts = branches(driven(num_steps=num_steps, **keys).run(num_steps))
        acts = any(step + DELAY <= num_steps for step in starts)
        assert ("horizon" in named(num_steps, **keys)) == (not acts), num_steps
        affordable.append(acts)
    assert affordable == sorted(affordable)
    assert {*affordable} == {False, True}


def test_a_quarantine_is_said_to_have_no_effect_if_the_run_can_never_go_back():
    for num_steps in (5, 24, 25, 26, 300):
        run = driven(interval=10_000, num_steps=num_steps).run(num_steps - 1).run(num_steps, loss=9.0)
        went_back = any(isinstance(decision, Rewind) for _, decision in run.decisions)
        assert ("safety.quarantine" in named(num_steps)) == (not went_back), num_steps


def test_extrapolation_is_said_to_have_no_effect_if_it_is_never_tried():
    for num_steps, budget in ((40, 1.0), (43, 1.0), (44, 1.0), (53, 0.1), (54, 0.1), (2000, 0.0)):
        keys = QUICK | {"interval": 10**6, "nowcast": NowcastTrials(20, 40), "branch_budget": budget, "horizon": 10**6}
        tried = [
            step for step in branches(driven(num_steps=num_steps, **keys).run(num_steps)) if step <= num_steps - DELAY
        ]
        names = {"nowcast.start", "nowcast"} & {*named(num_steps, **keys)}
        assert names == (set() if tried else {"nowcast.start"} if num_steps < 44 else {"nowcast"}), num_steps


def test_all_that_has_no_effect_is_one_line():
    config = OrchestratorConfig(switch_at=[PlannedSwitch(9, "fast"), PlannedSwitch(700, "fast")])
    assert config.without_effect([range(1, 21)]) == [
        "interval: 500",
        "horizon: 100 (a trial costs 104 steps, and branch_budget: 0.1 allows 1)",
        "switch_at.1.step: 700",
        "safety.quarantine: 20 (no checkpoint is old enough to go back to)",
    ]
    assert config.without_effect([range(1, 21), range(21, 2001)]) == []


@pytest.mark.slow
def test_keys_of_trials_are_said_to_have_no_effect_if_nothing_is_tried():
    given: dict[str, Any] = {"max_candidates": 1, "horizon": 20, "branch_budget": 0.2}
    assert named(2000, max_candidates=1) == []
    assert named(2000, **given) == ["horizon", "branch_budget"]
    assert named(2000, **given, nowcast=NowcastTrials()) == ["horizon"]
    runs = [driven(**given).run(2000), driven(max_candidates=1).run(2000)]
    assert runs[0].notes == runs[1].notes
