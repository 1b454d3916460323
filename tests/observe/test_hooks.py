import io
import math
from types import SimpleNamespace

import pytest

from jaxlm.core.guards import UPDATE_NORM, StepGuard
from jaxlm.core.values.logged import Sample, StepInfo
from jaxlm.engine.metrics import CrashListener, NonFiniteError
from jaxlm.evals.base import Eval
from jaxlm.observe.console import Console
from jaxlm.observe.hooks import EvalHook, Generated, ProgressListener, ScheduledEval
from tests.engine.helpers import phase


def info(objective: float = 1.0, norm: float = 1.0, **more) -> StepInfo:
    return StepInfo(7, "train", {"train/objective": objective, "grad/norm/total": norm, UPDATE_NORM: 1.0}, **more)


@pytest.mark.parametrize(("value", "key"), [(math.nan, "on_nan"), (math.inf, "on_inf"), (-math.inf, "on_inf")])
def test_crash_on_nan_and_crash_on_inf_stop_at_their_own_values(value, key):
    off, on = {"on_nan": False, "on_inf": False}, {"on_nan": key == "on_nan", "on_inf": key == "on_inf"}
    other = {"on_nan": key != "on_nan", "on_inf": key != "on_inf"}
    for spoilt in (info(objective=value), info(norm=value)):
        CrashListener(**off)(spoilt)
        CrashListener(**other)(spoilt)
        with pytest.raises(NonFiniteError, match=f"step 7.*crash_{key}"):
            CrashListener(**on)(spoilt)
    CrashListener(on_nan=True, on_inf=True)(info())


class Curfew(StepGuard):
    """A guard of its own kind, with metrics of its own."""

    name = "curfew"

    def init_slot(self):
        return ()

    def judge(self, slot, stats):
        raise NotImplementedError  # the listener needs only the reason

    def reason(self, metrics):
        return f"hour {metrics['curfew/hour']:g} is too late"


def test_a_guard_of_its_own_kind_says_why_it_skipped_a_step():
    shown = io.StringIO()
    report = lambda step, text, *_, **fields: shown.write(text)  # noqa: E731
    listener = ProgressListener(Console(shown), phase(), lambda step: "", report, skipped=0, guards=(Curfew(),))
    metrics = {"optim/learning_rate": 1.0, "throughput/duration": 1.0, "throughput/tokens_per_second": 5.0}
    metrics |= {"throughput/hook_time": 0.0, "train/skipped_steps": 1.0, "curfew/hour": 23.0, UPDATE_NORM: 1.0}
    listener(StepInfo(1, "train", info().metrics | metrics))
    assert "step 1: hour 23 is too late; update skipped (1 skipped so far)" in shown.getvalue()


def test_only_skipped_steps_look_up_their_records():
    asked: list[int] = []

    def records(step: int) -> str:
        asked.append(step)
        return f"sequences of batch {step}"

    shown = io.StringIO()
    report = lambda step, text, *_, **fields: shown.write(text)  # noqa: E731
    listener = ProgressListener(Console(shown), phase(), records, report, skipped=3)
    usual = {"optim/learning_rate": 1.0, "throughput/duration": 1.0, "throughput/tokens_per_second": 5.0}
    usual |= {
        "train/objective": 1.0,
        "grad/norm/total": 1.0,
        "throughput/hook_time": 0.0,
        "train/skipped_steps": 3.0,
        UPDATE_NORM: 1.0,
    }
    for step in (1, 2):
        listener(StepInfo(step, "train", usual))
    assert not asked
    listener(StepInfo(3, "train", {**usual, "train/objective": math.nan, "train/skipped_steps": 4.0}))
    assert asked == [2]
    assert (
        "step 3: loss is not finite; update skipped (4 skipped so far). Batch: sequences of batch 2"
        " (to print it, run jaxlm prepare with this configuration and --show_batch 2)"
    ) in shown.getvalue()


def test_speed_and_mfu_are_averages_of_the_same_steps():
    """Reports may arrive in groups, so that a step seems to take almost no time."""
    shown = io.StringIO()
    listener = ProgressListener(Console(shown), phase(), lambda step: "", pytest.fail, skipped=0)
    for step, seconds in enumerate((60.0, 1.9, 0.1), phase().end - 2):  # the first one compiles
        speed = {"throughput/duration": seconds, "throughput/tokens_per_second": 100 / seconds}
        others = {"throughput/hook_time": 0.0, "optim/learning_rate": 1.0, "train/skipped_steps": 0.0}
        speed["throughput/mfu"] = 0.3 / seconds
        listener(StepInfo(step, "train", info().metrics | speed | others))
    assert "100 tokens/s  MFU 30.0%" in shown.getvalue().splitlines()[-1]


def test_samples_of_the_weights_and_of_each_average_go_to_the_trackers():
    generated = Generated()

    class Writes(Eval):
        def run(self, model):
            generated.add_sample("Once", f" of {model}")
            return {}

    class Keeps:
        def __init__(self):
            self.samples = []

        def log_samples(self, step, samples):
            self.samples.append((step, samples))

    tracker, any_phase = Keeps(), SimpleNamespace(end=4, averaged=lambda state: {"ema": "average"})
    hook = EvalHook([ScheduledEval(Writes())], 2, any_phase, [tracker], Console(io.StringIO()), generated)
    for step in (2, 4):
        hook.run(step, SimpleNamespace(model="weights"))
    both = [Sample("eval", "Once", " of weights"), Sample("eval/ema", "Once", " of average")]
    assert tracker.samples == [(2, both), (4, both)]
