"""Telemetry: what the detectors find in known noise, and that it leaves the training alone."""

from dataclasses import replace
from functools import partial
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import GRADIENT_NORM, UPDATE_NORM, StepStats
from jaxlm.core.values import logged
from jaxlm.optim.bad_steps import RollingWindow, RunningMean
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.telemetry import Telemetry, Trend, layer_norms, layer_ratio, norm, slope
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.engine.helpers import TinyRun, arrays, layout, one_device, phase
from tests.engine.test_step import assert_identical, host

GUARD = Telemetry()


@partial(jax.jit, static_argnums=2)
def _measured(losses: jax.Array, norms: jax.Array, guard: Telemetry) -> Any:
    def measure(slot: Any, values: Any) -> Any:
        loss, gradient = values
        finite = jnp.isfinite(loss) & jnp.isfinite(gradient)
        verdict = guard.judge(slot, StepStats(loss, gradient, finite, jnp.ones(()), {}, {}))
        return verdict.slot, (verdict.metrics, verdict.applies)

    return jax.vmap(lambda *values: jax.lax.scan(measure, guard.init_slot(), values)[1])(losses, norms)


def measured(losses: np.ndarray, norms: np.ndarray | None = None, guard: Telemetry = GUARD) -> dict[str, np.ndarray]:
    """The metrics of each step of several runs. Args: losses, norms: [runs, steps]."""
    losses = np.atleast_2d(losses).astype(np.float32)
    metrics, applies = _measured(losses, np.ones_like(losses) if norms is None else np.atleast_2d(norms), guard)
    assert np.asarray(applies).all()
    return {name.removeprefix("telemetry/"): np.asarray(values) for name, values in metrics.items()}


def optimizer(text: Any) -> AdamConfig:
    return decode(AdamConfig, ConfigSource({"telemetry": text}))


def test_telemetry_is_off_on_or_a_section():
    assert optimizer(None).guards == optimizer(False).guards == ()
    assert optimizer(True).guards == (Telemetry(),)
    assert optimizer({"loss_limit": 4.0}).guards == (Telemetry(loss_limit=4.0),)
    assert [guard.name for guard in replace(optimizer(True), skip_bad_steps=True).guards] == ["bad_steps", "telemetry"]
    for section, message in (
        ({"min_steps": 200}, r"telemetry\.window: 128 is the default, but min_steps is 200"),
        ({"mean_steps": 200}, r"telemetry\.reference_steps: 200 is the default, but mean_steps is 200"),
        ({"window": 8}, r"telemetry\.window: 8 given"),
        ({"reference_steps": 10}, r"telemetry\.reference_steps: 10 given, but mean_steps is 20"),
    ):
        with pytest.raises(ConfigError, match=message):
            optimizer(section)


# All runs have this shape, so that the detectors are compiled once.
NUM_RUNS, NUM_STEPS = 20, 600
STEPS = np.arange(NUM_STEPS)


def noise(seed: int, sigma: float = 0.05) -> np.ndarray:
    return sigma * np.random.default_rng(seed).normal(size=(NUM_RUNS, NUM_STEPS))


@pytest.mark.slow
def test_few_steps_of_stationary_noise_are_spikes():
    """2,000 steps of 50 runs, of the loss alone, and fewer with gradient norms."""
    losses = 1 + 0.05 * np.random.default_rng(0).normal(size=(50, 2000)).astype(np.float32)
    options = {"limit": GUARD.loss_limit, "min_values": GUARD.min_steps, "smallest_scale": 0.0}

    def push(trend: Trend, value: jax.Array) -> Any:
        after, judged = trend.push(value, **options)
        return after, judged.score

    scores = jax.jit(jax.vmap(lambda values: jax.lax.scan(push, Trend.empty(GUARD.window), values)[1]))(losses)
    assert (scores > GUARD.loss_limit).mean() <= 0.003
    assert (scores[:, :100] > GUARD.loss_limit).mean() <= 0.003  # the start is no exception

    metrics = measured(1 + noise(0), np.exp(noise(1, 0.3)))
    flags = metrics["is_spike"]
    assert flags.mean() <= 0.003
    np.testing.assert_array_equal(metrics["num_spikes"], _sums_of_last(flags, GUARD.window))
    assert metrics["loss_score"][:, :20].max() == 0
    assert metrics["loss_score"][:, 200:].std() == pytest.approx(1, abs=0.1)
    assert metrics["grad_norm_score"][:, 200:].std() == pytest.approx(1, abs=0.1)
    assert np.abs(metrics["loss"] - 1).max() < 6 * 0.05  # after one step too: the means are debiased
    assert np.abs(metrics["loss_reference"][:, 500:] - 1).max() < 0.02


