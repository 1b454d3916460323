"""Muon with everything that nanochat adds to it: against its numbers in float64, singular values, and one device."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.sharding import Layout
from jaxlm.engine.state import sharded_shapes, shardings
from jaxlm.hardware.hlo import Program
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.models.base import vocab_axis
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.optim.groups import build_optimizer, parameter_groups
from jaxlm.optim.muon import MuonConfig
from jaxlm.optim.orthogonal import POLAR_EXPRESS, QUINTIC, NorMuonState, newton_schulz
from jaxlm.optim.schedules import MomentumSchedule, decay_factor
from tests.engine.helpers import MESHES, TinyRun, layout, one_device, phase
from tests.engine.helpers import arrays as tokens
from tests.hardware.helpers import collectives
from tests.optim.test_family import config_of

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "nanochat_optimizers.json").read_text())
SHAPES = {"24x8": (24, 8), "8x24": (8, 24), "8x8": (8, 8)}
COMMON = {"lr_schedule": "constant", "warmup": 0, "max_grad_norm": None}
SEED: dict[str, Any] = COMMON | {
    "learning_rate": 0.02,
    "momentum_ema": True,
    "coefficient_type": "polar_express",
    "norm_factor": 1.02,
    "muon_epsilon": 1e-6,
    "normuon_beta2": 0.95,
    "scale_weight_decay": True,
    "cautious_weight_decay": True,
}
HEAD = SEED | {"norm_factor": 1.01, "normuon_beta2": 0.9, "row_equilibration": True, "renormalize": True}
RECIPES = {"seed": SEED, "head": HEAD}
# Whose first three values are those of the vectors: 0.85, 0.87, 0.89.
RISING = {"momentum": 0.95, "momentum_schedule": {"initial": 0.85, "warmup": 5}}
STEPS = 3


def uniform(number: int, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Numbers between -scale and scale from a 64-bit counter, whose upper half is `number`."""
    z = (np.uint64(number) << np.uint64(32)) + np.arange(np.prod(shape), dtype=np.uint64)
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return scale * (2 * (z >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 1).reshape(shape)


def layer(weight: np.ndarray) -> dict[str, Linear]:
    """Stacked layers with weights [layers, out, in]."""
    Layers, Out, In = (hax.Axis(name, size) for name, size in zip(("layers", "out", "into"), weight.shape, strict=True))
    return {"w": Linear(hax.named(jnp.asarray(weight, jnp.float32), (Layers, Out, In)), None, In, Out)}


def steps(config: Any, first: np.ndarray, gradients: list[np.ndarray]) -> Iterator[tuple[np.ndarray, Any]]:
    """The weights and the optimizer state after each step."""
    params = layer(first)
    optimizer = build_optimizer(config, parameter_groups(params, config), 100)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for gradient in gradients:
        updates, state = update(layer(gradient), state, params)
        params = optax.apply_updates(params, updates)
        yield np.asarray(params["w"].weight.array, np.float64), state


def inputs(shape: tuple[int, int]) -> tuple[np.ndarray, list[np.ndarray]]:
    return uniform(700, (2, *shape), 0.1), [uniform(710 + step, (2, *shape), 0.001) for step in range(STEPS)]


def part(state: Any, kind: type) -> Any:
    """The state of one kind in an optimizer's state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return next(node for node in nodes if isinstance(node, kind))


def assert_summary(found: Any, expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Against the sums, the norm and the first elements of an array."""
    flat = np.asarray(found, np.float64).ravel()
    largest = np.abs(flat).max()
    np.testing.assert_allclose(flat[:8], expected["first8"], rtol=tolerance, atol=tolerance * largest)
    np.testing.assert_allclose(flat.sum(), expected["sum"], rtol=0, atol=tolerance * expected["abssum"])
    np.testing.assert_allclose(np.abs(flat).sum(), expected["abssum"], rtol=tolerance)
    np.testing.assert_allclose(np.linalg.norm(flat), expected["l2"], rtol=tolerance)


def without_decay(recipe: str, **changes: Any) -> Any:
    """A recipe whose updates, from weights of 0 and with a learning rate of 1, are minus the scaled directions."""
    return config_of("muon", **RECIPES[recipe] | RISING | {"weight_decay": 0.0, "learning_rate": 1.0} | changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", VECTORS["muon"])
def test_three_steps_match_nanochat(name):
    recipe, shape_name = name.split("_")
    shape, expected = SHAPES[shape_name], VECTORS["muon"][name]
    config = config_of("muon", **RECIPES[recipe] | RISING, weight_decay=expected["wd"])
    assert (config.learning_rate, config.normuon_beta2) == (expected["lr"], expected["beta2"])
    before, gradients = inputs(shape)
    directions = np.diff(
        [np.zeros_like(before), *(w for w, _ in steps(without_decay(recipe), 0 * before, gradients))], axis=0
    )
    for want, direction, (weights, state) in zip(
        expected["steps"], -directions, steps(config, before, gradients), strict=True
    ):
        assert np.sum(direction * before >= 0) == want["cautious_mask_count"]
        assert_summary(weights, want["params"])
        assert_summary(part(state, NorMuonState).squares["w.weight"].array, want["second"])
        momentum = next(leaf for path, leaf in tree.leaves(state) if path.endswith("mean.w.weight"))
        np.testing.assert_allclose(np.linalg.norm(momentum.array), want["momentum_buffer_l2"], rtol=1e-5)
        before = weights


@pytest.mark.parametrize("name", VECTORS["muon"])
def test_singular_values_match_nanochat(name):
    """Those of the orthogonalized momentum, before NorMuon changes them."""
    recipe, shape_name = name.split("_")
    shape = SHAPES[shape_name]
    config = without_decay(recipe, normuon_beta2=None, renormalize=False)
    before, gradients = inputs(shape)
    weights = [np.zeros_like(before), *(w for w, _ in steps(config, 0 * before, gradients))]
    for want, change in zip(VECTORS["muon"][name]["steps"], np.diff(weights, axis=0), strict=True):
        found = np.linalg.svd(change / np.sqrt(max(1, shape[0] / shape[1])), compute_uv=False)
        np.testing.assert_allclose([found.min(), found.max()], want["ortho_sv_min_max"], rtol=1e-5)


@pytest.mark.parametrize("name", ["seed_24x8", "head_8x24"])
def test_three_steps_in_bfloat16_match_nanochat(name):
    recipe, shape_name = name.split("_")
    expected = VECTORS["muon"][name]
    keys = RECIPES[recipe] | RISING | {"orthogonalization_dtype": "bfloat16", "weight_decay": expected["wd"]}
    before, gradients = inputs(SHAPES[shape_name])
    for want, (weights, _) in zip(expected["steps"], steps(config_of("muon", **keys), before, gradients), strict=True):
        assert_summary(weights, want["params"], 1e-2)


@pytest.mark.parametrize(("dtype", "found"), [("bfloat16", "bf16"), ("float32", "f32"), (None, "f32")])
def test_the_iterations_are_in_the_dtype_that_is_set(dtype, found):
    config = config_of("muon", **HEAD | {"orthogonalization_dtype": dtype})
    params = layer(uniform(700, (2, 8, 8), 0.1))
    optimizer = build_optimizer(config, parameter_groups(params, config), 100)
    text = jax.jit(optimizer.update).lower(params, optimizer.init(params), params).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all(line.endswith(f"-> tensor<2x8x8x{found}>") for line in products)


def test_coefficients_are_not_rounded_to_bfloat16():
    """Against float64. Rounded coefficients grow small singular values by a few percent less, in every step."""
    rng = np.random.default_rng(0)
    left, _, right = np.linalg.svd(rng.normal(size=(64, 96)), full_matrices=False)
    given = (left * np.exp(-np.arange(64) / 12)) @ right
    exact = given / (1.02 * np.linalg.norm(given))
    for a, b, c in POLAR_EXPRESS:
        gram = exact @ exact.T
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    iterate = functools.partial(newton_schulz, num_steps=5, epsilon=1e-6, coefficients=POLAR_EXPRESS, norm_factor=1.02)
    found = np.asarray(iterate(jnp.asarray(given, jnp.float32), dtype=jnp.bfloat16), np.float64)
    assert np.sum(found * given) / np.sum(exact * given) == pytest.approx(1, abs=6e-3)


def test_adamw_as_a_group_matches_nanochat():
    """The parameters that nanochat gives to AdamW are entries of `optimizer.groups`."""
    expected = VECTORS["adamw"]
    beta1, beta2 = expected["betas"]
    entry = {"match": "^table", "type": "adam", "beta1": beta1, "beta2": beta2, "epsilon": expected["eps"]}
    entry |= {"learning_rate": expected["lr"], "weight_decay": expected["wd"]}
    config = config_of("muon", **SEED, groups=[entry])
    Rows, Columns = hax.make_axes(rows=6, columns=5)
    table = lambda number, scale: hax.named(jnp.asarray(uniform(number, (6, 5), scale), jnp.float32), (Rows, Columns))  # noqa: E731
    params = {"table": table(800, 0.5), **layer(uniform(700, (2, 8, 8), 0.1))}
    optimizer = build_optimizer(config, parameter_groups(params, config), 100)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for step, want in enumerate(expected["steps"]):
        gradient = {"table": table(801 + step, 0.01), **layer(uniform(710 + step, (2, 8, 8), 0.001))}
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        assert_summary(params["table"].array, want)


def polar(matrix: np.ndarray, config: Any) -> np.ndarray:
    """Applies the polynomials to the singular values."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / (np.linalg.norm(matrix) * config.norm_factor + config.muon_epsilon)
    rows = QUINTIC if config.coefficient_type == "quintic" else POLAR_EXPRESS
    for a, b, c in [*rows, *[rows[-1]] * config.backend_steps][: config.backend_steps]:
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


def muon_by_hand(
    config: Any, first: np.ndarray, gradients: list[np.ndarray], flipped: tuple[int, ...] = ()
) -> Iterator[np.ndarray]:
    """Each matrix by itself, in float64.

    Args:
        flipped: (step, matrix, row, column) of an element whose decay is kept if it should be left out, or left out if kept.
    """
    weights, means, squares = first.copy(), np.zeros_like(first), [0.0] * len(first)
    schedule = config.momentum_schedule
    for step, gradient in enumerate(gradients):
        beta = config.momentum
        if schedule is not None and step < schedule.warmup:
            beta = schedule.initial + (config.momentum - schedule.initial) * step / schedule.warmup
        new = 1 - beta if config.momentum_ema else 1.0
        means = beta * means + new * gradient
        ahead = beta * means + new * gradient if config.nesterov else means
        for number, matrix in enumerate(ahead):
            out, into = matrix.shape
            if config.row_equilibration:
                matrix = matrix * (
                    np.linalg.norm(matrix) / np.sqrt(out) / np.linalg.norm(matrix, axis=1, keepdims=True)
                )
            x = polar(matrix, config)
            if config.renormalize:
                x = x * np.sqrt(min(out, into)) / np.linalg.norm(x)
            if config.normuon_beta2 is not None:
                mean = (x**2).mean(axis=1 if out >= into else 0, keepdims=True)
                squares[number] = config.normuon_beta2 * squares[number] + (1 - config.normuon_beta2) * mean
                y = x / np.sqrt(squares[number])
                x = y * np.linalg.norm(x) / np.linalg.norm(y)
            scale = 0.2 * np.sqrt(max(out, into)) if config.use_kimi_scaling else np.sqrt(max(1, out / into))
            decay = config.weight_decay * {"constant": 1, "linear": 1 - step / 100}.get(
                config.weight_decay_schedule, (1 + np.cos(np.pi * step / 100)) / 2
            )
            decay = decay * (scale if config.scale_weight_decay else 1.0)
            kept = x * weights[number] >= 0 if config.cautious_weight_decay else 1.0
            if flipped and flipped[:2] == (step, number):
                kept[flipped[2:]] ^= True
            weights[number] = weights[number] - config.learning_rate * (scale * x + decay * weights[number] * kept)
        yield weights.copy()


ALONE: dict[str, dict[str, Any]] = {
    "polar express, 7 iterations": {"coefficient_type": "polar_express", "norm_factor": 1.05, "backend_steps": 7},
    "mean without Nesterov": {"momentum_ema": True, "nesterov": False} | RISING,
    "sum that changes": RISING,
    "MuonEq": {"row_equilibration": True},
    "Muon+": {"renormalize": True},
    "NorMuon": {"normuon_beta2": 0.5, "use_kimi_scaling": True},
    "cautious": {"cautious_weight_decay": True},
    "scaled decay": {"scale_weight_decay": True, "use_kimi_scaling": True},
    "linear decay": {"weight_decay_schedule": "linear"},
    "cosine decay": {"weight_decay_schedule": "cosine", "cautious_weight_decay": True},
}


# What these do depends on whether a matrix is tall or wide.
OF_SHAPE = ("MuonEq", "NorMuon", "scaled decay")


@pytest.mark.parametrize("name", ALONE)
def test_each_option_alone_matches_float64(name):
    # A large learning rate and decay, so that both show.
    config = config_of("muon", **COMMON | {"learning_rate": 0.1, "weight_decay": 0.9} | ALONE[name])
    for shape in (SHAPES["24x8"], SHAPES["8x24"])[: 1 + (name in OF_SHAPE)]:
        before, gradients = uniform(1, (2, *shape), 1.0), [uniform(2 + step, (2, *shape), 1.0) for step in range(4)]
        expected = list(muon_by_hand(config, before, gradients))
        found = [weights for weights, _ in steps(config, before, gradients)]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def test_cautious_decay_is_float64s_but_for_an_update_that_is_0_to_float32():
    """The sign of an update decides whether an element decays. With this gradient, the exact update of one element in step 6
    is 1.5e-10 where updates are some 0.3, so float32 may see either sign. That one decision moves its weight by 1.2e-4; all
    other elements agree to rounding."""
    keys = {"learning_rate": 0.02, "weight_decay": 0.1, "cautious_weight_decay": True, "scale_weight_decay": True}
    config = config_of("muon", **COMMON, **keys, weight_decay_schedule="cosine")
    rounded = lambda number, scale: uniform(number, (1, 8, 8), scale).astype(np.float32).astype(np.float64)  # noqa: E731
    before, gradients = rounded(4300, 0.1), [rounded(4301 + step, 1.0) for step in range(14)]
    element = (6, 0, 0, 0)  # step, matrix, row, column
    gradients[6][0, 0, 0] = np.float32(-0.16647687554359436)
    undecayed = dataclasses.replace(config, weight_decay=0.0)
    *_, fifth, sixth = muon_by_hand(undecayed, before, gradients[:7])
    assert abs(fifth - sixth)[0, 0, 0] / 0.02 < 1e-9
    assert np.median(abs(fifth - sixth)) / 0.02 > 0.1
    expected, other = (list(muon_by_hand(config, before, gradients, flipped))[-1] for flipped in ((), element))
    difference = abs(expected - other)
    assert difference[0, 0, 0] == pytest.approx(1.24e-4, rel=0.01)
    assert (difference > 0).sum() == 1
    found = [weights for weights, _ in steps(config, before, gradients)][-1]
    assert min(abs(found - outcome)[0, 0, 0] for outcome in (expected, other)) < 3e-7
    found[0, 0, 0] = expected[0, 0, 0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-7)


def test_options_of_the_decay_act_on_all_parameters_of_the_optimizer():
    """The parameters that Adam updates decay cautiously and by the schedule too; the shape's scale is that of matrices."""
    keys = {"cautious_weight_decay": True, "weight_decay_schedule": "linear", "scale_weight_decay": True}
    config = config_of("muon", **COMMON | {"learning_rate": 0.5, "adam_lr": 0.25, "weight_decay": 0.9} | keys)
    Embed = hax.Axis("embed", 4)
    start, gradient = jnp.array([1.0, 1.0, -1.0, -1.0]), jnp.array([1.0, -1.0, 1.0, -1.0])
    params = {"mix": hax.named(start, Embed)}
    optimizer = build_optimizer(config, parameter_groups(params, config), 10)
    state, weights = optimizer.init(params), np.asarray(start, np.float64)
    for step in range(3):
        updates, state = jax.jit(optimizer.update)({"mix": hax.named(gradient, Embed)}, state, params)
        params = optax.apply_updates(params, updates)
        sign = np.sign(gradient)  # Adam's direction for a constant gradient
        weights = weights - 0.25 * (sign + 0.9 * (1 - step / 10) * weights * (sign * weights >= 0))
        np.testing.assert_allclose(params["mix"].array, weights, rtol=1e-5)


def test_a_matrix_without_gradient_only_decays():
    """As the experts that no token chose: no NaN, and the decay follows both schedules."""
    schedules = {"warmup": 4, "warmup_from_zero": False, "lr_schedule": "linear", "weight_decay_schedule": "cosine"}
    config = config_of("muon", **HEAD | {"weight_decay": 0.3, "min_lr_ratio": 0.0, "decay": 50} | schedules)
    before = uniform(5, (2, 24, 8), 1.0)
    found, _ = list(steps(config, before, [0 * before] * 6))[-1]
    for step in range(6):
        rate = 0.02 * min((step + 1) / 4, 1) * np.sqrt(3)
        before = before * (1 - rate * 0.3 * (1 + np.cos(np.pi * step / 100)) / 2)
    np.testing.assert_allclose(found, before, rtol=1e-5)


@pytest.mark.slow
def test_schedules_match_the_seed_of_nanochat():
    expected = VECTORS["schedules"]
    num_steps = expected["num_iterations"]
    config = config_of("muon", learning_rate=1.0, lr_schedule="linear", warmup=0, decay=0.5, min_lr_ratio=0.0)
    rate = config.schedule(num_steps)
    assert rate.segments[-1].length == expected["warmdown_iters"]
    momentum = MomentumSchedule(initial=0.85, warmup=300).build(0.95, rate, num_steps)
    decay = decay_factor("linear", num_steps)
    it, lrm, beta, wd = (np.array([row[name] for row in expected["rows"]]) for name in ("it", "lrm", "momentum", "wd"))
    steps = jnp.asarray(it, jnp.int32)
    np.testing.assert_allclose(rate(steps), lrm, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(momentum(steps), beta, rtol=1e-6)
    np.testing.assert_allclose(decay(steps), wd / 0.2, rtol=1e-5, atol=1e-7)


def test_schedules_match_the_head_of_nanochat():
    num_steps, warmup, decay = 2520, 40, 1638
    config = config_of(
        "muon",
        **{"learning_rate": 0.02, "lr_schedule": "linear", "warmup": warmup, "warmup_from_zero": False},
        **{"decay": decay, "min_lr_ratio": 0.05, "momentum": 0.97, "momentum_schedule": {"warmup": 400, "final": 0.9}},
    )
    rate = config.schedule(num_steps)
    momentum = config.momentum_schedule.build(config.momentum, rate, num_steps)
    found = jax.jit(
        jax.vmap(lambda step: jnp.stack([rate(step), momentum(step), decay_factor("cosine", num_steps)(step)]))
    )(np.arange(num_steps + 1))
    for step, values in enumerate(np.asarray(found, np.float64)):
        left = (num_steps - step) / decay
        factor = (step + 1) / warmup if step < warmup else 1.0 if left >= 1 else left + (1 - left) * 0.05
        beta = 0.85 + 0.12 * step / 400 if step < 400 else 0.97 if left >= 1 else 0.97 * left + 0.9 * (1 - left)
        cosine = 0.5 * (1 + np.cos(np.pi * step / num_steps))
        np.testing.assert_allclose(values, [0.02 * factor, beta, cosine], rtol=1e-5, atol=1e-7, err_msg=f"step {step}")


def test_a_phase_that_is_shorter_than_the_warmup_of_the_momentum_does_not_shorten_it():
    rate = config_of("muon", lr_schedule="linear", warmup=0, decay=50).schedule(100)
    momentum = MomentumSchedule(initial=0.5, warmup=200, final=0.1).build(0.9, rate, 100)
    np.testing.assert_allclose([momentum(jnp.asarray(step)) for step in (0, 50, 99)], [0.5, 0.6, 0.698], rtol=1e-6)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no decay": (
        {"momentum_schedule": {"final": 0.9}, "lr_schedule": "constant"},
        r"^optimizer\.momentum_schedule\.final: 0\.9 given, but the learning rate does not decay",
    ),
    "half a step": (
        {"momentum_schedule": {"warmup": 2.5}},
        r"^optimizer\.momentum_schedule\.warmup: 2\.5 given\. Allowed: a fraction",
    ),
    "factor": ({"norm_factor": 0.9}, r"optimizer\.norm_factor: 0\.9 given, a finite number of 1 or more"),
    "mean": ({"normuon_beta2": 1.0}, r"optimizer\.normuon_beta2: 1\.0 given"),
    "initial": ({"momentum_schedule": {"initial": 1.5}}, r"optimizer\.momentum_schedule\.initial: 1\.5 given"),
    "dtype": ({"orthogonalization_dtype": "float16"}, r"optimizer\.orthogonalization_dtype: '?float16'? given"),
    "polynomial": ({"coefficient_type": "aol"}, r"optimizer\.coefficient_type: '?aol'? given"),
    "schedule": ({"weight_decay_schedule": "inv"}, r"optimizer\.weight_decay_schedule: '?inv'? given"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused(name):
    keys, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        next(steps(config_of("muon", **keys), *inputs((8, 8))))


# Sides that FSDP or tensor parallelism divides (embed 32, mlp 64, 4 heads), and numbers of layers that they do not.
def transformer() -> dict[str, Any]:
    Layers, Experts, Heads, Size, Embed, Mlp = hax.make_axes(
        layers=3, experts=2, heads=4, head_size=8, embed=32, mlp=64
    )
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def weight(*axes: hax.Axis) -> hax.NamedArray:
        return hax.random.normal(next(keys), axes)

    return {
        "q": Linear(weight(Layers, Heads, Size, Embed), None, Embed, (Heads, Size)),
        "o": Linear(weight(Layers, Heads, Size, Embed), None, (Heads, Size), Embed),
        "up": Linear(weight(Layers, Embed, Mlp), None, Embed, Mlp),
        "down": Linear(weight(Layers, Mlp, Embed), None, Mlp, Embed),
        "experts": ExpertLinear(weight(Layers, Experts, Embed, Mlp), Embed, Mlp),
        "plain": jax.random.normal(next(keys), (8, 8)),
        "norm": {"weight": weight(Layers, Embed)},
    }


# Matrices by shape, in the form [number, shorter side, longer side]: q and o, up, down and the experts, plain.
STACKS = [(6, 32, 32), (12, 32, 64), (1, 8, 8)]


def sharded_steps(where: Layout, config: Any) -> tuple[list[dict[str, np.ndarray]], Any]:
    """The updates of three steps, and the compiled update."""
    params = transformer()
    optimizer = build_optimizer(config, parameter_groups(params, config), 100)
    with where.use():
        params, state = (jax.device_put(x, shardings(x, where)) for x in (params, optimizer.init(params)))
        update = jax.jit(lambda g, s, p: optimizer.update(g, s, p), out_shardings=shardings((params, state), where))
        compiled = update.lower(params, state, params).compile()
        found = []
        for scale in (1.0, -0.5, 2.0):
            gradient = jax.tree.map(lambda p, s=scale: jnp.sin(s * p * 3), params)
            updates, state = compiled(jax.device_put(gradient, shardings(gradient, where)), state, params)
            found.append({path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(updates)})
    return found, compiled


@functools.cache
def on_one_device(recipe: str) -> tuple[Any, list[dict[str, np.ndarray]], Any]:
    config = config_of("muon", **HEAD | RISING if recipe == "head" else COMMON)
    return config, *sharded_steps(one_device(), config)


# Each mesh, and each recipe; how the matrices are shared does not depend on what is done to them.
SHARED = [("muon", name) for name in MESHES] + [("head", "tp 2 x fsdp 4")]


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        pytest.param(recipe, name, marks=pytest.mark.slow if (recipe, name) in SHARED else pytest.mark.soak)
        for recipe in ("muon", "head")
        for name in MESHES
    ],
)
def test_eight_devices_share_the_matrices_and_find_the_same(recipe, name):
    config, expected, alone = on_one_device(recipe)
    where = layout(**MESHES[name])
    found, shared = sharded_steps(where, config)
    for ours, one in zip(found, expected, strict=True):
        for path, update in one.items():
            np.testing.assert_allclose(ours[path], update, rtol=1e-4, atol=2e-5 * np.abs(update).max(), err_msg=path)
    sharing = 8 // where.mesh.shape["replica"]
    most = sum(-(-number // sharing) * iteration_flops(*sides) for number, *sides in STACKS)
    whole = sum(number * iteration_flops(*sides) for number, *sides in STACKS)
    assert product_flops(alone) == config.backend_steps * whole
    assert product_flops(shared) == config.backend_steps * most
    # Whole matrices move once there and once back, and never all of them to one device.
    moved = collectives(shared.as_text())
    kinds = {
        collective.kind for collective in moved if len(collective.shape) > 2 and np.prod(collective.shape) > 32 * 32
    }
    assert kinds <= ({"all-gather"} if name == "ddp 8" else {"all-to-all"})


def iteration_flops(short: int, long: int) -> int:
    """Of one iteration: the Gram matrix, its square, and the product with the matrix."""
    return 2 * short * short * (long + short + long)


def product_flops(compiled: Any) -> int:
    """FLOPs of the matrix products that one device does."""
    total = 0
    for computation in Program.parse(compiled.as_text()).computations.values():
        for product in (i for i in computation.values() if i.opcode == "dot"):
            (contracted,) = re.search(r"lhs_contracting_dims=\{(\d+)\}", product.line).groups()
            total += 2 * math.prod(product.shape) * computation[product.operands[0]].shape[int(contracted)]
    return total


@pytest.mark.slow
def test_muon_costs_less_than_two_percent_of_a_step_of_half_a_million_tokens():
    """12 layers of width 768 on eight devices with FSDP, as XLA counts the compiled update. Nothing runs."""
    model = Gpt2Config(seq_len=2048, num_heads=6, use_bias=False, tie_word_embeddings=False)
    axes = {"embed": 768, "mlp": 3072, "heads": 6, "head_size": 128, "vocab": 32768, "layers": 12}
    where = make_layout(mesh_shape(8), AxisMappings("batch", ("embed",), (), {}, {}), axes)
    params = jax.eval_shape(lambda: model.build(vocab_axis(32768), key=jax.random.key(0)))
    config = config_of("muon", **HEAD | RISING)
    optimizer = build_optimizer(config, parameter_groups(params, config), 2205)
    abstract = sharded_shapes((params, jax.eval_shape(optimizer.init, params)), where)
    with where.use():
        placed = shardings((params, abstract[1]), where)
        update = jax.jit(lambda g, s, p: optimizer.update(g, s, p), out_shardings=placed)
        compiled = update.lower(abstract[0], abstract[1], abstract[0]).compile()
    iterations = config.backend_steps * (48 * iteration_flops(768, 768) + 24 * iteration_flops(768, 3072))
    assert 8 * product_flops(compiled) == iterations  # all eight together do what one device would
    found = 8 * compiled.cost_analysis()["flops"]
    assert iterations < found < 1.02 * iterations
    assert found < 0.02 * model.flops_per_token(32768).causal * 2**19


@pytest.mark.soak
@pytest.mark.parametrize("name", MESHES)
def test_a_run_with_every_option_is_the_same_on_eight_devices(name):
    head = HEAD | {"learning_rate": 3e-3, "weight_decay": 0.3, "momentum_schedule": {"warmup": 6, "final": 0.8}}
    groups = [{"match": "tokens|norm", "type": "adam", "learning_rate": 3e-3, "beta1": 0.8, "epsilon": 1e-10}]
    keys = {"lr_schedule": "linear", "decay": 0.5, "min_lr_ratio": 0.0, "weight_decay_schedule": "cosine"}
    own = phase(optimizer=config_of("muon", **head | keys, groups=groups))
    losses = [
        [run.step(tokens(number % 4))["train/loss"] for number in range(12)]
        for run in (TinyRun(where, own) for where in (one_device(), layout(**MESHES[name])))
    ]
    assert losses[0][-1] < losses[0][0] - 0.1
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_a_run_without_the_options_keeps_its_state():
    """A checkpoint from before continues: the options add state only where they are set."""
    params = layer(np.ones((2, 8, 8)))
    paths = lambda config: [  # noqa: E731
        path for path, _ in tree.leaves(build_optimizer(config, parameter_groups(params, config), 9).init(params))
    ]
    before = paths(MuonConfig())
    assert [path for path in before if path.endswith("weight")] == ["1.inner_states.muon.inner_state.0.trace.w.weight"]
    more = set(paths(dataclasses.replace(MuonConfig(), normuon_beta2=0.9, cautious_weight_decay=True))) - set(before)
    assert len(more) == 2
