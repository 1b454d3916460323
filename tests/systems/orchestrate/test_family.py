"""SWATS and portfolios as the tests of all optimizers see them: steps against numpy, and fields."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.optim.test_family import (
    CHANGES,
    Arrays,
    adam_direction,
    check_field,
    check_steps,
    clipped,
    fields,
    own,
)

KINDS = own("jaxlm.systems.orchestrate.")
CHANGES = CHANGES | {"strategies": "caramba", "initial": "aggressive_adamw", "nowcast": {"nowcast": {"window": 5}}}


def swats_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    if "rate" in memory:
        memory.update({k: c.beta1 * memory.get(("v", k), 0.0) + g for k, g in gradient.items()})
        memory.update({("v", k): memory[k] for k in gradient})
        return {k: (1 - c.beta1) * memory["rate"] * memory[k] for k in gradient}
    # The paper adds epsilon before the bias correction.
    paper = dataclasses.replace(c, epsilon=c.epsilon / np.sqrt(1 - c.beta2**t))
    out = adam_direction(gradient, memory, t, paper)
    gamma = sum((d * d).sum() for d in out.values()) / sum((out[k] * g).sum() for k, g in gradient.items())
    memory["mean"] = c.beta2 * memory.get("mean", 0.0) + (1 - c.beta2) * gamma
    rate = memory["mean"] / (1 - c.beta2**t)
    if t > max(1, c.min_steps) and abs(rate - gamma) < c.rtol * rate:
        memory["rate"] = rate
    return out


def portfolio_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    first = next(iter(c.table.values()))
    return adam_direction(clipped(gradient, first.max_grad_norm), memory, t, first)


DIRECTIONS = {"swats": swats_direction, "portfolio": portfolio_direction}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "swats": ("swats", {}),
    "swats, switched": ("swats", {"min_steps": 2, "rtol": 0.5, "epsilon": 1e-3, "beta1": 0.5, "max_grad_norm": 0.5}),
    "portfolio": ("portfolio", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_steps_match_the_published_algorithm(name):
    kind, keys = CASES[name]
    check_steps(kind, keys, DIRECTIONS[kind])


def test_every_optimizer_has_a_row():
    assert KINDS == set(DIRECTIONS) == {kind for kind, _ in CASES.values()}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), fields(KINDS))
def test_every_field_changes_the_result(kind, name):
    check_field(kind, name, CHANGES)
