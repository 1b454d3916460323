"""SWATS against the paper's algorithm in float64, its switch, and eight devices."""

from dataclasses import replace
from typing import Any

import numpy as np
import optax
import pytest

from jaxlm.systems.orchestrate.swats import SwatsConfig, SwatsState
from tests.engine.helpers import layout
from tests.optim.helpers import AXES, WITHIN, Arrays, Updates, as_model, flat, numbers

PLAIN: Any = {"lr_schedule": "constant", "warmup": 0, "max_grad_norm": None}
NOISY = SwatsConfig(**PLAIN, learning_rate=1e-2, min_steps=5, rtol=0.05)


def by_hand(config: SwatsConfig, gradients: list[Arrays]) -> tuple[list[Arrays], dict[str, Any]]:
    """The parameters after each step, and the steps at which each tensor has switched, in float64."""
    params = {path: array.astype(np.float64) for path, array in numbers(0).items()}
    m, a, v = ({path: np.zeros_like(array) for path, array in params.items()} for _ in range(3))
    average, rate, at = (dict.fromkeys(params, 0.0) for _ in range(3))
    trace = []
    peak, b1, b2 = config.learning_rate, config.beta1, config.beta2
    schedule = config.schedule(len(gradients))
    for k, gradient in enumerate(gradients, start=1):
        g = {path: array.astype(np.float64) for path, array in gradient.items()}
        p, pp, pg = {}, {}, {}
        for path in g:
            m[path] = b1 * m[path] + (1 - b1) * g[path]
            a[path] = b2 * a[path] + (1 - b2) * g[path] ** 2
            size = peak * np.sqrt(1 - b2**k) / (1 - b1**k)
            p[path] = -size * m[path] / (np.sqrt(a[path]) + config.epsilon)
            pp[path], pg[path] = (
                (p[path] * other).sum(axis=WITHIN[path], keepdims=True) for other in (p[path], g[path])
            )
        if config.scope == "global":
            pp, pg = (dict.fromkeys(of, sum(x.sum() for x in of.values())) for of in (pp, pg))
        shape = float(schedule(k - 1)) / peak
        for path in g:
            is_sgd = np.asarray(at[path]) > 0
            v[path] = np.where(is_sgd, b1 * v[path] + g[path], 0.0)
            decay = shape * peak * config.weight_decay * params[path] * (path != "norm.weight")
            step = np.where(is_sgd, -(1 - b1) * rate[path] * v[path], p[path])
            params[path] = params[path] + shape * step - decay
            gamma = pp[path] / -pg[path]
            average[path] = np.where(is_sgd, average[path], b2 * average[path] + (1 - b2) * gamma)
            mean = average[path] / (1 - b2**k)
            close = abs(mean - gamma) < np.maximum(config.switch_threshold, config.rtol * mean)
            switches = ~is_sgd & close & (mean > 0) & (k > max(1, config.min_steps))
            rate[path] = np.where(switches, mean, rate[path])
            at[path] = np.where(switches, k, at[path])
        trace.append({path: array.copy() for path, array in params.items()})
    return trace, at


def test_a_constant_gradient_switches_in_the_second_step():
    """gamma = lr / g = Lambda = 0.002 from the first step on, so that SGD's steps tend to Lambda g."""
    config = SwatsConfig(**PLAIN, epsilon=1e-8, min_steps=0, rtol=0.0)
    updates = Updates(config)
    half = {path: np.full_like(array, 0.5) for path, array in numbers(0).items()}
    trace = [flat(updates.model)]
    for k in range(1, 80):
        trace.append(updates.step(half))
        projection = updates.state_of(SwatsState).projection
        assert bool(projection.is_sgd) == (k >= 2)
        if k >= 2:
            assert abs(float(projection.rate) * config.learning_rate - 0.002) < 1e-8
    for path in AXES:
        np.testing.assert_allclose(trace[0][path] - trace[2][path], 2e-3, rtol=2e-4)
        np.testing.assert_allclose(trace[2][path] - trace[3][path], 1e-4, rtol=5e-3)  # (1 - beta1) Lambda g
        np.testing.assert_allclose(trace[-2][path] - trace[-1][path], 1e-3, rtol=2e-3)


CONFIGS = {
    "global": NOISY,
    "group": replace(NOISY, scope="group", rtol=0.02),
    "schedule and decay": replace(
        NOISY, lr_schedule="linear", min_lr_ratio=0.1, weight_decay=0.1, beta1=0.5, beta2=0.9, epsilon=1e-3
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["global", "group", "schedule and decay"])
def test_steps_match_the_algorithm_in_float64(name):
    """Through the switch, whose position both must agree on."""
    config = CONFIGS[name]
    gradients = [{path: g + 0.7 * numbers(0)[path] for path, g in numbers(t).items()} for t in range(1, 61)]
    updates = Updates(config, len(gradients))
    expected, at = by_hand(config, gradients)
    switched: dict[str, Any] = {}
    for k, (gradient, wanted) in enumerate(zip(gradients, expected, strict=True), start=1):
        found = updates.step(gradient)
        for path, array in found.items():
            np.testing.assert_allclose(array, wanted[path], atol=2e-6, err_msg=f"{path} after {k}")
        is_sgd = updates.state_of(SwatsState).projection.is_sgd
        for path, flags in ({"": np.asarray(is_sgd)} if config.scope == "global" else flat(is_sgd)).items():
            switched[path] = np.where(flags & (switched.get(path, 0) == 0), k, switched.get(path, 0 * flags))
    for path, steps in switched.items():
        np.testing.assert_array_equal(steps, np.reshape(at[path or "q.weight"], steps.shape), err_msg=path)
    all_steps = np.concatenate([np.ravel(steps) for steps in switched.values()])
    assert all_steps[all_steps > 0].min() > config.min_steps
    assert len(set(all_steps)) > 1 or config.scope == "global"


@pytest.mark.slow
def test_it_is_adam_before_the_switch():
    updates, reference = Updates(SwatsConfig(**PLAIN)), optax.adam(1e-3, b2=0.999, eps=1e-9)
    params = as_model(numbers(0))
    state = reference.init(params)
    for t in range(20):
        change, state = reference.update(as_model(numbers(t)), state, params)
        params = optax.apply_updates(params, change)
        found = updates.step(numbers(t))
        assert all(np.abs(found[path] - array).max() <= 1e-6 for path, array in flat(params).items())


def test_a_step_across_the_gradient_says_nothing():
    """Of the running mean nothing changes if Adam's step and the gradient have no common direction."""
    updates = Updates(SwatsConfig(**PLAIN, min_steps=0, rtol=0.5))
    updates.step(numbers(1))
    before = updates.state_of(SwatsState).projection
    updates.step({path: np.zeros_like(g) for path, g in numbers(1).items()})
    after = updates.state_of(SwatsState).projection
    assert float(before.average) == float(after.average) > 0
    assert not bool(after.is_sgd)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["global", "group"])
def test_eight_devices_switch_as_one(scope):
    config = replace(NOISY, scope=scope)
    one, eight = Updates(config), Updates(config, where=layout())
    gradients = [{path: g + 0.7 * numbers(0)[path] for path, g in numbers(t).items()} for t in range(1, 41)]
    for gradient in gradients:
        expected, found = one.step(gradient), eight.step(gradient)
        assert all(np.abs(found[path] - expected[path]).max() <= 1e-6 for path in AXES)
    flags = [run.state_of(SwatsState).projection.is_sgd for run in (one, eight)]
    flags = [np.concatenate([np.ravel(x) for x in flat(each).values()]) for each in flags]
    np.testing.assert_array_equal(*flags)
    assert flags[0].any()
