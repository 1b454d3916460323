import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import ConfigError
from jaxlm.core.schedules import Shape, make_schedule
from jaxlm.optim.adam import AdamConfig

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "lr_schedules.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_known_values(case):
    schedule = AdamConfig(**case["optimizer"]).schedule(case["num_train_steps"])
    steps, expected = zip(*case["values"], strict=True)
    peak = case["optimizer"]["learning_rate"]
    np.testing.assert_allclose([schedule(s) for s in steps], expected, rtol=1e-5, atol=1e-6 * peak)
    traced = jax.jit(jax.vmap(schedule))(np.array(steps))
    np.testing.assert_allclose(traced, expected, rtol=1e-5, atol=1e-6 * peak)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "inv_sqrt", "inv"]),
    warmup=st.one_of(st.floats(0, 1), st.integers(2, 300)),
    decay=st.one_of(st.none(), st.floats(0, 1), st.integers(2, 300)),
    ratio=st.floats(0.01, 1),
    num_steps=st.integers(1, 200),
)
def test_stays_between_zero_and_peak_and_never_jumps_up(kind, warmup, decay, ratio, num_steps):
    schedule = make_schedule(Shape(2.0, warmup, decay, kind, ratio), num_steps)
    values = np.asarray(jax.vmap(schedule)(np.arange(num_steps + 1)))
    assert np.all((values >= 0) & (values <= 2.0 + 1e-5))
    top = int(np.argmax(values))
    assert np.all(np.diff(values[: top + 1]) >= -1e-6)
    assert np.all(np.diff(values[top:]) <= 1e-6)


def test_decay_ends_where_the_ratio_says():
    for kind in ("linear", "cosine", "inv"):
        assert float(make_schedule(Shape(1.0, 10, None, kind, 0.25), 100)(100)) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"warmup": -0.1}, "warmup"),
        ({"decay": 1.5}, "decay"),
        ({"kind": "cosin"}, "lr_schedule"),
        ({"kind": "inv", "min_ratio": 0.0}, "min_lr_ratio"),
        ({"min_ratio": 2.0}, "min_lr_ratio"),
    ],
)
def test_what_makes_no_schedule_is_refused(changes, named):
    shape = Shape(**{"peak": 1.0, "warmup": 0.1, "decay": None, "kind": "cosine", "min_ratio": 0.1} | changes)
    with pytest.raises(ConfigError, match=named):
        make_schedule(shape, 100)


def test_corner_points_lie_on_the_schedule():
    schedule = make_schedule(Shape(1.0, 10, 20, "linear", 0.0), 100)
    assert [(step, name) for step, _, name in schedule.corner_points()] == [
        (0, "warmup from"),
        (10, "stable from"),
        (80, "decay from"),
        (100, "end"),
    ]
    assert all(math.isclose(value, float(schedule(step))) for step, value, _ in schedule.corner_points())