def _sums_of_last(values: np.ndarray, num: int) -> np.ndarray:
    sums = np.cumsum(values, axis=1)
    return sums - np.pad(sums, ((0, 0), (num, 0)))[:, :-num]


@pytest.mark.slow
def test_a_step_of_one_nat_on_a_falling_loss_is_found_and_learned():
    at = np.array([50, 100, 200, 400] * 5)
    losses = 3 + 7 * np.exp(-STEPS / 150) + noise(2)
    assert measured(losses)["is_spike"].mean() <= 0.003
    is_after = at[:, None] <= STEPS
    flags = measured(losses + is_after)["is_spike"]
    assert (flags[np.arange(NUM_RUNS), at] == 1).all()
    # The new level is learned, at the latest after 10 steps: it is not a spike for ever.
    assert (flags * (at[:, None] + 12 <= STEPS)).mean() <= 0.003
    assert (flags * is_after).sum(axis=1).max() <= 12


@pytest.mark.slow
def test_what_is_not_finite_is_a_spike_at_once_and_leaves_no_trace():
    bad = np.array([0, 5, 40, 41])
    clean = measured(3 + noise(3))
    losses = np.insert(3 + noise(3), bad, np.nan, axis=1)[:, :NUM_STEPS]
    losses[:, 6] = np.inf
    norms = np.ones_like(losses)
    norms[:, 300] = np.nan
    metrics, places = measured(losses, norms), bad + np.arange(4)
    assert (np.flatnonzero(metrics["is_spike"][0]) == [*places, 300]).all()
    assert np.isinf(metrics["loss_score"][:, places]).all()
    assert np.isinf(metrics["grad_norm_ratio"][:, 300]).all()
    for name in ("loss", "loss_reference", "loss_score", "slope"):
        np.testing.assert_array_equal(np.delete(metrics[name], places, axis=1), clean[name][:, :-4])


def test_a_spike_does_not_widen_its_own_limit():
    losses = 3 + noise(4)
    strange = losses.copy()
    strange[:, 200:380:4] += 1000  # one step of four
    scores = measured(strange)["loss_score"]
    assert (scores[:, 200:380:4] > 100).all()
    others = np.setdiff1d(np.arange(200, 380), np.arange(200, 380, 4))
    assert (np.abs(scores[:, others]) < 5).mean() > 0.99


@pytest.mark.slow
def test_a_gradient_norm_beyond_its_median_is_a_spike():
    norms = np.exp(noise(5, 0.2))
    norms[:, 150] *= 1000
    metrics = measured(3 + 0 * norms, norms)
    assert np.flatnonzero(metrics["is_spike"].any(axis=0)).tolist() == [150]
    expected = norms[:, 150] / np.median(norms[:, 22:150], axis=1)
    np.testing.assert_allclose(metrics["grad_norm_ratio"][:, 150], expected, rtol=1e-5)
    assert (metrics["grad_norm_ratio"][:, :20] == 1).all()


@pytest.mark.slow
def test_a_plateau_is_found_and_a_falling_loss_is_none():
    window = GUARD.plateau_window
    flat = measured(3 + noise(6))["is_plateau"]
    assert flat[:, window - 1 :].mean() >= 0.9
    assert flat[:, : window - 1].max() == 0  # not before there are enough steps
    falling = measured(3.6 - 1e-3 * STEPS + noise(7))
    assert falling["is_plateau"].max(axis=1).mean() <= 0.05
    assert falling["slope"][:, window:].mean() == pytest.approx(-1e-3, rel=0.02)
    bend = measured(3 + np.maximum(0, 250 - STEPS) * 1e-3 + noise(8))["is_plateau"]
    assert bend[:, :300].max() == 0
    assert bend[:, 550:].mean() >= 0.9


@pytest.mark.slow
def test_trend_slope_and_mean_equal_closed_forms():
    rng = np.random.default_rng(7)
    values = 5 - 0.01 * np.arange(90) + 0.1 * rng.normal(size=90)
    push = jax.jit(lambda t, x: t.push(x, limit=1e9, min_values=20, smallest_scale=0.0))
    trend, mean, window = Trend.empty(32), RunningMean.empty(), RollingWindow.empty(64)
    for number, value in enumerate(values, 1):
        trend, _ = push(trend, jnp.float32(value))
        mean, window = mean.push(jnp.float32(value), 10), window.push(jnp.float32(value))
        seen, age = values[:number], np.arange(number)[::-1]
        weights = 0.9**age
        assert float(mean.mean()) == pytest.approx(np.sum(weights * seen) / np.sum(weights), rel=1e-5)
        if number > 20:
            # A weight of 0.95**n for the assumption that the slope is 0 is what is left of the start.
            left = np.sqrt(0.95**number)
            rows = np.column_stack([np.ones(number), -age]) * np.sqrt(0.95**age)[:, None]
            rows, right = np.vstack([rows, [0, left]]), np.append(seen * np.sqrt(0.95**age), 0)
            level, rise = np.linalg.lstsq(rows, right, rcond=None)[0]
            assert float(trend.level) == pytest.approx(level, abs=2e-5)
            assert float(trend.slope) == pytest.approx(rise, abs=2e-6)
    last = values[-64:]
    (rise, _), covariance = np.polyfit(np.arange(64), last, 1, cov=True)
    found = [float(x) for x in slope(window)]
    assert found == pytest.approx([rise, np.sqrt(covariance[0, 0])], rel=1e-4)
    assert [float(x) for x in slope(RollingWindow.empty(64))] == [0, 0]
    assert float(RunningMean.empty().mean()) == 0


