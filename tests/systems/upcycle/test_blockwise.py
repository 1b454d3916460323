"""Blockwise distillation: which blocks an update changes, when they are done, and what it remembers of them."""

import contextlib
import dataclasses
import functools
import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.pace import Pace
from jaxlm.models.base import vocab_axis
from jaxlm.models.distillation.layerwise import Int8Array
from jaxlm.objectives.next_token import NextToken
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.curvature import Curvature
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.plan.plan import plan_phases
from jaxlm.plan.run_config import PhaseConfig, RunConfig
from jaxlm.systems.upcycle.blockwise import Autotune, BlockProgress, Blockwise, Convergence
from tests.engine.helpers import MODEL, TinyRun, arrays, layout, one_device, phase
from tests.fields.proofs import outcome_of
from tests.fields.trees import BASES, merged
from tests.objectives.test_next_token import a_batch
from tests.tiers import one_of

ATTENTION = ("body.*attn",)
ADAM = AdamConfig(learning_rate=1e-2, warmup=0, weight_decay=0.1, max_grad_norm=None)


@functools.cache
def teacher(seed=1):
    return MODEL.build(vocab_axis(64), key=jax.random.key(seed))


def filled(seed):
    """A model whose parameters are all large."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(0, 0.4, a.shape), a.dtype), teacher())


def a_run(where, **keys):
    objective = Blockwise(**keys)
    own = phase(objective=objective, trainable=ATTENTION, optimizer=ADAM)
    scheduled = objective.scheduled_steps(own.num_steps, MODEL)
    own = dataclasses.replace(own, scheduled_steps=scheduled)
    run = TinyRun(where, phase=own)
    with where.use():
        run.refs = {"teacher": jax.device_put(teacher(), where.replicated())}
    return run


def leaves_of(state, layer):
    """Path -> one layer of what trains and of its moments, as bytes on the host."""
    found = {}
    for name, part in (("model", state.model), ("optimizer", state.opt_state)):
        for path, leaf in tree.leaves(part):
            if (
                tree.is_named(leaf)
                and LAYERS in {axis.name for axis in leaf.axes}
                and "attn" in path
                and "norm" not in path
            ):
                found[f"{name} {path}"] = np.asarray(leaf[LAYERS, layer].array)
    assert len(found) == 4 * 3  # four projections with two moments
    return found


def parameters_of(state, layer):
    """As `leaves_of`, without moments: those of finished blocks go when the next one starts."""
    return {path: leaf for path, leaf in leaves_of(state, layer).items() if path.startswith("model")}


def changed(before, after):
    """Whether all leaves changed; asserts that all or none did."""
    differs = {path: not np.array_equal(after[path], before[path]) for path in before}
    assert len(set(differs.values())) == 1, differs
    return next(iter(differs.values()))


def simulated(errors, decay, min_delta):
    """(average, best, stale) after each step, by the definition: a weighted mean with weights decay**age."""
    best, stale, rows = np.inf, 0, []
    for step in range(1, len(errors) + 1):
        weights = decay ** np.arange(step)[::-1] if decay else np.eye(step)[-1]
        average = (weights * errors[:step]).sum() / weights.sum()
        improved = average < best - min_delta
        best, stale = (average, 0) if improved else (best, stale + 1)
        rows.append((average, best, stale))
    return rows


def fed(progress, error, trained, convergence=None, autotune=None):
    progress = progress.with_errors(3 * jnp.asarray(error, jnp.float32), jnp.float32(1))
    progress = progress.with_errors(jnp.asarray(error, jnp.float32), jnp.float32(3))
    return progress.after_update(jnp.asarray(trained), convergence or Convergence(), autotune or Autotune())


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_averages_and_counts_match_the_definition(decay):
    errors = np.random.default_rng(0).uniform(0.5, 1.5, (30, 2))
    convergence = Convergence(decay=decay, min_delta=0.01)
    progress, expected = BlockProgress.init(2), [simulated(errors[:, block], decay, 0.01) for block in range(2)]
    for step in range(30):
        progress = fed(progress, errors[step], [True, True], convergence)
        for block in range(2):
            average, best, stale = expected[block][step]
            np.testing.assert_allclose(progress.average[block], average, rtol=1e-5)
            np.testing.assert_allclose(progress.best[block], best, rtol=1e-5)
            assert progress.stale[block] == stale
    assert progress.steps.tolist() == [30, 30]
    assert not progress.total.any()
    assert progress.weight == 0


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.37])
def test_a_constant_error_ends_a_block_after_exactly_patience_steps_without_improvement(decay):
    progress, convergence = BlockProgress.init(1), Convergence(patience=5, decay=decay)
    for step in range(1, 8):
        progress = fed(progress, [0.3], [progress.done[0] == 0], convergence)
        assert progress.done[0] == (step >= 6), step  # the first step is an improvement
    assert progress.steps[0] == 6


@pytest.mark.slow
def test_limits_of_steps_and_the_target():
    progress = BlockProgress.init(3)
    convergence = Convergence(target=0.5, max_steps=4, min_steps=2, decay=0.0)
    done = []
    for _ in range(4):
        progress = fed(progress, [0.5, 0.6, 0.1], [True] * 3, convergence)
        done.append(progress.done.tolist())
    assert done == [[0, 0, 0], [1, 0, 1], [1, 0, 1], [1, 1, 1]]


def test_an_update_of_one_block_changes_nothing_of_another():
    progress = fed(BlockProgress.init(2), [1.0, 2.0], [True, True], autotune=Autotune("active"))
    after = fed(progress, [9.0, 9.0], [False, True], autotune=Autotune("active"))
    for name, before, now in (
        (f.name, getattr(progress, f.name), getattr(after, f.name)) for f in dataclasses.fields(after)
    ):
        if name not in ("total", "weight"):
            assert now[0] == before[0], name
    assert after.steps.tolist() == [1, 2]


def test_autotune_lowers_the_rate_on_plateaus_down_to_its_limit():
    progress, autotune = BlockProgress.init(1), Autotune("active", patience=3, decay=0.5, min_scale=0.2)
    scales = []
    for _ in range(13):
        progress = fed(progress, [1.0], [True], autotune=autotune)
        scales.append(float(progress.scale[0]))
    np.testing.assert_allclose(scales, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2, 0.2, 0.2, 0.2], rtol=1e-6)
    assert progress.events[0] == 4


@pytest.mark.parametrize("at", [60, 100, 200, 400])
def test_autotune_sees_a_spike_on_a_falling_error_and_few_in_noise(at):
    rng, steps = np.random.default_rng(at), np.arange(500)
    errors = 3 + 7 * np.exp(-steps / 150) + rng.normal(0, 0.05, (64, 500))
    errors[:, at] += 1.0
    autotune = Autotune("active", patience=10**6, spike_std=4.0)

    def one(progress, error):
        return fed(progress, error, jnp.ones(64, bool), autotune=autotune), progress.events

    last, events = jax.jit(lambda: jax.lax.scan(one, BlockProgress.init(64), jnp.asarray(errors.T, jnp.float32)))()
    before, after = np.asarray(events[at]), np.asarray(events[at + 1])
    assert (after - before).mean() == 1.0  # each of the 64 runs
    assert (np.asarray(last.events) - 1).sum() / (64 * 499) < 0.003


@pytest.mark.slow
def test_off_and_monitor_move_the_model_alike_and_active_less():
    states = {}
    for mode in ("off", "monitor", "active"):
        run = a_run(
            one_device(), autotune=Autotune(mode, patience=1, decay=0.5), convergence=Convergence(min_delta=100.0)
        )
        metrics = [run.step(arrays(0)) for _ in range(4)]
        states[mode] = run.state
        assert metrics[-1]["train/block_events"] == (0 if mode == "off" else 2 * 2)
        assert metrics[-1]["train/block_lr_scale/0"] == (1 if mode == "off" else 0.5**2)
    models = {mode: dict(tree.leaves(state.model)) for mode, state in states.items()}
    for path, leaf in models["off"].items():
        np.testing.assert_array_equal(models["monitor"][path].array, leaf.array)
    assert any(not np.array_equal(models["active"][path].array, leaf.array) for path, leaf in models["off"].items())


@pytest.mark.slow
def test_blocks_that_are_done_keep_parameters_and_moments_to_the_bit():
    run = a_run(one_device(), convergence=Convergence(max_steps=2))
    slot = run.state.slots["objective"]
    # Block 1 has a step behind it, and is done one step earlier.
    run.state.slots["objective"] = dataclasses.replace(slot, steps=jnp.asarray([0, 1], jnp.int32))
    moves, left = [], []
    for step in range(4):
        before = [leaves_of(run.state, layer) for layer in range(2)]
        left.append(run.step(arrays(step))["train/blocks_left"])
        moves.append([changed(before[layer], leaves_of(run.state, layer)) for layer in range(2)])
    assert moves == [[True, True], [True, False], [False, False], [False, False]]
    assert left == [2, 1, 0, 0]


@pytest.mark.slow
def test_a_student_that_equals_its_teacher_is_done_without_an_update_after_the_first():
    run = a_run(one_device(), convergence=Convergence(target=1e-6))
    same = jax.tree.map(lambda a: jnp.array(a, copy=True), run.state.model)
    run.refs = {"teacher": same}
    first = run.step(arrays(0))
    assert first["train/loss"] < 1e-6
    before = [leaves_of(run.state, layer) for layer in range(2)]
    second = run.step(arrays(1))
    assert second["train/blocks_left"] == 0
    assert not any(changed(before[layer], leaves_of(run.state, layer)) for layer in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["teacher", "student"])
def test_sequential_blocks_train_alone_each_with_a_new_optimizer_and_one_program(inputs):
    run = a_run(one_device(), order="sequential", inputs=inputs, convergence=Convergence(max_steps=3))
    moves, rates = [], []
    for step in range(7):
        before = [parameters_of(run.state, layer) for layer in range(2)]
        rates.append(run.step(arrays(step))["optim/learning_rate"])
        moves.append([changed(before[layer], parameters_of(run.state, layer)) for layer in range(2)])
    assert moves == [[True, False]] * 3 + [[False, True]] * 3 + [[False, False]]
    assert rates[:3] == rates[3:6]
    schedule = ADAM.schedule(3)
    np.testing.assert_allclose(rates[:3], [float(schedule(count)) for count in range(3)], rtol=1e-6)


@pytest.mark.slow
def test_the_first_update_of_a_later_block_is_that_of_a_new_optimizer():
    """Adam's first update is g / (|g| + epsilon) times the rate. With moments that begin at zero later, it is not."""
    run = a_run(one_device(), order="sequential", convergence=Convergence(max_steps=2))
    for step in range(2):
        run.step(arrays(step))
    before = np.asarray(run.state.model.body.layers.stacked.attn.q_proj.weight[LAYERS, 1].array)
    run.step(arrays(2))
    after = np.asarray(run.state.model.body.layers.stacked.attn.q_proj.weight[LAYERS, 1].array)
    update = (after - before * (1 - 1e-2 * 0.1)) / 1e-2
    assert np.abs(update).max() <= 1.001
    assert np.median(np.abs(update)) > 0.97


