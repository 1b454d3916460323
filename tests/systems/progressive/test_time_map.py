"""The time steps of stacks."""

import math

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.systems.progressive.patterns import time_steps

KEY = "mapping"


def test_times_of_stacks():
    assert time_steps("linear", 8, 8, KEY) == tuple(range(8))
    assert time_steps("linear", 3, 101, KEY) == (0, 50, 100)
    assert time_steps("linear", 1, 8, KEY) == (7,)
    expected = tuple(round((math.exp(3 * k / 4) - 1) / (math.exp(3) - 1) * 999) for k in range(5))
    assert time_steps("exponential", 5, 1000, KEY) == expected
    assert time_steps([0, 3, 7], 3, 8, KEY) == (0, 3, 7)


def test_steps_of_many_stacks_are_distinct_where_those_of_the_source_are_not():
    for mapping in ("linear", "exponential"):
        steps = time_steps(mapping, 12, 1200, KEY)
        assert (len(set(steps)), steps[0], steps[-1]) == (12, 0, 1199)
        with pytest.raises(ConfigError, match=r"12 stacks have the time steps .* Give more time steps"):
            time_steps(mapping, 12, 8, KEY)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ([0, 1], "2 time steps given for 3 stacks"),
        ([0, 1, 8], "only steps 0 to 7"),
        ([0, 2, 2], r"but these must rise\. Write rising steps$"),
    ],
)
def test_times_that_do_not_rise_are_refused(mapping, message):
    with pytest.raises(ConfigError, match=rf"^mapping: .*{message}"):
        time_steps(mapping, 3, 8, KEY)
