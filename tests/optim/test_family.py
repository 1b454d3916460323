"""Every optimizer against the published algorithm in numpy float64, one row each; optimizer fields and masks."""

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.models.linear import Linear
from jaxlm.optim import clipping as limits
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.clipping import ClipUpdateNorm, clip_by_rms
from jaxlm.optim.curvature import Curvature
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.groups import build_optimizer, parameter_groups
from jaxlm.optim.orthogonal import newton_schulz
from jaxlm.optim.soap import _eigenvectors
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource

LAYERS, HEADS, SIZE, EMBED = hax.make_axes(layers=2, heads=2, head_size=3, embed=4)
VOCAB, VALUE_LAYERS = hax.Axis("vocab", 5), hax.Axis("value_layers", 2)
STEPS = 6
Arrays = dict[str, np.ndarray]


def arrays(seed: int, scale: float = 1.0) -> Arrays:
    """A projection with two layers, a norm, and a head: {path: array}."""
    rng = np.random.default_rng(seed)
    shapes = {"q.weight": (2, 2, 3, 4), "norm.weight": (2, 4), "head.weight": (5, 4)}
    return {path: scale * rng.normal(size=shape) for path, shape in shapes.items()}


def model(of: Arrays) -> dict[str, Any]:
    named = lambda path, *axes: hax.named(jnp.asarray(of[path], jnp.float32), axes)  # noqa: E731
    return {
        "q": Linear(named("q.weight", LAYERS, HEADS, SIZE, EMBED), None, EMBED, (HEADS, SIZE)),
        "norm": {"weight": named("norm.weight", LAYERS, EMBED)},
        "head": Linear(named("head.weight", VOCAB, EMBED), None, EMBED, VOCAB),
    }


def flat(params: Any) -> Arrays:
    return {path: np.asarray(leaf.array) for path, leaf in tree.leaves(params)}


def curvature(number: int | jax.Array = 0) -> Curvature:
    """The curvature of a loss whose gradient is 3 p**3 + c (c . p), at the given step."""
    c = model(arrays(99))

    def gradient(params: Any) -> Any:
        dot = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(c), jax.tree.leaves(params), strict=True))
        return jax.tree.map(lambda p, c: 3 * p**3 + c * dot, params, c)

    return Curvature(gradient, lambda: jax.random.fold_in(jax.random.PRNGKey(7), number))


def stepper(config: OptimizerConfig) -> tuple[Any, Any, Callable]:
    params = model(arrays(0))
    optimizer = build_optimizer(config, parameter_groups(params, config), STEPS)

    @jax.jit
    def step(params, state, gradient, number=0):
        updates, state = optimizer.update(gradient, state, params, curvature=curvature(number))
        return optax.apply_updates(params, updates), state

    return params, optimizer.init(params), step


def trained(config: OptimizerConfig, scale: float) -> Arrays:
    params, state, step = stepper(config)
    for number in range(STEPS):
        params, state = step(params, state, model(arrays(number + 1, scale)), number)
    return flat(params)


def clipped(gradient: Arrays, most: float | None) -> Arrays:
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    shrink = 1.0 if most is None else min(1.0, most / norm)
    return {k: g * shrink for k, g in gradient.items()}


def adam_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    out = {}
    for k, g in gradient.items():
        mean, square = memory.get(k, (0.0, 0.0))
        mean, square = c.beta1 * mean + (1 - c.beta1) * g, c.beta2 * square + (1 - c.beta2) * g**2
        memory[k] = mean, square
        ahead = mean / (1 - c.beta1**t)
        if getattr(c, "nesterov", False) and not hasattr(c, "momentum"):
            ahead = c.beta1 * mean / (1 - c.beta1 ** (t + 1)) + (1 - c.beta1) * g / (1 - c.beta1**t)
        out[k] = ahead / (np.sqrt(square / (1 - c.beta2**t)) + c.epsilon)
    return out


def adam_mini_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    """Blocks: an output of each layer's projection, a layer's norm, a token of the head."""
    within, out = {"q.weight": -1, "norm.weight": -1, "head.weight": -1}, {}
    for k, g in gradient.items():
        mean, square = memory.get(k, (0.0, 0.0))
        mean = c.beta1 * mean + (1 - c.beta1) * g
        square = c.beta2 * square + (1 - c.beta2) * (g * g).mean(axis=within[k], keepdims=True)
        memory[k] = mean, square
        out[k] = mean / (1 - c.beta1**t) / (np.sqrt(square / (1 - c.beta2**t)) + c.epsilon)
    return out