@pytest.mark.slow
def test_norms_of_layers_are_those_of_each_slice():
    rng = np.random.default_rng(8)
    Layers, Two, Embed, Mlp = hax.Axis("layers", 3), hax.Axis("layers", 2), hax.Axis("embed", 4), hax.Axis("mlp", 5)
    gradient = {
        "body": {
            "0": {"layers": {"up": hax.named(rng.normal(size=(3, 4, 5)), (Layers, Embed, Mlp)), "frozen": None}},
            "1": {"layers": {"up": hax.named(rng.normal(size=(4, 2)), (Embed, Two))}},
        },
        "tokens": hax.named(100 * rng.normal(size=(4,)), (Embed,)),
        "scales": hax.named(100 * rng.normal(size=(3,)), (Layers,)),  # of layers, but beside their stack
    }
    gradient["body"]["0"]["layers"]["bias"] = hax.named(rng.normal(size=(5, 3)), (Mlp, Layers))
    up, bias = (gradient["body"]["0"]["layers"][name].array for name in ("up", "bias"))
    expected = [np.hypot(np.linalg.norm(up[layer]), np.linalg.norm(bias[:, layer])) for layer in range(3)]
    expected += np.linalg.norm(gradient["body"]["1"]["layers"]["up"].array, axis=0).tolist()
    np.testing.assert_allclose(layer_norms(gradient), expected, rtol=1e-6)
    assert float(layer_ratio(gradient)) == pytest.approx(max(expected) / np.median(expected), rel=1e-6)
    flat = np.concatenate([np.ravel(tree.raw(leaf)) for _, leaf in tree.leaves(gradient)])
    assert float(norm(gradient)) == pytest.approx(np.linalg.norm(flat), rel=1e-6)
    assert float(layer_ratio({"tokens": gradient["tokens"]})) == 1
    assert float(layer_ratio(jax.tree.map(jnp.zeros_like, gradient))) == 1


ON = phase(optimizer=AdamConfig(learning_rate=1e-2, warmup=0, telemetry=True))


@pytest.mark.slow
def test_telemetry_does_not_change_training():
    """On one device, not a bit of it. On several, the compiler may add in another order."""
    plain, run = TinyRun(one_device()), TinyRun(one_device(), ON)
    for number in range(4):
        before = {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(run.state.model)}
        one, other = plain.step(arrays(number)), run.step(arrays(number))
        assert one == {name: value for name, value in other.items() if name in one}
        size = np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in before.values()))
        assert other[logged.UPDATE_RATIO] == pytest.approx(other[UPDATE_NORM] / size, rel=1e-5)
        assert other[logged.LAYER_RATIO] > 1
        assert other[logged.GRAD_NORM_RATIO] == 1
    assert other[GRADIENT_NORM] > 0
    slots = {path for path in host(run) if path.startswith("slots.")}
    assert_identical(host(plain), {path: array for path, array in host(run).items() if path not in slots})
    names = {value for name, value in vars(logged).items() if isinstance(value, str) and value.startswith("telemetry/")}
    assert {name for name in other if name.startswith("telemetry/")} == names


@pytest.mark.slow
def test_telemetry_is_the_same_on_every_mesh():
    plain, run, expected = TinyRun(layout(model=2)), TinyRun(layout(model=2), ON), TinyRun(one_device(), ON)
    first = {name: value for name, value in expected.step(arrays(0)).items() if name.startswith("telemetry/")}
    measured = [run.step(arrays(number)) for number in range(3)]
    assert {name: measured[0][name] for name in first} == pytest.approx(first, rel=1e-5)
    for number in range(3):
        one = plain.step(arrays(number))
        assert one == pytest.approx({name: measured[number][name] for name in one}, rel=1e-6)
    weights = {path: array for path, array in host(run).items() if path.startswith("model.")}
    for path, array in host(plain).items():
        if path.startswith("model."):
            np.testing.assert_allclose(weights[path], array, rtol=1e-6, atol=1e-6, err_msg=path)
