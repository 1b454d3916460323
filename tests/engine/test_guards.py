"""Guards that may skip a step (outliers, loss scaling), and averages of the weights, in the compiled step."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.guards import UPDATE_NORM, StepStats, skip_reason
from jaxlm.core.precision import DynamicLossScale, parse_precision
from jaxlm.engine.entry import StateBuilder
from jaxlm.models.base import vocab_axis
from jaxlm.optim.averaging import Ema, EmaDecaySqrt
from jaxlm.optim.bad_steps import SkipBadSteps
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.engine.helpers import F32, MODEL, VOCAB, TinyRun, arrays, layout, one_device, phase
from tests.engine.test_step import assert_identical, host

ADAM = AdamConfig(learning_rate=1e-2, warmup=0)


class Judging:
    """Runs a guard on one loss and gradient norm after another, without a run."""

    def __init__(self, judge: Any):
        self._judge = jax.jit(judge.judge)
        self.slot = judge.init_slot()

    def __call__(self, loss: float, norm: float = 1.0) -> bool:
        finite = np.isfinite(loss) and np.isfinite(norm)
        stats = StepStats(jnp.float32(loss), jnp.float32(norm), jnp.asarray(finite), jnp.ones(()), {}, {})
        verdict = self._judge(self.slot, stats)
        self.slot = verdict.slot
        self.metrics = {name: float(value) for name, value in verdict.metrics.items()}
        return bool(verdict.applies)


def optimizer(text: Any) -> AdamConfig:
    return decode(AdamConfig, ConfigSource({"skip_bad_steps": text}))


@pytest.mark.trap("T8")
def test_skip_bad_steps_true_is_not_a_window_of_one_step():
    assert optimizer(False).guards == ()
    assert optimizer(True).guards == (SkipBadSteps(),)
    assert optimizer(True).guards[0].rolling_interval_length == 128
    assert optimizer(64).guards == (SkipBadSteps(64),)
    assert optimizer({"sigma_factor": 3.0}).guards == (SkipBadSteps(sigma_factor=3.0),)
    judge = Judging(optimizer(True).guards[0])
    losses = 3 + 0.1 * np.random.default_rng(0).normal(size=200)
    assert all(judge(loss) for loss in losses)
    assert not judge(300.0)  # an outlier does trigger it
    for never in (1, 7, -1):
        with pytest.raises(ConfigError, match="skip_bad_steps"):
            optimizer(never).guards  # noqa: B018


@pytest.mark.parametrize("sign", ["loss", "norm"])
def test_an_outlier_a_hundred_times_too_large_is_skipped_and_never_enters_the_window(sign):
    judge, clean = Judging(SkipBadSteps(32)), Judging(SkipBadSteps(32))
    rng = np.random.default_rng(1)
    for number in range(60):
        loss, norm = 3 + 0.05 * rng.normal(), 1 + 0.1 * rng.normal()
        assert judge(loss, norm)
        assert clean(loss, norm)
        if number > 20 and number % 10 == 0:
            assert not (judge(100 * loss, norm) if sign == "loss" else judge(loss, 100 * norm))
    for one, other in zip(jax.tree.leaves(judge.slot), jax.tree.leaves(clean.slot), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_none_of_two_thousand_clean_steps_is_skipped():
    judge = Judging(SkipBadSteps())
    rng = np.random.default_rng(2)
    steps = np.arange(2000)
    losses = 3 + 6 * np.exp(-steps / 100) + 0.05 * rng.normal(size=2000)
    norms = (0.3 + 4 * np.exp(-steps / 50)) * np.exp(0.2 * rng.normal(size=2000))
    assert all(judge(loss, norm) for loss, norm in zip(losses, norms, strict=True))


def test_non_finite_steps_do_not_enter_the_window():
    judge = Judging(SkipBadSteps(8))
    for _ in range(8):
        judge(3.0)
    before = jax.tree.leaves(judge.slot)
    for loss, norm in ((np.nan, 1.0), (np.inf, 1.0), (3.0, np.nan), (3.0, np.inf)):
        judge(loss, norm)
        for one, other in zip(jax.tree.leaves(judge.slot), before, strict=True):
            np.testing.assert_array_equal(one, other)
    assert judge(3.01)
    assert not judge(30.0)


def test_the_window_cannot_freeze():
    judge = Judging(SkipBadSteps(16, max_in_a_row=5))
    for _ in range(16):
        judge(3.0)
    answers = [judge(9.0) for _ in range(40)]
    assert answers == [False] * 5 + [True] * 35  # the loss has shifted permanently: the sixth step restarts the window
    assert not judge(90.0)
    assert judge(9.1)


def test_a_small_change_after_equal_values_is_not_an_outlier():
    judge = Judging(SkipBadSteps(8))
    for _ in range(20):
        judge(3.0)
    assert judge(3.2)


def test_the_scale_grows_and_backs_off():
    scale = DynamicLossScale(initial=8.0, growth_interval=3, smallest=2.0, largest=16.0)
    judge, seen = Judging(scale), []
    for loss in [1.0] * 7 + [np.nan] * 4 + [1.0] * 3:
        assert judge(loss)  # the engine skips non-finite steps in any case
        seen.append(float(judge.slot.scale))
    assert seen == [8, 8, 16, 16, 16, 16, 16, 8, 4, 2, 2, 2, 2, 4]


def test_the_guard_that_skips_a_step_says_why():
    spikes, scale = SkipBadSteps(8), DynamicLossScale()
    judge = Judging(spikes)
    for _ in range(8):
        judge(3.0, 1.0)
    for loss, norm, said in (
        (30.0, 1.0, "loss 30 (limit 3.36) is an outlier"),
        (3.0, 9.0, "gradient norm 9 (limit 1.12) is an outlier"),
        (30.0, 9.0, "loss 30 (limit 3.36) and gradient norm 9 (limit 1.12) are outliers"),
    ):
        judge(loss, norm)
        step = judge.metrics | {
            "train/objective": loss,
            "grad/norm/total": norm,
            "train/loss_scale": 8.0,
            UPDATE_NORM: 1.0,
        }
        assert skip_reason((spikes, scale), step) == said
    assert judge(3.0, 1.0)
    assert not judge.metrics["bad_steps/in_a_row"]
    overflow = step | {"train/objective": np.inf, "grad/norm/total": np.inf}
    assert skip_reason((spikes, scale), overflow) == (
        "loss and gradient are not finite; the loss scale 8 may be too large and is halved"
    )
    assert skip_reason((), overflow) == "loss and gradient are not finite"
    ruinous = judge.metrics | {"train/objective": 1.0, "grad/norm/total": 1.0, UPDATE_NORM: np.nan}
    assert skip_reason((spikes,), ruinous) == "update is not finite"


def test_parameters_are_not_stored_in_float16():
    for text in ("f16", "half", "p=float16,c=float16"):
        with pytest.raises(ConfigError, match="p=f32,c=float16"):
            parse_precision(text)


HALF = replace(parse_precision("p=f32,c=float16"), loss_scale=DynamicLossScale(initial=2.0**10))


@pytest.mark.slow
def test_an_update_that_is_not_finite_changes_nothing():
    # Adam divides 0 by 0 for a token that no batch has had yet, though loss and gradient are finite.
    run = TinyRun(one_device(), phase(optimizer=replace(ADAM, epsilon=0.0)))
    columns = arrays(0)
    columns["tokens"] = np.where(columns["tokens"] == 3, 4, columns["tokens"])
    before = host(run)
    metrics = run.step(columns)
    assert np.isfinite(metrics["train/objective"])
    assert np.isfinite(metrics["grad/norm/total"])
    assert not np.isfinite(metrics[UPDATE_NORM])
    assert metrics["train/skipped_steps"] == 1
    assert_identical(host(run), before, but=("step", "guard.skipped"))


WATCHED = phase(optimizer=replace(ADAM, skip_bad_steps=SkipBadSteps(8)))


@pytest.mark.slow
def test_an_outlier_skips_exactly_one_update():
    strange = arrays(99)
    strange["targets"] = np.full_like(strange["targets"], 5)  # a single class, for a different loss
    run, clean = (TinyRun(one_device(), WATCHED, HALF) for _ in range(2))
    skipped = []
    for number in range(8):
        skipped.append(run.step(arrays(number))["train/skipped_steps"])
        clean.step(arrays(number))
        if number == 6:
            before = host(run)
            metrics = run.step(strange)
            assert metrics["train/skipped_steps"] == 1
            assert metrics["bad_steps/in_a_row"] == 1
            assert (
                metrics["grad/norm/total"] > metrics["bad_steps/grad_norm_limit"]
                or metrics["train/objective"] > metrics["bad_steps/loss_limit"]
            )
            remembered = ("slots.bad_steps.in_a_row", "slots.loss_scale.good_steps")
            assert_identical(host(run), before, but=("step", "guard.skipped", *remembered))
    assert skipped == [0.0] * 7 + [1.0]
    assert_identical(host(run), host(clean), but=("step", "guard.skipped", "slots.loss_scale.good_steps"))


@pytest.mark.slow
def test_float16_trains_like_float32_and_backs_off_after_overflow():
    parsed = parse_precision("p=f32,c=float16")
    assert parsed.loss_scale == DynamicLossScale()
    assert str(parsed) == "params float32, compute float16, dynamic loss scale"
    full, run = TinyRun(one_device()), TinyRun(one_device(), WATCHED, HALF)
    for number in range(7):
        one, other = full.step(arrays(number)), run.step(arrays(number))
        assert other["train/loss"] == pytest.approx(one["train/loss"], rel=2e-3)  # bfloat16 stays within 1e-3
        assert other["train/skipped_steps"] == 0

    huge = jnp.asarray(2.0**24, jnp.float32)
    run.state = eqx.tree_at(lambda s: s.slots["loss_scale"].scale, run.state, huge)
    before, backed_off = host(run), 0
    while run.step(arrays(8))["train/skipped_steps"] > backed_off:
        backed_off += 1
        assert float(run.state.slots["loss_scale"].scale) == 2.0 ** (24 - backed_off)
        changed = ("step", "guard.skipped", "slots.loss_scale.scale", "slots.loss_scale.good_steps")
        assert_identical(host(run), before, but=changed)
    assert 1 <= backed_off < 16


AVERAGES = {"ema": Ema(0.8), "late": EmaDecaySqrt(0.9, switch_step=2, decay_steps=3)}


@pytest.mark.slow
@pytest.mark.parametrize("where", [layout, pytest.param(one_device, marks=pytest.mark.soak)])
def test_guards_and_averages_do_not_change_training(where):
    """A power-of-two loss scale, a window without outliers, and two averages. The averages must equal those of the weights
    after every step, computed in float64."""
    scale = DynamicLossScale(initial=2.0**10, growth_interval=2)
    judged = replace(ADAM, skip_bad_steps=SkipBadSteps(64))
    plain = TinyRun(where())
    run = TinyRun(where(), phase(optimizer=judged, averages=AVERAGES), replace(F32, loss_scale=scale))
    weights = lambda: {p: np.asarray(tree.raw(x), np.float64) for p, x in tree.leaves(run.state.model)}  # noqa: E731
    expected, total = {name: weights() for name in AVERAGES}, 0.0
    for number in range(5):
        one, other = plain.step(arrays(number)), run.step(arrays(number))
        assert one == {name: value for name, value in other.items() if name in one}
        count = 0.1 if number < 2 else 1 - min(1.0, (number - 2) / 3) ** 0.5
        total += count
        now = weights()
        for name, weight in (("ema", 1 - 0.8), ("late", count / total)):
            expected[name] = {p: a + weight * (now[p] - a) for p, a in expected[name].items()}
    assert_identical(host(plain), {path: array for path, array in host(run).items() if not path.startswith("slots.")})
    assert float(run.state.slots["loss_scale"].scale) == 2.0**12

    for name, model in run.phase.averaged(run.state).items():
        for path, leaf in tree.leaves(model):
            np.testing.assert_allclose(np.asarray(tree.raw(leaf)), expected[name][path], atol=1e-6, err_msg=path)
        live = {path: leaf.array.sharding for path, leaf in tree.leaves(run.state.model)}
        assert {p: leaf.array.sharding for p, leaf in tree.leaves(run.state.slots[name].weights)} == live


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.trap("D27")
def test_every_average_can_be_traced(name):
    """Compared with float64. One of them cannot be traced in the program that its key comes from."""
    average = AVERAGES[name]
    updated, rng = jax.jit(average.update), np.random.default_rng(0)
    weights = rng.normal(size=(8, 3)).astype(np.float32)
    slot, expected, total = average.init_slot({"w": jnp.asarray(weights)}), weights.astype(np.float64), 0.0
    for number in range(8):
        weights = rng.normal(size=(8, 3)).astype(np.float32)
        slot = updated(slot, {"w": jnp.asarray(weights)}, jnp.asarray(number))
        count = 0.1 if number < 2 else 1 - min(1.0, (number - 2) / 3) ** 0.5
        total += count
        expected = expected + (1 - 0.8 if name == "ema" else count / total) * (weights - expected)
        np.testing.assert_allclose(slot.weights["w"], expected, atol=1e-6)


def test_averages_cover_only_trainable_leaves():
    state_builder = StateBuilder(
        MODEL, vocab_axis(VOCAB), 0, F32, (phase(averages={"ema": Ema(0.5)}, trainable=("mlp",)),)
    )
    state = state_builder.abstract_state(state_builder.phases[0])
    kept = {path for path, _ in tree.leaves(state.slots["ema"].weights)}
    assert kept
    assert all("mlp" in path for path in kept)
    whole = jax.eval_shape(state_builder.phases[0].averaged, state)["ema"]
    assert [path for path, _ in tree.leaves(whole)] == [path for path, _ in tree.leaves(state.model)]


MESHES = {"fsdp 8": {}, "tp 2 x fsdp 4": {"model": 2}}
GROUPS = [
    {"match": "^tokens", "learning_rate": 5e-3, "beta2": 0.99},
    {"match": "norm", "type": "lion", "learning_rate": 1e-3, "lr_schedule": "constant"},
    {"match": "attn|mlp", "type": "muon", "learning_rate": 3e-3, "weight_decay": 0.01},
]
# Each with a learning rate at which it makes progress.
OPTIMIZERS = {
    **{kind: {"type": kind, "learning_rate": 3e-3} for kind in ("adam-mini", "muon", "kron", "soap")},
    **{kind: {"type": kind, "learning_rate": 3e-3} for kind in ("sophia-h", "lion", "mars")},
    "adagrad": {"type": "adagrad", "learning_rate": 0.1},
    "three groups and the rest": {"learning_rate": 3e-3, "groups": GROUPS},
}
# Each divides its matrices among the devices in a way of its own. Muon does so in tests/optim/test_muon.py.
UNLIKE = ("kron", "soap")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp 2 x fsdp 4", pytest.param("fsdp 8", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in UNLIKE else pytest.mark.soak) for kind in OPTIMIZERS]
)
def test_every_optimizer_trains_the_same_on_every_mesh(kind, mesh):
    config = decode(OptimizerConfig, ConfigSource({**OPTIMIZERS[kind], "warmup": 0}))

    def losses(where) -> list[float]:
        run = TinyRun(where, phase(optimizer=config))
        found = [run.step(arrays(number % 4))["train/loss"] for number in range(12)]
        # The optimizer state is sharded like the parameters, or as far as FSDP goes.
        places = {str(leaf.array.sharding.spec) for _, leaf in tree.leaves(run.state.model)}
        memory = [leaf for _, leaf in tree.leaves(run.state.opt_state) if tree.is_named(leaf)]
        memory = [
            leaf for leaf in memory if leaf.array.size > MODEL.num_layers * MODEL.intermediate_dim
        ]  # not one per row
        assert memory
        assert all("'data'" in spec for spec in {str(leaf.array.sharding.spec) for leaf in memory} - places)
        return found

    expected = losses(one_device())
    assert expected[-1] < expected[0] - 0.1
    np.testing.assert_allclose(losses(layout(**MESHES[mesh])), expected, rtol=1e-5)


@pytest.mark.parametrize("wrong", [lambda: Ema(1.0), lambda: Ema(-0.1), lambda: EmaDecaySqrt(decay_steps=0)])
def test_invalid_averages_are_refused(wrong):
    with pytest.raises(ConfigError, match="model_averaging"):
        check_fields(wrong(), "trainer.model_averaging")