@pytest.mark.soak
@pytest.mark.parametrize("order", one_of(["parallel", "sequential"]))
def test_eight_devices_and_one_do_the_same(order):
    keys = {"order": order, "convergence": Convergence(max_steps=2)}
    alone, sharded = a_run(one_device(), **keys), a_run(layout(), **keys)
    for step in range(4):
        one, eight = alone.step(arrays(step)), sharded.step(arrays(step), 2)
        for name in one:
            np.testing.assert_allclose(eight[name], one[name], rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "trainable", "unreached"),
    [
        ("attention", ".*", "tokens"),
        ("residual", ".*", "tokens"),
        ("attention", "body.*layers", "mlp"),
        ("mixing", "attn\\.", "v_proj"),
        ("residual", "body.*layers", None),
        ("attention", "attn_norm|attn\\.", None),
        ("mixing", "attn_norm|attn\\.[qk]_", None),
    ],
)
def test_parameters_without_a_gradient_are_refused_and_others_have_one(target, trainable, unreached):
    objective = Blockwise(target=target)
    refused = (
        pytest.raises(ConfigError, match=rf"{unreached}.* does not depend on it")
        if unreached
        else contextlib.nullcontext()
    )
    model = filled(0)
    own = phase(objective=objective, trainable=(trainable,))
    trained, frozen = own.split(model)
    with refused:
        objective.check(a_batch(length=16), model, trained)
        slot = objective.init_slot(trained)
        annotated = objective.annotate({"teacher": filled(1)}, a_batch(length=16))

        def loss(trained):
            model = eqx.combine(trained, frozen, is_leaf=tree.is_named)
            return objective.terms(model, annotated, slot, key=None)[0]["loss"].total

        gradient = jax.jit(jax.grad(loss))(trained)
        assert all(np.abs(np.asarray(tree.raw(leaf))).max() > 0 for _, leaf in tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_of(sorted(OptimizerConfig.get_known_choices()), but=4))