def mars_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    factor, before = c.gamma * c.beta1 / (1 - c.beta1), memory.get("before", gradient)
    memory["before"] = gradient
    corrected = {k: g + factor * (g - before[k]) for k, g in gradient.items()}
    memory["seen"] = clipped(corrected, c.max_grad_norm)
    return adam_direction(memory["seen"], memory, t, c)


def cautious(steps: Arrays, gradient: Arrays) -> Arrays:
    """One layer after the other, as in the paper: without what points against the gradient, scaled up for it."""

    def masked(step: np.ndarray, g: np.ndarray) -> np.ndarray:
        agrees = step * g > 0
        return np.where(agrees, step, 0.0) * step.size / (agrees.sum() + 1)

    by_layer = {k: np.stack([masked(*pair) for pair in zip(steps[k], gradient[k], strict=True)]) for k in steps}
    return by_layer | {"head.weight": masked(steps["head.weight"], gradient["head.weight"])}


def lion_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    out = {k: np.sign(c.beta1 * memory.get(k, 0.0) + (1 - c.beta1) * g) for k, g in gradient.items()}
    memory.update({k: c.beta2 * memory.get(k, 0.0) + (1 - c.beta2) * g for k, g in gradient.items()})
    return out


def adagrad_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    memory.update({k: memory.get(k, c.initial_accumulator_value) + g**2 for k, g in gradient.items()})
    return {k: g / np.sqrt(memory[k] + c.epsilon) for k, g in gradient.items()}


