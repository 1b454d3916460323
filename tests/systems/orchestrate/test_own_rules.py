"""Optimizers that change their rule while training, beside parameters that have a rule of their own."""

import pytest

from tests.optim.test_family import config_of
from tests.optim.test_own_rules import check_beside


@pytest.mark.parametrize("kind", ["portfolio", "swats"])
def test_it_does_not_see_them(kind):
    check_beside(config_of(kind))
