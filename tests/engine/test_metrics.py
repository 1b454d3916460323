import io
import re
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.guards import UPDATE_NORM
from jaxlm.core.values.logged import StepInfo
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.engine.metrics import AsyncMetrics, Totals, Workload
from jaxlm.engine.step import StepReport
from jaxlm.observe.console import Console
from jaxlm.observe.hooks import ProgressListener
from jaxlm.session.run import totals_at
from tests.engine.helpers import TinyRun, arrays, batch, one_device


def test_rates_and_totals_of_a_step():
    work = Workload(BatchSchedule.of([BatchSize(0, 8)]), tokens=128, flops=3e12 / 8, peak_flops=2e13, num_steps=40)
    assert work.throughput(1, 0.5) == {
        "throughput/duration": 0.5,
        "throughput/examples_per_second": 16.0,
        "throughput/tokens_per_second": 2048.0,
        "throughput/gflops_per_second": 6000.0,
        "throughput/mfu": pytest.approx(0.3),
    }
    assert work.progress(10) == {
        "global_step": 10,
        "run_progress": 0.25,
        "throughput/total_tokens": 10240,
        "throughput/total_gflops": 30000.0,
    }


def test_totals_continue_after_a_restart_with_another_batch_size():
    first = Workload(BatchSchedule.of([BatchSize(0, 4)]), 128, 1e9 / 4, None, 40)
    records = [{"step": step, **first.progress(step)} for step in range(1, 21)]
    records += [{"step": 20, "eval/loss": 1.0}]
    before = totals_at(records, 20)
    assert before == Totals(20, 20 * 512, 20.0)
    then = Workload(BatchSchedule.of([BatchSize(0, 8)]), 128, 1e9 / 4, None, 40, before).progress(30)
    assert then["throughput/total_tokens"] == 20 * 512 + 10 * 1024
    assert then["throughput/total_gflops"] == 20 + 10 * 2
    assert totals_at(records, 0) == totals_at([], 20) == Totals()


def test_totals_add_up_phases_with_sequences_of_other_lengths():
    short = Workload(BatchSchedule.of([BatchSize(0, 16)]), 128, 1e9, None, 30)
    long = Workload(BatchSchedule.of([BatchSize(0, 4)]), 512, 5e9, None, 30, short.totals(10))
    assert long.progress(11)["throughput/total_tokens"] == 16 * 128 * 10 + 4 * 512
    assert long.totals(30) == Totals(30, 16 * 128 * 10 + 20 * 4 * 512, 160.0 + 20 * 4 * 5.0)


@pytest.mark.slow
def test_steps_fetched_together_share_their_time():
    """The last steps of a short run, whose reports arrive in a burst, must not show millions of tokens per second."""
    now = [100.0]

    def clock() -> float:
        now[0] += 1e-6  # within a burst, only a clock read separates two reports
        return now[0]

    seen: list[StepInfo] = []
    shown = io.StringIO()
    phase = TinyRun(one_device()).phase
    progress = ProgressListener(Console(shown), phase, lambda step: "", pytest.fail, skipped=0)
    workload = Workload(BatchSchedule.of([BatchSize(0, 16)]), 16, 1e6 / 16, None, phase.end)
    reports = AsyncMetrics("train", workload, [seen.append, progress], clock=clock)
    values = {
        "train/objective": 1.0,
        "grad/norm/total": 1.0,
        "train/skipped_steps": 0.0,
        "optim/learning_rate": 1.0,
        UPDATE_NORM: 1.0,
    }
    metrics = {name: jnp.float32(value) for name, value in values.items()}
    for step in range(phase.end - 2, phase.end + 1):
        now[0] += 2.0
        reports.push(step, StepReport(metrics, {}, jnp.zeros(2, jnp.int32)), 0.0)
    reports.drain()
    assert [info.metrics["throughput/duration"] for info in seen] == pytest.approx([2.0] * 3, rel=1e-5)
    assert sum(info.metrics["throughput/duration"] for info in seen) <= now[0] - 100
    rates = re.findall(r"([\d,]+) tokens/s", shown.getvalue())
    assert rates[-1] == "128"
    assert rates == ["128"] * len(rates)


@pytest.mark.slow
def test_time_between_steps_is_logged_with_the_next_step_but_not_in_its_duration():
    seen: list[StepInfo] = []
    reports = AsyncMetrics(
        "train", Workload(BatchSchedule.of([BatchSize(0, 16)]), 16, 1e6 / 16, None, 20), [seen.append]
    )
    where = one_device()
    run = TinyRun(where)
    with where.use():
        for step in (1, 2, 3):
            run.state, report = run._step(run.state, {}, batch(arrays(step), where), run._blank)
            assert isinstance(report, StepReport)
            reports.push(step, report, 0.0)
            if step == 2:
                reports.drain()
                time.sleep(0.5)
                began = time.perf_counter()
                reports.skip_time()
        reports.drain()
        elapsed = time.perf_counter() - began
    assert [info.step for info in seen] == [1, 2, 3]
    assert [info.metrics["throughput/hook_time"] > 0.49 for info in seen] == [False, False, True]
    assert seen[2].metrics["throughput/duration"] <= elapsed
    assert [info.metrics["throughput/hook_time"] for info in seen[:2]] == [0.0, 0.0]
    assert np.isfinite([value for info in seen for value in info.metrics.values()]).all()