def orthogonal(matrix: np.ndarray, steps: int) -> np.ndarray:
    """Applies the polynomial to each singular value."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.linalg.norm(matrix)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ v


def muon_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    hidden = {"q.weight": gradient["q.weight"]}
    out = adam_direction({k: g for k, g in gradient.items() if k not in hidden}, memory, t, c)
    for k, g in hidden.items():
        memory[k] = c.momentum * memory.get(k, 0.0) + g
        ahead = c.momentum * memory[k] + g if c.nesterov else memory[k]
        layers = [orthogonal(layer.reshape(6, 4), c.backend_steps).reshape(2, 3, 4) for layer in ahead]
        out[k] = np.stack(layers) * (0.2 * np.sqrt(6) if c.use_kimi_scaling else np.sqrt(6 / 4))
    return out


def sophia_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    if t % c.update_interval == 1 % c.update_interval:
        params, vector = memory["params"], arrays(99)
        u = {k: v.astype(np.float64) for k, v in flat(curvature(t - 1).direction(model(params), c.rng_seed)).items()}
        along_c = sum((vector[k] * u[k]).sum() for k in u)
        for k in u:
            estimate = u[k] * (9 * params[k] ** 2 * u[k] + vector[k] * along_c)
            memory["h", k] = c.beta2 * memory.get(("h", k), 0.0) + (1 - c.beta2) * estimate
    memory.update({k: c.beta1 * memory.get(k, 0.0) + (1 - c.beta1) * g for k, g in gradient.items()})
    return {
        k: np.clip(memory[k] / np.maximum(c.gamma * memory["h", k], c.epsilon), -c.clip_threshold, c.clip_threshold)
        for k in gradient
    }


def kron_layer(g: np.ndarray, memory: dict, t: int, c: Any) -> np.ndarray:
    """For one matrix, E of the step Q <- (1 - E) Q (1 - E), and the norm that divides it, from eigenvalues."""
    start = np.sqrt(c.preconditioner_init_scale)
    mean = memory["mean"] = c.beta1 * memory.get("mean", 0.0) + (1 - c.beta1) * g
    roots = [memory.setdefault(side, start * np.eye(size)) for side, size in enumerate(g.shape)]
    left, right = (root @ root for root in roots)
    white = left @ mean @ right / (1 - c.beta1**t)
    for side, (own, other, x) in enumerate([(left, right, white), (right, left, white.T)]):
        n = x.shape[1]
        found = x @ x.T + c.damping**2 * np.linalg.norm(other) ** 2 * own @ own
        diagonal = len(x) > c.max_dense_size
        found = np.diag(np.diag(found)) if diagonal else found
        values = np.linalg.eigvalsh(found)
        norm = values.max() if diagonal else np.sqrt((values**4).sum() / (values**2).sum())
        before = memory.get((side, "steepness"), 0.0)
        memory[side, "steepness"] = steepness = max(0.9 * before + 0.1 * (norm + n), norm + n)
        turn = np.eye(len(x)) - 0.5 * c.preconditioner_lr / steepness * (found - n * np.eye(len(x)))
        memory[side] = turn @ roots[side] @ turn
    by = np.sqrt(memory[1].max() / memory[0].max())
    memory[0], memory[1] = memory[0] * by, memory[1] / by
    most = c.update_rms_clipping
    return white if most is None else white / max(1.0, np.sqrt((white**2).mean()) / most)


def kron_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    out = adam_direction({k: g for k, g in gradient.items() if k != "q.weight"}, memory, t, c)
    layers = enumerate(gradient["q.weight"])
    found = [kron_layer(g.reshape(6, 4), memory.setdefault(layer, {}), t, c) for layer, g in layers]
    return out | {"q.weight": np.stack(found).reshape(2, 2, 3, 4)}


def soap_layer(g: np.ndarray, memory: dict, t: int, c: Any) -> np.ndarray:
    """Algorithms 3 and 4 of the paper for one matrix. The first step finds the bases, so Adam's count starts after it."""
    sides = [side for side, size in enumerate(g.shape) if size <= c.max_precond_dim]
    sides = [side for side in sides if not c.one_diag or g.shape[side] == min(g.shape)]
    products = {side: g @ g.T if side == 0 else g.T @ g for side in sides}
    bases = [memory.get(("basis", side), np.eye(size)) for side, size in enumerate(g.shape)]
    direction = np.zeros_like(g)
    if t > 1:
        mean = memory["mean"] = c.beta1 * memory.get("mean", 0.0) + (1 - c.beta1) * g
        turned, turned_mean = (bases[0].T @ x @ bases[1] for x in (g, mean))
        square = memory["square"] = c.beta2 * memory.get("square", 0.0) + (1 - c.beta2) * turned**2
        totals = [1 - beta ** (t - 1) for beta in (c.beta1, c.beta2)] if c.correct_bias else [1.0, 1.0]
        direction = turned_mean / totals[0] / (np.sqrt(square / totals[1]) + c.epsilon)
        direction = bases[0] @ direction @ bases[1].T
    for side, product in products.items():
        covariance = c.shampoo_beta * memory.get(("covariance", side), 0.0) + (1 - c.shampoo_beta) * product
        memory["covariance", side] = covariance
        if t == 1:
            values, vectors = np.linalg.eigh(covariance)
            known = vectors[:, values > 1e-12 * values[-1]][:, ::-1]
            memory["basis", side] = np.linalg.qr(known, mode="complete")[0]
        elif (t - 1) % c.precondition_frequency == 0:
            order = np.argsort(-np.diag(bases[side].T @ covariance @ bases[side]))
            memory["square"] = memory["square"].take(order, axis=side)
            memory["basis", side] = np.linalg.qr(covariance @ bases[side][:, order])[0]
    return direction


def soap_direction(gradient: Arrays, memory: dict, t: int, c: Any) -> Arrays:
    out = adam_direction({k: g for k, g in gradient.items() if k != "q.weight"}, memory, t, c)
    layers = enumerate(gradient["q.weight"])
    found = [soap_layer(g.reshape(6, 4), memory.setdefault(layer, {}), t, c) for layer, g in layers]
    return out | {"q.weight": np.stack(found).reshape(2, 2, 3, 4)}


