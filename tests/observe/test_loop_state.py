"""The smoothed loss, the training time and the best bits per byte of a run, through resumes and going back."""

import math
from typing import Any

import numpy as np
import pytest

from jaxlm.core.values.logged import StepInfo
from jaxlm.observe.loop_state import LoopState

LOSSES = np.random.default_rng(0).uniform(2.0, 9.0, 40).tolist()
LOSSES[7] = math.nan
BITS = {10: 1.5, 20: 1.2, 30: 1.3, 40: math.nan}


def info(step):
    metrics = {"train/loss": LOSSES[step - 1], "throughput/duration": 0.25 + step / 100}
    return StepInfo(step, "train", metrics)


def run(state: LoopState, first: int, last: int) -> list[dict[str, Any]]:
    """The records of these steps, as a metrics file has them: not finite is null."""
    records = []
    for step in range(first, last + 1):
        state(info(step))
        records.append({"step": step, **info(step).metrics, **state.metrics()})
        if step in BITS:
            measured = {"eval/bpb": BITS[step]}
            records.append({"step": step, **measured, **state.evaluated(step, measured)})
    return [{k: v if math.isfinite(v) else None for k, v in record.items()} for record in records]


def test_the_smoothed_loss_has_no_bias_towards_zero():
    """Weights 0.9 ** age over all finite losses, divided by their sum."""
    records = [record for record in run(LoopState(), 1, 40) if "train/loss" in record]
    for number, record in enumerate(records, 1):
        finite = np.array([loss for loss in LOSSES[:number] if math.isfinite(loss)])
        weights = 0.9 ** np.arange(len(finite))[::-1]
        assert record["train/smoothed_loss"] == pytest.approx((weights * finite).sum() / weights.sum(), rel=1e-12)
        assert record["throughput/training_time"] == pytest.approx(sum(0.25 + s / 100 for s in range(1, number + 1)))
    assert LoopState().metrics() == {"throughput/training_time": 0.0}


def test_a_run_that_resumes_continues_bit_for_bit():
    whole = run(LoopState(), 1, 40)
    for stop in (1, 8, 20, 25):
        before = [record for record in whole if record["step"] <= stop]
        for records in (before, whole):  # later ones are of steps that the run went back over
            assert before + run(LoopState(records, stop), stop + 1, 40) == whole


def test_a_run_that_goes_back_forgets_what_came_after():
    whole, state = run(LoopState(), 1, 40), LoopState()
    run(state, 1, 35)
    state.evaluated(35, {"eval/bpb": 0.1})
    state.go_back(15)
    assert run(state, 16, 40) == [record for record in whole if record["step"] > 15]


def test_the_best_bits_per_byte_are_the_lowest_finite_ones():
    best = [record["eval/best_bpb"] for record in run(LoopState(), 1, 40) if "eval/bpb" in record]
    assert best == [1.5, 1.2, 1.2, 1.2]
    assert LoopState().evaluated(1, {"eval/loss": 1.0}) == {}
    assert LoopState().evaluated(1, {"eval/bpb": math.nan}) == {}
