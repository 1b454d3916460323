from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import ConfigError
from jaxlm.reading.decode import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15m", 900),
        ("15min", 900),
        ("1h30m", 5400),
        ("1:30:00", 5400),
        ("600s", 600),
        ("5 minutes", 300),
        ("0s", 0),
        (600, 600),
        ("600", 600),
        (0.5, 0.5),
        ("1d 2h", 93600),
    ],
)
def test_duration_formats(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("value", ["soon", "", "15 parsecs", "m15", "15m!", None, True, [1]])
def test_values_that_are_not_durations_are_refused(value):
    with pytest.raises(ConfigError, match="duration"):
        parse_duration(value)


@settings(max_examples=40)
@given(st.integers(0, 10**12))
def test_round_trip(microseconds):
    duration = timedelta(microseconds=microseconds)
    assert parse_duration(format_duration(duration)) == duration


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, "99999999999999d"])
def test_durations_outside_the_valid_range_are_refused(value):
    with pytest.raises(ConfigError, match="is not a finite duration, or is too long"):
        parse_duration(value)
