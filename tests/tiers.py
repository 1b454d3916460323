"""Which rows of a parametrized test CI runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_of(rows: Iterable[Any], *, but: int = 1) -> list[Any]:
    """Leaves all rows but the first to the soak tests. Args: but: number of rows that are not left to them."""
    rows = list(rows)
    rest = [row if isinstance(row, tuple) else (row,) for row in rows[but:]]
    return [*rows[:but], *(pytest.param(*row, marks=pytest.mark.soak) for row in rest)]