def test_the_state_of_a_layer_that_does_not_move_stays_with_every_optimizer(kind):
    """A layer with the factor 0 keeps parameters and state; the other one moves as without a pace."""
    config = OptimizerConfig.get_choice_class(kind)(learning_rate=1e-2, warmup=0)
    own = phase(optimizer=config, trainable=("attn", "mlp"))
    model = filled(0)
    trained, _ = own.split(model)
    optimizer, rng = own.transformation(model), np.random.default_rng(0)
    gradient = jax.tree.map(lambda a: jnp.asarray(rng.normal(0, 1, a.shape), a.dtype), trained)
    update = jax.jit(lambda state, pace: optimizer.update(gradient, state, trained, pace=pace, **extra(kind, gradient)))
    _, state = update(optimizer.init(trained), None)
    plain, plain_state = update(state, None)
    factors = {path: jnp.asarray([1.0, 0.0]) for path, _ in tree.leaves(trained)}
    moved, after = update(state, Pace(factors))
    for (path, new), (_, expected) in zip(tree.leaves(moved), tree.leaves(plain), strict=True):
        # Another program, which may fuse otherwise.
        np.testing.assert_allclose(new[LAYERS, 0].array, expected[LAYERS, 0].array, rtol=2e-6, atol=1e-9, err_msg=path)
        assert not new[LAYERS, 1].array.any(), path
    old, full = dict(tree.leaves(state)), dict(tree.leaves(plain_state))
    by_layer = 0
    for path, leaf in tree.leaves(after):
        rows = layer_rows(path, leaf, old[path], full[path])
        if rows is not None:
            new, before, expected = rows
            np.testing.assert_array_equal(new[1], before[1], err_msg=path)
            np.testing.assert_allclose(new[0], expected[0], rtol=2e-6, atol=1e-9, err_msg=path)
            by_layer += 1
    assert by_layer


