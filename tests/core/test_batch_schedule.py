"""Batch-size schedules, compared with a loop over all steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.data.batch_schedule import BatchSchedule, BatchSize


@st.composite
def schedules(draw) -> tuple[BatchSchedule, list[int]]:
    """A schedule, and the size of each of its first steps."""
    starts = sorted(draw(st.sets(st.integers(1, 30), max_size=4)) | {0})
    sizes = [BatchSize(start, draw(st.integers(1, 9))) for start in starts]
    return BatchSchedule.of(sizes), [[s.value for s in sizes if s.start <= step][-1] for step in range(60)]


@settings(max_examples=40)
@given(schedules(), st.integers(0, 40), st.integers(0, 200))
def test_counts_match_a_loop_over_all_steps(made, step, examples):
    schedule, sizes = made
    assert schedule.at(step).size == sizes[step]
    assert schedule.examples_before(step) == sum(sizes[:step])
    whole = next((n for n in range(60) if sum(sizes[: n + 1]) > examples), None)
    if whole is not None:
        assert schedule.whole_steps(examples) == whole
        assert schedule.steps_for(examples) == whole + (sum(sizes[:whole]) < examples)
    later = schedule.starting_at(step)
    assert [later.at(n).size for n in range(20)] == sizes[step : step + 20]
    assert later.examples_before(13) == sum(sizes[step : step + 13])


def test_a_distant_step_is_counted_without_a_loop():
    """Levanter's `value_at_step` returns the first stage for every step."""
    schedule = BatchSchedule.of([BatchSize(0, 32), BatchSize(1000, 64)])
    assert [schedule.at(step).size for step in (0, 999, 1000, 10**15)] == [32, 32, 64, 64]
    assert schedule.examples_before(10**15) == 32_000 + (10**15 - 1000) * 64


@pytest.mark.parametrize(("step", "end", "sizes"), [(0, 20, [4, 8]), (3, 10, [4]), (10, 99, [8, 2]), (60, 99, [2])])
def test_stages_of_a_range_of_steps(step, end, sizes):
    schedule = BatchSchedule.of([BatchSize(0, 4), BatchSize(10, 8), BatchSize(50, 2)])
    assert [stage.size for stage in schedule.between(step, end)] == sizes
