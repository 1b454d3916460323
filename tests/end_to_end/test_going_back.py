"""Going back and ending early in the real command: killed (SIGKILL) at every point, and in two processes."""

import functools
import signal

import pytest

from tests.end_to_end.commands import Finished, Workplace

MODULE = "tests.end_to_end.goes_back"
POISON = {"JAXLM_TEST_POISON": f"{9 * 16}:{12 * 16}"}  # the batches of steps 10, 11 and 12
REWIND = ("--optimizer.skip_bad_steps", "{rewind_after: 3}")
# The loss falls, so that the first evaluation is the best and the third ends the run.
UNTIL = ("--trainer.until", "{metric: eval/loss, mode: max, patience: 2}", "--trainer.steps_per_eval", "3")
CASES: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "rewind": (REWIND, POISON, "step-24-attempt-1"),
    "until": (UNTIL, {}, "step-9"),
}


def finish(place: Workplace, case: str, processes: int = 1, **environment: str) -> list[Finished]:
    keys, poison, _ = CASES[case]
    return place.run_all(processes, "--config_path", "run.yaml", *keys, module=MODULE, **poison, **environment)


@pytest.fixture(scope="session")
def whole(workplace):
    """The run without a kill, by case and number of devices: (records, hashes of the last checkpoint, checkpoints)."""

    @functools.cache
    def run(case: str, devices: int = 1):
        place = workplace(devices)
        place.write()
        ((code, _, err),) = finish(place, case)
        assert code == 0, err
        return place.numbers(), place.digest(CASES[case][2]), place.checkpoints()

    return run


@pytest.mark.soak
def test_a_run_that_went_back_ends_like_a_clean_one(whole, uninterrupted):
    found, _, checkpoints = whole("rewind")
    steps = [(r.get("attempt", 0), r["step"]) for r in found if "train/objective" in r]
    assert steps == [*((0, n) for n in range(1, 13)), *((1, n) for n in range(6, 25))]
    names = ["step-10", "step-10-attempt-1", "step-15-attempt-1", "step-20-attempt-1", "step-24-attempt-1", "step-5"]
    assert checkpoints == names
    clean = [r["eval/loss"] for r in uninterrupted.place.numbers() if "eval/loss" in r]
    assert [r["eval/loss"] for r in found if "eval/loss" in r][-1] == pytest.approx(clean[-1], rel=0.01)


PLACES = {
    "rewind": ("in the streak", "before going back", "before the save", "during the save", "after going back"),
    "until": ("after the best", "before the last save", "during the last save"),
}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("case", "devices"),
    [
        ("rewind", 1),
        ("until", 1),
        ("rewind", 8),
        ("until", 8),
    ],
)
def test_a_run_killed_around_each_decision_ends_the_same(workplace, whole, case, devices):
    """One run that is killed at each place in turn; on one device, where something is decided and where it is saved."""
    work = workplace(devices)
    work.write()
    for place in PLACES[case] if devices > 1 else PLACES[case][1::2]:
        ((code, _, _),) = finish(work, case, JAXLM_TEST_DIES_AT=place)
        assert code == -signal.SIGKILL, place
    ((code, _, err),) = finish(work, case)
    assert code == 0, err
    assert (work.numbers(), work.digest(CASES[case][2]), work.checkpoints()) == whole(case, devices)


@pytest.mark.soak
@pytest.mark.parametrize("case", ["rewind", "until"])
def test_two_processes_agree(workplace, whole, case):
    place = workplace()
    place.write()
    ends = finish(place, case, processes=2)
    assert [code for code, _, _ in ends] == [0, 0], ends
    found, expected = place.numbers(), whole(case)[0]
    assert [(r["step"], r.get("attempt")) for r in found] == [(r["step"], r.get("attempt")) for r in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("train/loss", "eval/loss"):
            assert ours.get(name) == (pytest.approx(theirs[name], rel=1e-5) if theirs.get(name) is not None else None)
    assert place.checkpoints() == whole(case)[2]


@pytest.mark.slow
@pytest.mark.soak
def test_too_many_rewinds_end_the_command_with_a_message(workplace):
    place = workplace(2)
    place.write()
    keys = ("--config_path", "run.yaml", "--optimizer.skip_bad_steps", "{rewind_after: 3, max_rewinds: 1}")
    ends = place.run_all(2, *keys, module=MODULE, JAXLM_TEST_POISON="144:100000")
    assert [end.code for end in ends] == [1, 1], ends
    assert (
        "error: the updates of steps 6 to 8 were skipped, but the run may not go back again: it has done so 1 of"
        in ends[0].err
    )
    assert "Traceback" not in ends[0].err + ends[1].err