def extra(kind, gradient):
    """What sophia needs."""
    return {"curvature": Curvature(lambda _: gradient, lambda: jax.random.key(0))} if kind.startswith("sophia") else {}


def layer_rows(path, *leaves):
    """State leaves with the layers first; None for counts."""
    if ".layers." not in path:
        return None
    if not tree.is_named(leaves[0]):
        return [np.asarray(leaf) for leaf in leaves]
    return [np.asarray(leaf.rearrange((LAYERS, ...)).array) for leaf in leaves]


def planned(**keys):
    config = RunConfig(model=MODEL, phases=[PhaseConfig(name="a", num_train_steps=20, trainable=["attn"], **keys)])
    return plan_phases(config)[0]


def test_a_bad_step_guard_does_not_go_with_a_loss_that_jumps():
    sequential = Blockwise(order="sequential", convergence=Convergence(max_steps=10))
    guarded = AdamConfig(skip_bad_steps=True)
    assert planned(objective=sequential)[0].num_steps == 10
    assert planned(objective=Blockwise(), optimizer=guarded)[0].num_steps == 20
    with pytest.raises(ConfigError, match="the loss jumps where objective blockwise goes on to the next block"):
        planned(objective=sequential, optimizer=guarded)


@pytest.mark.parametrize("order", ["parallel", "sequential"])
def test_a_trend_of_weights_that_are_held_back_is_refused(order):
    objective = {"order": order, "convergence": {"max_steps": 10}}
    run = merged(BASES["blockwise"], {"objective": objective, "optimizer": {"type": "portfolio"}})
    assert outcome_of(run).error == ""
    message = r"^phase 'p': optimizer\.nowcast: given, but objective\.type: blockwise slows down or stops single layers"
    assert re.search(message, outcome_of(merged(run, {"optimizer": {"nowcast": {}}})).error)
    assert outcome_of(merged(BASES["portfolio"], {"optimizer": {"nowcast": {}}})).error == ""


