"""Ranges of numbers, and how messages describe them."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import (
    SMALLEST_FLOAT,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
    check_fields,
)
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource


@dataclass(frozen=True)
class Numbers:
    positive: PositiveFloat = 1.0
    share: PositiveFraction = 1.0
    proper: ProperFraction = 0.5
    other: NonNegativeFloat = 0.0
    count: PositiveInt = 1


@dataclass(frozen=True)
class Outer:
    inner: Numbers = Numbers()


def test_a_positive_number_is_one_that_programs_can_divide_by():
    for name in ("positive", "share", "proper"):
        least = Numbers(**{name: SMALLEST_FLOAT})
        check_fields(least)
        assert decode(Numbers, ConfigSource({name: SMALLEST_FLOAT})) == least
        with np.errstate(all="raise"):
            assert np.isfinite(np.float32(1) / np.float32(SMALLEST_FLOAT))
        for tiny in (1e-46, 1e-40):
            message = rf"{name}: {tiny} given, a finite number of 1\.2e-38 or more( and .*)? expected"
            with pytest.raises(ConfigError, match=message):
                check_fields(Numbers(**{name: tiny}))
            with pytest.raises(ConfigError, match=message):
                decode(Numbers, ConfigSource({name: tiny}))
    check_fields(Numbers(positive=1.2e-38, other=1e-46))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"positive": 0.0}, "positive: 0.0 given, a finite number above 0 expected"),
        ({"share": -1.0}, "share: -1.0 given, a finite number above 0 and at most 1 expected"),
        ({"proper": 1.0}, "proper: 1.0 given, a finite number above 0 and below 1 expected"),
        ({"other": -1.0}, "other: -1.0 given, a finite number of 0 or more expected"),
        ({"count": 0}, "count: 0 given, an integer of 1 or more expected"),
        ({"count": 2**40}, "count: 1099511627776 given, an integer of 1 or more and at most 2147483647 expected"),
        ({"count": math.nan}, "count: nan given, an integer of 1 or more expected"),
        ({"positive": 1e39}, "positive: 1e+39 given, a finite number above 0 and at most 3.4e+38 expected"),
        ({"positive": 10**400}, "a finite number above 0 and at most 3.4e+38 expected"),
        ({"positive": math.inf}, "positive: inf given, a finite number above 0 expected"),
        ({"positive": math.nan}, "positive: nan given, a finite number above 0 expected"),
        ({"other": 1e39}, "other: 1e+39 given, a finite number of 0 or more and at most 3.4e+38 expected"),
        ({"other": -1e39}, "other: -1e+39 given, a finite number of 0 or more expected"),
        ({"count": [4, 4]}, "count: [4, 4] given, an integer of 1 or more expected"),
        ({"share": {}}, "share: {} given, a finite number above 0 and at most 1 expected"),
        ({"count": Numbers()}, "given, an integer of 1 or more expected"),
    ],
)
def test_messages_name_the_limits(given, message):
    with pytest.raises(ConfigError) as caught:
        check_fields(Numbers(**given))
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize("value", [[1], {"count": 1}, 1])
def test_a_section_is_neither_a_list_nor_a_mapping(value):
    with pytest.raises(ConfigError, match=r"inner: .* given, "):
        check_fields(Outer(value))