DIRECTIONS = {
    "adam": adam_direction,
    "adam-mini": adam_mini_direction,
    "mars": mars_direction,
    "lion": lion_direction,
    "adagrad": adagrad_direction,
    "muon": muon_direction,
    "sophia-h": sophia_direction,
    "kron": kron_direction,
    "soap": soap_direction,
}
COMMON = {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup": 0}
# name of the case: (type, keys)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adam", {}),
    "adam, other numbers": ("adam", {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "max_grad_norm": 0.5}),
    "adam, nesterov": ("adam", {"nesterov": True, "max_grad_norm": None}),
    "adam, cautious": ("adam", {"cautious": True}),
    "adam-mini": ("adam-mini", {}),
    "adam-mini, other numbers": ("adam-mini", {"beta1": 0.5, "beta2": 0.8, "epsilon": 0.1, "max_grad_norm": None}),
    "mars": ("mars", {}),
    "mars, other numbers": ("mars", {"gamma": 0.5, "beta1": 0.5, "beta2": 0.8, "max_grad_norm": None}),
    "mars, cautious": ("mars", {"gamma": 0.1, "cautious": True}),
    "lion": ("lion", {}),
    "lion, cautious": ("lion", {"cautious": True, "beta1": 0.5}),
    "lion, other numbers": ("lion", {"beta1": 0.5, "beta2": 0.8, "max_grad_norm": 0.1}),
    "adagrad": ("adagrad", {}),
    "adagrad, other numbers": ("adagrad", {"initial_accumulator_value": 0.5, "epsilon": 0.1, "max_grad_norm": None}),
    "muon": ("muon", {}),
    "sophia-h": ("sophia-h", {"gamma": 3.0, "update_interval": 2}),
    "sophia-h, other numbers": (
        "sophia-h",
        {"gamma": 0.5, "beta1": 0.5, "beta2": 0.8, "clip_threshold": 0.3, "update_interval": 1, "rng_seed": 3},
    ),
    "muon, other numbers": ("muon", {"nesterov": False, "use_kimi_scaling": True, "backend_steps": 3, "momentum": 0.5}),
    "kron": ("kron", {}),
    "kron, one side": ("kron", {"max_dense_size": 5, "preconditioner_lr": 0.5, "update_rms_clipping": None}),
    "kron, other numbers": (
        "kron",
        {"beta1": 0.5, "preconditioner_init_scale": 2.0, "damping": 0.1, "max_grad_norm": None},
    ),
    "soap": ("soap", {}),
    "soap, new bases": ("soap", {"precondition_frequency": 2, "max_grad_norm": None}),
    "soap, one side": ("soap", {"precondition_frequency": 1, "one_diag": True}),
    "soap, other numbers": (
        "soap",
        {"precondition_frequency": 1, "max_precond_dim": 5, "beta1": 0.5, "beta2": 0.8, "correct_bias": False}
        | {"shampoo_beta": 0.7, "epsilon": 0.1},
    ),
}


def own(package: str = "jaxlm.optim.") -> set[str]:
    """The optimizers of a package, without those of others and of systems."""
    return {kind for kind, cls in OptimizerConfig.get_known_choices().items() if cls.__module__.startswith(package)}


def config_of(kind: str, **keys: Any) -> OptimizerConfig:
    return decode(RunConfig, ConfigSource({"optimizer": {"type": kind, **COMMON, **keys}})).optimizer


def by_hand(kind: str, config: Any, scale: float, direction: Callable[..., Arrays]) -> Arrays:
    params = arrays(0)
    memory: dict = {"params": params}
    for t in range(1, STEPS + 1):
        gradient = (
            arrays(t, scale) if kind == "mars" else clipped(arrays(t, scale), getattr(config, "max_grad_norm", None))
        )
        steps = direction(gradient, memory, t, config)
        if getattr(config, "cautious", False):
            steps = cautious(steps, memory.get("seen", gradient))
        for k, step in steps.items():
            peak = config.adam_lr if kind in ("muon", "kron", "soap") and k != "q.weight" else config.learning_rate
            rate = float(config.schedule(STEPS)(t - 1)) / config.learning_rate * peak
            decay = 0.0 if k == "norm.weight" else config.weight_decay
            params[k] = params[k] - rate * (step + decay * params[k])
    return params


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_steps_match_the_published_algorithm(name):
    kind, keys = CASES[name]
    check_steps(kind, keys, DIRECTIONS[kind])


def check_steps(kind: str, keys: dict[str, Any], direction: Callable[..., Arrays]) -> None:
    """Compares steps. Args: direction: a step for the learning rate 1, in numpy."""
    config = config_of(kind, **keys)
    expected = by_hand(kind, config, 2.0, direction)
    for path, value in trained(config, 2.0).items():
        np.testing.assert_allclose(value, expected[path], atol=3e-6, rtol=1e-5, err_msg=path)


def test_every_optimizer_has_a_row():
    assert own() == set(DIRECTIONS) == {kind for kind, _ in CASES.values()}


