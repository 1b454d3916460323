"""The time steps of stacks."""

import math

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.time_map import num_time_steps, time_steps


def test_times_of_stacks():
    assert time_steps("linear", 8, 8) == tuple(range(8))
    assert time_steps("linear", 3, 101) == (0, 50, 100)
    assert time_steps("linear", 1, 8) == (7,)
    exponential = time_steps("exponential", 5, 1000, growth=2.0)
    assert exponential == tuple(round((math.exp(k / 2) - 1) / (math.exp(2) - 1) * 999) for k in range(5))
    assert time_steps([0, 3, 7], 3, 8) == (0, 3, 7)
    assert time_steps(lambda stack, stacks, steps: stack * steps // stacks, 4, 100) == (0, 25, 50, 75)


def test_derived_steps_are_distinct_where_those_of_the_source_are_not():
    assert num_time_steps(12, 100) == 1200
    assert num_time_steps(12, 100, 8) == 8
    for mapping in ("linear", "exponential"):
        steps = time_steps(mapping, 12, 1200)
        assert (len(set(steps)), steps[0], steps[-1]) == (12, 0, 1199)
        with pytest.raises(ConfigError, match=r"12 stacks have the time steps .* of 8, counted from the output side"):
            time_steps(mapping, 12, 8)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ([0, 1], "2 time steps given for 3 stacks"),
        ([0, 1, 8], "only steps 0 to 7"),
        ([0, 2, 2], "but these must increase"),
        (lambda stack, stacks, steps: min(stack * 50, steps - 1), "but these must increase"),
    ],
)
def test_times_that_do_not_increase_are_refused(mapping, message):
    with pytest.raises(ConfigError, match=message):
        time_steps(mapping, 3, 8)
