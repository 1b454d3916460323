"""The bandit over strategies: bounds by hand, and how soon it finds the best."""

import copy
import json
import math

import numpy as np
import pytest

from jaxlm.systems.orchestrate.bandit import Bandit, PseudoRewards, favoring, reward

NAMES = ("safe", "bold", "slow")
UCB1 = Bandit(NAMES, exploration=math.sqrt(2), discount=1.0)


def state_of(bandit: Bandit, *rewards: tuple[str, float]):
    state = bandit.init()
    for name, one in rewards:
        state = bandit.rewarded(state, name, one)
    return state


def test_bounds_by_hand():
    pulls = [("safe", 0.5)] * 3 + [("bold", 0.25)] * 4 + [("slow", 1.0)] * 5
    bounds = UCB1.upper_bounds(state_of(UCB1, *pulls))
    # N = 12, n = 3: sqrt(2 ln(12) / 3)
    assert bounds["safe"] - 0.5 == pytest.approx(1.2872, abs=2e-4)
    assert bounds["bold"] - 0.25 == pytest.approx(math.sqrt(2 * math.log(12) / 4))
    assert bounds["slow"] - 1.0 == pytest.approx(math.sqrt(2 * math.log(12) / 5))
    assert UCB1.ranked(state_of(UCB1, *pulls)) == ["slow", "safe", "bold"]


def test_what_is_untried_comes_first_and_ties_have_an_order():
    assert UCB1.ranked(UCB1.init()) == list(NAMES)
    assert UCB1.ranked(state_of(UCB1, ("safe", 1.0))) == ["bold", "slow", "safe"]
    even = state_of(UCB1, *((name, 0.5) for name in NAMES))
    assert UCB1.ranked(even) == list(NAMES)


def test_rewards_fade():
    bandit = Bandit(NAMES, discount=0.5)
    state = state_of(bandit, ("safe", 1.0), ("bold", 0.5), ("safe", 0.0))
    assert state == {
        "counts": {"safe": 1.25, "bold": 0.5, "slow": 0.0},
        "sums": {"safe": 0.25, "bold": 0.25, "slow": 0.0},
    }
    fewer = Bandit(("bold", "new"))
    assert set(fewer.rewarded(state, "new", 1.0)["counts"]) == {"bold", "new"}
    assert fewer.ranked(state) == ["new", "bold"]


def test_it_is_pure_and_its_state_is_json():
    bandit = Bandit(NAMES)
    state = state_of(bandit, ("safe", 0.3), ("bold", 0.7), ("slow", 0.1))
    before = copy.deepcopy(state)
    assert bandit.ranked(state) == bandit.ranked(json.loads(json.dumps(state)))
    bandit.rewarded(state, "slow", 0.5)
    assert state == before
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(AssertionError, match="reward"):
            bandit.rewarded(state, "safe", wrong)


def test_a_condition_adds_its_prior_and_leaves_no_trace():
    bandit = Bandit(NAMES, prior={"unstable": favoring(NAMES, ["slow"]), "plateau": favoring(NAMES, ["bold"])})
    assert bandit.ranked(bandit.init(), "unstable") == ["slow", "safe", "bold"]
    assert bandit.ranked(bandit.init(), "plateau") == ["bold", "safe", "slow"]
    assert bandit.ranked(bandit.init(), "unknown") == list(NAMES)
    # A strategy that has failed is below the others, whatever the condition: a bonus that multiplies cannot do that.
    failed = state_of(bandit, *[("slow", 0.0)] * 20)
    assert bandit.ranked(failed, "unstable") == ["safe", "bold", "slow"]
    bounds = bandit.upper_bounds(state_of(bandit, ("safe", 1.0), ("safe", 0.0)), "unstable")
    assert bounds["safe"] == pytest.approx((0.98 + 2 * 0.25) / 3.98 + 0.3 * math.sqrt(math.log(7.98) / 3.98))
    assert favoring(["a"], ["a"], count=3.0) == {"a": PseudoRewards(3.0, 0.75)}


def test_rewards_are_between_0_and_1():
    assert reward(3.0, 3.0, 0.1) == 0.5
    assert reward(3.0, 2.95, 0.1) == pytest.approx(0.75)
    assert [reward(3.0, after, 0.1) for after in (2.0, 4.0, math.inf, math.nan)] == [1.0, 0.0, 0.0, 0.0]


def test_the_best_is_found_and_found_again_after_a_change():
    names = ["a", "b", "c", "d"]
    bandit, shares, later = Bandit(names), [], []
    for seed in range(20):
        rng, state = np.random.default_rng(seed), bandit.init()
        chances = {"a": 0.9, "b": 0.5, "c": 0.5, "d": 0.5}
        pulled = []
        for number in range(600):
            if number == 500:
                chances |= {"a": 0.1, "c": 0.9}
            pulled.append(bandit.ranked(state)[0])
            state = bandit.rewarded(state, pulled[-1], float(rng.random() < chances[pulled[-1]]))
        shares.append(pulled[:500].count("a") / 500)
        later.append(pulled[550:].count("c") / 50)
    assert np.mean(shares) > 0.8
    assert min(later) > 0.5
