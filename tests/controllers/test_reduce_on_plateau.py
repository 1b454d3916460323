"""When the learning rate is reduced, compared with torch's ReduceLROnPlateau."""

import json
import math
from typing import Any

import numpy as np
import pytest

from jaxlm.controllers.base import DoneStep, PhaseFacts, SetControls
from jaxlm.controllers.reduce_on_plateau import ReduceOnPlateauConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields

KEYS = [
    {"mode": mode, "threshold_mode": threshold_mode, **others}
    for mode in ("min", "max")
    for threshold_mode in ("rel", "abs")
    for others in (
        {"patience": 0, "factor": 0.5, "threshold": 0.0},
        {"patience": 2, "factor": 0.1, "threshold": 0.05, "cooldown": 3},
        {"patience": 3, "factor": 0.3, "threshold": 0.2, "cooldown": 1, "min_lr": 2e-3},
        {"patience": 1, "factor": 0.9, "threshold": 1e-4, "eps": 3e-3},
        {"patience": 1, "factor": 0.0, "threshold": 1e-4},
    )
]


def sequence(seed: int) -> list[float]:
    """Values that fall, stay and jump, with ties, NaN and infinities."""
    rng = np.random.default_rng(seed)
    values = np.round(3.0 * np.exp(-np.arange(60) / rng.uniform(5, 60)) + rng.normal(0, rng.uniform(0, 0.3), 60), 2)
    values -= rng.choice([0.0, 2.0])  # also negative ones, for which a relative threshold is another thing
    if seed % 3 == 0:
        values[rng.random(60) < 0.1] = np.nan
    if seed % 5 == 0:
        values[rng.random(60) < 0.05] = rng.choice([np.inf, -np.inf])
    return [float(value) for value in values]


def rates(keys: dict[str, Any], learning_rate: float, values: list[float]) -> list[float]:
    """The learning rate after each value. The state goes through JSON each time, as after a restart."""
    controller = ReduceOnPlateauConfig(**keys).build(PhaseFacts(learning_rate))
    state, scale, found = controller.init(), controller.controls()["lr_scale"], []
    for number, value in enumerate(values, 1):
        step = DoneStep(number, False, False, 0.5, number + 4)
        state, decision = controller.after(step, {"eval/loss": value}, json.loads(json.dumps(state)))
        if isinstance(decision, SetControls):
            scale = decision.values["lr_scale"]
        found.append(learning_rate * scale)
    return found


@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_the_learning_rates_are_those_of_torch(keys):
    torch = pytest.importorskip("torch")
    reductions = 0
    for seed in range(25):
        learning_rate, values = (1e-2, 1.0, 0.3)[seed % 3], sequence(seed)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=learning_rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **keys)
        expected = []
        for value in values:
            scheduler.step(value)
            expected.append(optimizer.param_groups[0]["lr"])
        found = rates(keys, learning_rate, values)
        assert found == pytest.approx(expected, rel=1e-12, abs=0), (seed, values)
        reductions += int(np.count_nonzero(np.diff(expected)))
    assert reductions > 10


def test_the_defaults_are_those_of_torch():
    torch = pytest.importorskip("torch")
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    ours = ReduceOnPlateauConfig()
    names = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "eps")
    assert {name: getattr(ours, name) for name in names} == {name: getattr(scheduler, name) for name in names}
    assert scheduler.min_lrs == [ours.min_lr]


def test_a_learning_rate_of_zero_is_never_reduced():
    assert rates({"patience": 0, "min_lr": 0.1}, 0.0, [1.0, 2.0, math.nan]) == [0.0] * 3


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"factor": 1.0}, "factor: 1.0 given"),
        ({"patience": -1}, "patience: -1 given"),
        ({"threshold": math.nan}, "threshold: nan given"),
        ({"cooldown": -1}, "cooldown: -1 given"),
        ({"min_lr": -0.1}, "min_lr: -0.1 given"),
        ({"eps": -1e-8}, "eps: -1e-08 given"),
    ],
)
def test_impossible_keys_are_refused(keys, named):
    with pytest.raises(ConfigError, match=named):
        check_fields(ReduceOnPlateauConfig(**keys), "trainer.controllers.0")
