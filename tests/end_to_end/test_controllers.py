"""Learning rates that are reduced on a plateau, in the real command: killed (SIGKILL) around each decision, and in two
processes.

Only an improvement by 10 nats counts, so that it is known when the learning rate is reduced.
"""

import functools

import pytest

from tests.end_to_end.commands import Workplace, check_close
from tests.tiers import one_of

COMMON = ("--config_path", "run.yaml", "--optimizer.lr_schedule", "constant", "--optimizer.warmup", "0")
EVERY_STEP = ("--trainer.checkpointer.save_interval", "0")
PLATEAU = "type: reduce_on_plateau, threshold: 10.0, threshold_mode: abs, factor: 0.5"
CASES = {
    # Every fourth loss reduces the learning rate, from the fifth on, and four steps later that takes effect.
    "train/loss": (
        f"[{{{PLATEAU}, metric: train/loss, patience: 3}}]",
        {1: 1.0, 9: 0.5, 13: 0.25, 17: 0.125, 21: 0.0625},
    ),
    # After steps 3, 6, 9, ...; all but the first reduce it.
    "eval/loss": (
        f"[{{{PLATEAU}, patience: 0, min_lr: 1.0e-3}}]",
        {1: 1.0, 7: 0.5, 10: 0.25, 13: 0.125, 16: 0.1},
    ),
}


def arguments(case: str) -> tuple[str, ...]:
    return (*COMMON, "--trainer.steps_per_eval", "3", "--trainer.controllers", CASES[case][0])


def rates(place: Workplace) -> dict[int, float]:
    """The first step of each learning rate -> its ratio to `optimizer.learning_rate`."""
    found = {r["step"]: r["optim/learning_rate"] for r in place.records() if "optim/learning_rate" in r}
    return {step: round(rate / 1e-2, 6) for step, rate in found.items() if rate != found.get(step - 1)}


@pytest.fixture(scope="session")
def whole(workplace):
    """The run without a kill, by case and number of devices."""

    @functools.cache
    def run(case: str, devices: int = 1) -> Workplace:
        place = workplace(devices)
        place.write()
        place.finish(*arguments(case))
        return place

    return run


@pytest.mark.soak  # CI kills two processes below
@pytest.mark.parametrize(
    ("case", "kills"),
    [
        ("train/loss", (6, 8, 10)),  # decided after step 5, in effect from step 9 on
        ("eval/loss", (7,)),  # decided after step 6, in effect from step 7 on
    ],
)
def test_a_kill_between_decision_and_effect_changes_nothing(workplace, whole, case, kills):
    place, expected = workplace(), whole(case)
    place.write()
    for step in kills:
        place.die(*arguments(case), *EVERY_STEP, at=str(step))
    assert any("step-" in name for name in place.checkpoints())
    place.finish(*arguments(case), *EVERY_STEP)
    assert rates(expected) == CASES[case][1]
    assert (rates(place), place.losses()) == (rates(expected), expected.losses())
    assert place.digest("step-24") == expected.digest("step-24")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kill"), one_of([("train/loss", "8"), ("eval/loss", "7")]))
def test_two_processes_decide_alike_and_are_killed_between_decision_and_effect(workplace, whole, case, kill):
    """If one had another learning rate, its part of the weights would differ, and so would the losses."""
    alone, together, killed = whole(case), workplace(), workplace()
    together.write()
    killed.write()
    dies = {"module": "tests.end_to_end.dies", "JAXLM_TEST_DIES_AT": kill}
    assert all(end.code != 0 for end in killed.run_all(2, *arguments(case), *EVERY_STEP, **dies))
    assert any("step-" in name for name in killed.checkpoints())
    for place in (together, killed):
        ends = place.run_all(2, *arguments(case))
        assert [end.code for end in ends] == [0, 0], ends
        assert rates(place) == CASES[case][1]
    assert "resuming, from" in ends[0].out
    assert killed.losses() == together.losses()
    assert killed.digest("step-24") == together.digest("step-24")
    check_close(together.losses(), alone.losses())


@pytest.mark.soak
def test_a_controller_may_come_and_go_with_a_start(workplace, whole):
    """One that is gone takes its factor with it; one that is new begins where the run is."""
    place = workplace()
    place.write()
    for steps, given in (("10", arguments("train/loss")), ("14", COMMON), ("24", arguments("train/loss"))):
        place.finish(*given, "--trainer.num_train_steps", steps)
    assert rates(place) == {1: 1.0, 9: 0.5, 11: 1.0, 23: 0.5}