@pytest.mark.slow
def test_adam_mini_has_one_step_size_for_a_head_of_queries_and_for_an_output_of_values():
    """And one for each row of an embedding, for each layer's bias, and for the whole of an array without names."""
    rng = np.random.default_rng(0)
    In, Out = hax.Axis("embed", 4), (HEADS, SIZE)
    weight = lambda: Linear(hax.random.normal(jax.random.key(rng.integers(99)), (LAYERS, *Out, In)), None, In, Out)  # noqa: E731
    params = {
        "attn": {"q_proj": weight(), "k_proj": weight(), "v_proj": weight()},
        "tokens": {"weight": hax.named(jnp.asarray(rng.normal(size=(5, 4)), jnp.float32), (VOCAB, EMBED))},
        "up": {"bias": hax.named(jnp.asarray(rng.normal(size=(2, 3)), jnp.float32), (LAYERS, SIZE))},
        "scale": jnp.asarray(rng.normal(size=(3, 2, 2)), jnp.float32),
        # Stacked over those layers only that have them.
        "gates": Linear(hax.random.normal(jax.random.key(7), (VALUE_LAYERS, SIZE, In)), None, In, SIZE),
        "shifts": hax.random.normal(jax.random.key(8), (VALUE_LAYERS, SIZE)),
    }
    config = config_of("adam-mini", learning_rate=1.0, weight_decay=0.0, max_grad_norm=None, epsilon=0.0)
    optimizer = build_optimizer(config, parameter_groups(params, config), STEPS)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    within = {"q_proj": (2, 3), "k_proj": (2, 3), "v_proj": (3,), "tokens": (1,), "bias": (1,), "scale": (0, 1, 2)}
    within |= {"gates": (2,), "shifts": (1,)}
    for (path, update), (_, gradient) in zip(tree.leaves(updates), tree.leaves(params), strict=True):
        axes = next(axes for name, axes in within.items() if name in path)
        g = np.asarray(tree.raw(gradient), np.float64)
        expected = -g / np.sqrt((g**2).mean(axis=axes, keepdims=True))  # the first step
        np.testing.assert_allclose(tree.raw(update), expected, rtol=1e-5, err_msg=path)


def test_adagrad_matches_torch():
    torch = pytest.importorskip("torch")
    usual = {"weight_decay": 0.0, "lr_schedule": "constant", "max_grad_norm": None, "epsilon": 0.0}
    parameter = torch.nn.Parameter(torch.tensor(arrays(0)["q.weight"], dtype=torch.float32))
    optimizer = torch.optim.Adagrad([parameter], lr=1e-2, initial_accumulator_value=0.5, eps=0.0)
    for number in range(STEPS):
        parameter.grad = torch.tensor(arrays(number + 1)["q.weight"], dtype=torch.float32)
        optimizer.step()
    ours = trained(config_of("adagrad", **usual, initial_accumulator_value=0.5), 1.0)
    np.testing.assert_allclose(ours["q.weight"], parameter.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (3, 12, 5), (2, 5, 12)])
def test_newton_schulz_against_singular_values(shape):
    matrices = np.random.default_rng(0).normal(size=shape)
    found = np.asarray(newton_schulz(jnp.asarray(matrices, jnp.float32), 5, 1e-8)).reshape(-1, *shape[-2:])
    for one, expected in zip(found, matrices.reshape(-1, *shape[-2:]), strict=True):
        np.testing.assert_allclose(one, orthogonal(expected, 5), atol=2e-4)
        singular = np.linalg.svd(one, compute_uv=False)
        assert singular.max() < 1.3
        assert singular.min() > 0.3


def test_updates_with_large_rms_are_scaled_down_per_layer():
    most, plain = 0.5, AdamConfig(**COMMON, lr_schedule="constant", max_grad_norm=None)
    params, state, step = stepper(dataclasses.replace(plain, update_rms_clipping=most))
    after = flat(step(params, state, model(arrays(1)))[0])
    free, state, step = stepper(plain)
    unclipped = flat(step(free, state, model(arrays(1)))[0])
    for path, before in arrays(0).items():
        raw, given = (before - x[path] for x in (unclipped, after))
        layers = [(raw, given)] if path == "head.weight" else list(zip(raw, given, strict=True))
        for whole, small in layers:
            rms = np.sqrt(np.mean((whole / 1e-2) ** 2))
            np.testing.assert_allclose(small, whole / max(1.0, rms / most), atol=1e-6)


