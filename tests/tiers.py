"""Which rows of a parametrized test CI runs."""

from collections.abc import Iterable
from typing import Any

import pytest

PARAM = type(pytest.param())


def one_of(rows: Iterable[Any], *, but: int = 1) -> list[Any]:
    """Leaves all rows but the first to the soak tests. Args: but: number of rows that are not left to them."""
    rows = list(rows)
    return [*rows[:but], *map(_in_soak, rows[but:])]


def _in_soak(row: Any) -> Any:
    if isinstance(row, PARAM):
        return pytest.param(*row.values, marks=[*row.marks, pytest.mark.soak], id=row.id)
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.soak)
