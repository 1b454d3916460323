"""Batch sizes that grow during a run, on a mixture: killed in a stage of both, it ends like an uninterrupted run."""

import pytest

from jaxlm.core.errors import counted
from tests.end_to_end.test_mixture import write

SIZES = "[{start: 0, value: 8}, {start: 7, value: 16}, {start: 12, value: 24}]"
RUN = ("--config_path", "run.yaml", "--trainer.train_batch_size", SIZES, "--trainer.per_device_parallelism", "8")


@pytest.mark.soak
def test_a_run_killed_at_a_step_with_larger_batches_ends_the_same(workplace):
    whole, killed = workplace(), workplace()
    for place in (whole, killed):
        write(place)
    result = whole.finish(*RUN)
    for size, micro in ((8, 1), (16, 2), (24, 3)):
        assert f"compiling the step of phase 'train' for batches of {size} ..." in result.out
        assert f"{size} x 32 = {size * 32:,} tokens per step, {counted(micro, 'microbatch')} of 8" in result.out
    killed.die(*RUN, at="first phase")
    killed.finish(*RUN)
    assert killed.losses() == whole.losses()
    assert killed.digest("step-24") == whole.digest("step-24")
    records = killed.records()
    totals = {r["step"]: r["throughput/total_tokens"] for r in records if "train/loss" in r}
    assert totals[24] == 32 * (7 * 8 + 5 * 16 + 12 * 24)
    rates = {r["step"]: r["optim/learning_rate"] for r in records if "train/loss" in r}
    assert rates[1] == 0  # the schedule counts steps of any batch size
    assert rates[3] == pytest.approx(1e-2)