@pytest.mark.parametrize("axis", [LAYERS, VALUE_LAYERS], ids=lambda axis: axis.name)
def test_limits_are_per_layer_also_where_only_some_layers_are_stacked(axis):
    update, gradient = np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32)
    update[0] *= 10
    gradient[:, 0] = 0.0  # agrees with nothing
    named = lambda array: {"x": hax.named(jnp.asarray(array), (axis, SIZE, EMBED))}  # noqa: E731
    small, _ = clip_by_rms(0.5).update(named(update), optax.EmptyState())
    expected = [x / max(1.0, np.sqrt((x**2).mean()) / 0.5) for x in update]
    np.testing.assert_allclose(small["x"].array, expected, rtol=1e-5)
    direction = limits.cautious(optax.stateless(lambda *_: named(update)), True)
    masked, _ = direction.update(named(gradient), optax.EmptyState())
    agrees = update * gradient > 0
    expected = [np.where(a, x, 0.0) * x.size / (a.sum() + 1) for x, a in zip(update, agrees, strict=True)]
    np.testing.assert_allclose(masked["x"].array, expected, rtol=1e-5)


def test_an_outlier_update_is_scaled_down_to_the_recent_limit():
    clip = ClipUpdateNorm(rolling_interval_length=8, sigma_factor=2.0).build()
    state, norms, given = clip.init(None), [], []
    update = jax.jit(clip.update)
    sizes = [1.0, 1.2, 0.9, 1.1, 1.0, 30.0, 1.0, 1.3, 1.0, 0.8, 1.1, 50.0]
    for size in sizes:
        updates, state = update({"a": jnp.asarray([0.0, size])}, state)
        past = norms[-8:]
        limit = np.mean(past) + 2.0 * max(np.std(past), 1e-6) if len(past) >= 4 else np.inf
        np.testing.assert_allclose(updates["a"], [0.0, min(size, limit)], rtol=1e-5)
        norms.append(size)
        given.append(float(updates["a"][1]))
    assert given[5] < 2.0  # the window stores 30, not the clipped value:
    assert given[11] > 10.0


def test_adamc_scales_the_decay_with_the_learning_rate():
    config = AdamConfig(**COMMON | {"warmup": 3}, adamc_weight_decay=True, lr_schedule="linear", min_lr_ratio=0.2)
    params, state, step = stepper(config)
    expected = arrays(0)["q.weight"]
    for number in range(STEPS):
        params, state = step(params, state, model({k: 0 * v for k, v in arrays(1).items()}))
        rate = float(config.schedule(STEPS)(number))
        expected = expected * (1 - rate * 0.1 * rate / config.learning_rate)
    np.testing.assert_allclose(flat(params)["q.weight"], expected, rtol=1e-5)
    np.testing.assert_allclose(flat(params)["norm.weight"], arrays(0)["norm.weight"], rtol=1e-6)


MASKS = {
    "default": ({}, {"q.weight", "head.weight"}),
    "no default": ({"default_weight_decay_mask": False}, {"q.weight", "head.weight", "norm.weight"}),
    "a list": ({"weight_decay_modules": ["norm"]}, {"norm.weight"}),
    "one expression": ({"weight_decay_modules": r".*norm.*weight|.*q\.weight"}, {"norm.weight", "q.weight"}),
    "a list and the default": (
        {"weight_decay_modules": ["norm"], "default_weight_decay_mask": True},
        {"q.weight", "head.weight", "norm.weight"},
    ),
    "a list without the default": ({"weight_decay_modules": ["q"], "default_weight_decay_mask": False}, {"q.weight"}),
}


@pytest.mark.parametrize("name", MASKS)
def test_weight_decay_masks(name):
    keys, expected = MASKS[name]
    config = config_of("adam", **keys)
    groups = parameter_groups(model(arrays(0)), config)
    assert {path for group in groups if group.weight_decay for path in group.paths} == expected


def test_matrices_form_their_own_group_if_they_have_a_rule():
    groups = parameter_groups(model(arrays(0)), config_of("muon"))
    assert {g.name: (g.paths, g.as_matrices) for g in groups} == {
        "matrices, decay": (("q.weight",), True),
        "others, decay": (("head.weight",), False),
        "others, no decay": (("norm.weight",), False),
    }


