"""`infra/attempts.py`: what exit codes mean, and when an attempt is repeated."""

import re
from pathlib import Path

import attempts
import pytest

ROOT = Path(__file__).parents[2]


def test_every_documented_exit_code_has_an_outcome():
    rows = re.findall(r"^\| (\d+) \| (.*?) \|.*\|$", (ROOT / "docs/reference/exit-codes.md").read_text(), re.MULTILINE)
    outcomes = {int(code): attempts.outcome_of(int(code)) for code, _ in rows}
    assert outcomes.pop(75, "retry") == "retry"
    assert outcomes == {0: "done", 1: "stop", 2: "stop", 130: "stop", 141: "stop", 143: "retry"}
    assert "SIGTERM" in dict(rows)["143"]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(-9, "retry"), (137, "retry"), (134, "retry"), (255, "retry"), (-2, "stop"), (75, "retry"), (127, "stop")],
)
def test_a_process_that_was_killed_is_tried_again(code, outcome):
    assert attempts.outcome_of(code) == outcome


OF_RUNS = [
    ([0, 0], "done"),
    ([143, 143], "retry"),
    ([1, 1], "stop"),
    ([1, -9], "retry"),  # the 1 is of the process that was left alone
    ([1, 255, 1], "retry"),
    ([2, -9], "stop"),
    ([0, 143], "retry"),
    ([130, 255], "stop"),
    ([1, 75], "retry"),
    ([75, 2], "stop"),
    ([127, -9], "stop"),  # python is not there
]


@pytest.mark.parametrize(("codes", "outcome"), OF_RUNS)
def test_outcome_of_several_processes(codes, outcome):
    assert attempts.outcome_of_run(codes) == outcome


def test_waits_double_up_to_a_limit_and_begin_again_after_a_healthy_attempt(monkeypatch):
    waited = []
    monkeypatch.setattr(attempts.time, "sleep", waited.append)
    backoff = attempts.Backoff(3, first_s=10, longest_s=30, healthy_s=100)
    assert [backoff.wait(5), backoff.wait(), backoff.wait(), backoff.wait()] == [True, True, True, False]
    assert waited == [10, 20, 30]
    assert backoff.wait(101)
    assert waited[-1] == 10