def test_an_optimizer_that_starts_anew_for_each_block_is_not_carried():
    sequential = Blockwise(order="sequential", convergence=Convergence(max_steps=10))
    phases = [PhaseConfig(name=name, num_train_steps=20, trainable=["attn"]) for name in "ab"]
    for first, second in ((sequential, NextToken()), (NextToken(), sequential)):
        own = [
            dataclasses.replace(phases[0], objective=first),
            dataclasses.replace(phases[1], objective=second, carry_optimizer=True),
        ]
        with pytest.raises(ConfigError, match="objective blockwise starts the optimizer and its schedule anew"):
            plan_phases(RunConfig(model=MODEL, phases=own))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cache": "int8", "target": "mixing"}, "int8 given with target: mixing"),
        (
            {"convergence": Convergence(max_steps=1, min_steps=2)},
            r"convergence\.max_steps: 1 given, but min_steps is 2",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_fields(Blockwise(**keys))


def test_a_phase_that_is_too_short_for_its_blocks_or_does_not_say_how_long_they_are_is_refused():
    with pytest.raises(ConfigError, match=r"sequential given without convergence\.max_steps"):
        Blockwise(order="sequential").scheduled_steps(20, MODEL)
    objective = Blockwise(order="sequential", convergence=Convergence(max_steps=11))
    with pytest.raises(ConfigError, match="num_train_steps: 20 given, but 2 blocks train one after the other"):
        objective.scheduled_steps(20, MODEL)
    assert objective.scheduled_steps(22, MODEL) == 11


def test_int8_vectors_are_off_by_at_most_half_a_step():
    axes = (hax.Axis("layers", 2), hax.Axis("batch", 3), hax.Axis("position", 4), hax.Axis("embed", 8))
    array = hax.named(jnp.asarray(np.random.default_rng(0).normal(0, 2, (2, 3, 4, 8)), jnp.float32), axes)
    array = hax.named(array.array.at[0, 0, 0].set(0), axes)
    stored = Int8Array.of(array)
    error = np.abs((stored.floats(jnp.float32) - array).array)
    assert (error <= np.abs(array.array).max(-1, keepdims=True) / 127 / 2 * 1.001).all()
    assert stored.values.array.dtype == jnp.int8