# Changed values of fields for which doubling or negating is unsuitable; a dictionary changes several fields.
CHANGES: dict[str, Any] = {
    "lr_schedule": "linear",
    "warmup": 0.5,
    "decay": 2,
    "rewarmup": {"rewarmup": 0.5, "cycles": 2},
    "cycles": 2,
    "cycle_length": 3,
    "weight_decay_modules": ["norm"],
    "default_weight_decay_mask": False,
    "max_grad_norm": 0.1,
    "update_rms_clipping": 0.5,
    "rng_seed": 1,
    "max_dense_size": 5,
    "max_precond_dim": 5,
    "clip_update_norm": {"clip_update_norm": {"rolling_interval_length": 8}},
    "momentum_schedule": {"momentum_schedule": {"warmup": 5}},
    "coefficient_type": "polar_express",
    "normuon_beta2": 0.9,
    "orthogonalization_dtype": "bfloat16",
    "weight_decay_schedule": "linear",
    "lr_floor": 0.9,
    "scope": "group",
}
# What must be set for a field to have an effect.
BESIDE: dict[str, dict[str, Any]] = {"warmup_from_zero": {"warmup": 0.5}}
# Step guards are called by the engine; test_groups.py, test_stored_state.py and test_adagc.py are about the others.
NOT_OF_BUILD = {"skip_bad_steps", "telemetry", "groups", "match", "state", "adagc"}


# All of the schedule reaches an optimizer as one function, so one of these fields per type shows what all would.
SCHEDULE = {
    "cycle_length",
    "cycles",
    "decay",
    "lr_floor",
    "lr_schedule",
    "min_lr_ratio",
    "rewarmup",
    "warmup_from_zero",
}


def fields(kinds: set[str]) -> Iterator[Any]:
    """(type, field)"""
    for kind in sorted(kinds):
        for field in dataclasses.fields(OptimizerConfig.get_known_choices()[kind]):
            if field.name not in NOT_OF_BUILD:
                again = field.name in SCHEDULE and kind != "adam"
                yield pytest.param(kind, field.name, marks=[pytest.mark.soak] if again else [])


def program(config: OptimizerConfig, build: Callable[..., Any] | None = None) -> str:
    params = model(arrays(0))
    optimizer = (build or type(config).build)(config, parameter_groups(params, config), 100)
    update = lambda g, s, p: optimizer.update(g, s, p, curvature=curvature())  # noqa: E731
    state = optimizer.init(params)
    made = jax.make_jaxpr(update)(params, state, params)
    return str(made) + str(jax.tree.map(np.asarray, (made.consts, jax.tree.leaves(state))))


@pytest.mark.parametrize("kind", sorted(OptimizerConfig.get_known_choices()))
def test_what_optimizers_add_up_is_in_float32(kind):
    """Parameters in bfloat16 get the updates of the same numbers in float32, from a state without bfloat16."""
    config = config_of(kind, learning_rate=1e-2, weight_decay=0.1, warmup=0)
    cast = lambda of, dtype: jax.tree.map(lambda x: x.astype(dtype), of)  # noqa: E731
    params = cast(model(arrays(0)), jnp.bfloat16)
    optimizer = build_optimizer(config, parameter_groups(params, config), STEPS)
    update = jax.jit(lambda g, s, p, number: optimizer.update(g, s, p, curvature=curvature(number)))
    state, expected_state = optimizer.init(params), optimizer.init(cast(params, jnp.float32))
    for number in range(STEPS):
        gradient = cast(model(arrays(number + 1)), jnp.bfloat16)
        wide = cast(gradient, jnp.float32), expected_state, cast(params, jnp.float32)
        updates, state = update(gradient, state, params, number)
        expected, expected_state = update(*wide, number)
        jax.tree.map(np.testing.assert_array_equal, (updates, state), (expected, expected_state))
        params = optax.apply_updates(params, updates)
    assert jnp.bfloat16 not in {leaf.dtype for leaf in jax.tree.leaves((updates, state))}
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("kind", sorted(OptimizerConfig.get_known_choices()))
def test_float32_parameters_get_the_same_program(kind):
    config = config_of(kind)
    assert program(config, build_optimizer) == program(config)


@functools.cache
def program_before(kind: str, name: str) -> str:
    return program(config_of(kind, **BESIDE.get(name, {})))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), fields(own()))
def test_every_field_changes_the_result(kind, name):
    check_field(kind, name, CHANGES)


def check_field(kind: str, name: str, changes: dict[str, Any]) -> None:
    """Changes a field. Args: changes: its other value, if it is no number, switch or the like."""
    beside = BESIDE.get(name, {})
    before = config_of(kind, **beside)
    value = getattr(before, name)
    if name in changes:
        keys = copy.deepcopy(changes[name] if isinstance(changes[name], dict) else {name: changes[name]})
    else:
        keys = {
            name: (not value) if isinstance(value, bool) else value * 2 if value * 2 < 1 or value >= 1 else value / 2
        }
    assert program(config_of(kind, **beside, **keys)) != program_before(kind, name if beside else ""), json.dumps(keys)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("adam", {"max_grad_norm": 0.0}),
        ("adam", {"update_rms_clipping": -1.0}),
        ("adam", {"clip_update_norm": {"rolling_interval_length": 1}}),
        ("adam", {"update_rms_clipping": 1.0, "clip_update_norm": {}}),
        ("adam", {"weight_decay_modules": ["nothing"]}),
        ("sophia-h", {"gamma": 0.0}),
        ("sophia-h", {"update_interval": 0}),
        ("kron", {"preconditioner_lr": 0.0}),
        ("kron", {"preconditioner_init_scale": -1.0}),
        ("kron", {"max_dense_size": -1}),
        ("soap", {"precondition_frequency": 0}),
        ("soap", {"max_precond_dim": -1}),
        ("soap", {"epsilon": 0.0}),
    ],
)
def test_invalid_optimizers_are_refused(kind, keys):
    with pytest.raises(ConfigError, match="optimizer"):
        stepper(config_of(kind, **keys))


def graded(seed: int, smallest: float) -> np.ndarray:
    """[12, 12] with singular values from 1 down to about `smallest`, in the same subspaces for every seed."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(12, 12)))[0] for _ in range(2))
    noise = np.eye(12) + 0.05 * np.random.default_rng(seed).normal(size=(12, 12))
    return (left * np.geomspace(1, smallest, 12) @ noise @ right).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("smallest", [1e-2, 1e-3, 2e-4])
def test_soap_first_basis_has_the_eigenvectors_of_small_eigenvalues(smallest):
    """Those of the gradient in float64. In G G', the last ones are far below the rounding errors of float32."""
    expected = np.linalg.svd(graded(1, smallest))[0]
    found = np.asarray(jax.jit(_eigenvectors)(jnp.asarray(graded(1, smallest), jnp.float32)))
    np.testing.assert_allclose(np.abs(np.sum(expected * found, axis=0)), 1.0, atol=1e-3)


def test_soap_trains_small_eigenvalues_like_float64():
    config = config_of("soap", max_grad_norm=None, weight_decay=0.0, lr_schedule="constant")
    Rows, memory = EMBED.alias("rows").resize(12), {}
    weight = lambda x: {"q": Linear(hax.named(jnp.asarray(x, jnp.float32), (Rows, "embed")), None, Embed, Rows)}  # noqa: E731
    Embed = EMBED.resize(12)
    params = weight(np.zeros((12, 12)))
    optimizer = build_optimizer(config, parameter_groups(params, config), 20)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for t in range(1, 21):
        updates, state = update(weight(graded(t, 3e-3)), state, params)
        expected = -config.learning_rate * soap_layer(graded(t, 3e-3), memory, t, config)
        np.testing.assert_allclose(flat(updates)["q.weight"], expected, atol=0.02 * config.learning_rate)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-30])
def test_soap_is_finite_for_gradients_of_low_rank(epsilon):
    """Only one element of each matrix has a gradient, so that most coordinates in the eigenbases are exactly 0."""
    gradient = {path: np.zeros_like(array) for path, array in arrays(0).items()}
    gradient["q.weight"][:, 0, 0, 0] = 0.5
    gradient["head.weight"][0, 0] = 0.5
    params, state, step = stepper(config_of("soap", epsilon=epsilon, precondition_frequency=2))
    before = flat(params)["q.weight"]
    for number in range(STEPS):
        params, state = step(params, state, model(gradient), number)
    after = flat(params)
    assert all(np.isfinite(array).all() for array in after.values())
    assert (after["q.weight"][:, 0, 0, 0] < before[:, 0, 0, 0]).all()


@pytest.mark.slow
def test_a_non_finite_curvature_estimate_is_discarded():
    config = config_of("sophia-h", update_interval=1)
    params = model(arrays(0))
    optimizer = config.build(parameter_groups(params, config), STEPS)
    bad = Curvature(lambda p: jax.tree.map(lambda x: x.at[0].multiply(jnp.inf), p), lambda: jax.random.PRNGKey(0))
    _, good = jax.jit(lambda p: optimizer.update(p, optimizer.init(p), p, curvature=curvature()))(params)
    updates, after = jax.jit(lambda p, state: optimizer.update(p, state, p, curvature=bad))(params, good)
    assert all(np.isfinite(array).all() for array in flat(updates).values())
    before, now = (next(part.diagonal for part in state if hasattr(part, "diagonal")) for state in (good, after))
    jax.tree.map(np.testing.assert_array_equal, before, now)
