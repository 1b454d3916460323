"""A portfolio against optax, jaxlm's Muon, and its documented state in float64; switches, devices, memory, and refusals."""

from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import scaled
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.clipping import AdaGc
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.groups import build_optimizer, parameter_groups
from jaxlm.optim.muon import MuonConfig
from jaxlm.optim.stored_state import EightBit, QuantizedMoment
from jaxlm.systems.orchestrate.portfolio import Nowcast, PortfolioConfig
from jaxlm.systems.orchestrate.strategies import AdamW, Lion, Muon, Sgd, Strategy
from jaxlm.systems.orchestrate.superset import PortfolioState
from tests.engine.helpers import layout
from tests.optim import test_adagc
from tests.optim.helpers import AXES, Arrays, Updates, as_model, flat, numbers
from tests.optim.test_adagc import config_of
from tests.optim.test_family import clipped, orthogonal

PLAIN: Any = {"lr_schedule": "constant", "warmup": 0}
RATE, DECAY = 1e-3, 0.1
EACH_RULE: dict[str, Strategy] = {
    "adamw": AdamW(max_grad_norm=1.0),
    "fast adamw": AdamW(lr_scale=3.0, beta1=0.5, beta2=0.999, epsilon=1e-6, weight_decay=0.0),
    "sgd": Sgd(lr_scale=10.0, max_grad_norm=0.5),
    "nesterov": Sgd(nesterov=True, beta1=0.8, weight_decay=0.2),
    "lion": Lion(lr_scale=0.3, beta1=0.8, beta2=0.95),
    "muon": Muon(lr_scale=2.0, adam_lr_scale=0.5, momentum=0.9, beta1=0.7),
    "escape": Sgd(swats=True, nesterov=True, beta2=0.9),
    "adagc": AdamW(lr_scale=0.3, adagc=True, max_grad_norm=0.5),
}
PORTFOLIO = PortfolioConfig(**PLAIN, learning_rate=RATE, weight_decay=DECAY, strategies=EACH_RULE)


@pytest.fixture(scope="module")
def portfolio() -> Updates:
    """Compiled once. `started` begins anew."""
    return Updates(PORTFOLIO)


def started(updates: Updates) -> Updates:
    updates.model = as_model(numbers(0))
    updates.state = updates.optimizer.init(updates.model)
    return updates


def controls(name: str) -> dict[str, float]:
    return dict(PORTFOLIO.facts.strategies[name])


def masked(params: Any) -> Any:
    return tree.map_leaves(lambda path, _: path != "norm.weight", params)


def of_optax(name: str) -> optax.GradientTransformation:
    """The strategy as a user of optax writes it."""
    row: Any = EACH_RULE[name]
    rate, decay = RATE * row.lr_scale, DECAY if row.weight_decay is None else row.weight_decay
    clip = optax.identity() if row.max_grad_norm is None else optax.clip_by_global_norm(row.max_grad_norm)
    clip = optax.chain(AdaGc().build(), clip) if row.adagc else clip
    if name == "lion":
        return optax.chain(clip, optax.lion(rate, row.beta1, row.beta2, weight_decay=decay, mask=masked))
    if isinstance(row, AdamW):
        rule = optax.adamw(rate, row.beta1, row.beta2, row.epsilon, weight_decay=decay, mask=masked)
        return optax.chain(clip, rule)
    sgd = optax.trace(row.beta1, row.nesterov)
    return optax.chain(clip, sgd, optax.add_decayed_weights(decay, masked), optax.scale(-rate))


@pytest.mark.parametrize("name", ["adamw", "fast adamw", "sgd", "nesterov", "lion", "adagc"])
def test_each_strategy_is_the_optimizer_of_optax(portfolio, name):
    found = started(portfolio)
    optimizer, params = of_optax(name), as_model(numbers(0))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for t in range(1, 21):
        change, state = update(as_model(numbers(t)), state, params)
        params = optax.apply_updates(params, change)
        weights = found.step(numbers(t), **controls(name))
    for path, expected in flat(params).items():
        np.testing.assert_allclose(weights[path], expected, rtol=0, atol=1e-6, err_msg=path)


def test_muon_is_jaxlms_muon(portfolio):
    """Which tests/optim/test_muon.py compares with other programs."""
    row: Any = EACH_RULE["muon"]
    usual: Any = {**PLAIN, "weight_decay": DECAY, "max_grad_norm": None, "use_kimi_scaling": True}
    rates = {"learning_rate": RATE * row.lr_scale, "adam_lr": RATE * row.adam_lr_scale}
    found, expected = started(portfolio), Updates(MuonConfig(**usual, **rates, momentum=row.momentum, beta1=row.beta1))
    for t in range(1, 21):
        weights, wanted = found.step(numbers(t), **controls("muon")), expected.step(numbers(t))
    for path, array in wanted.items():
        np.testing.assert_allclose(weights[path], array, rtol=0, atol=1e-6, err_msg=path)


def by_hand(config: PortfolioConfig, rows: list[str], gradients: list[Arrays]) -> Arrays:
    """The documented state and rules in float64. Args: rows: the strategy of each step."""
    w = {path: array.astype(np.float64) for path, array in numbers(0).items()}
    mu, nu = ({path: np.zeros_like(array) for path, array in w.items()} for _ in range(2))
    weight, matrix_weight, nu_weight, square, dot = 0.0, 0.0, 0.0, 0.0, 0.0
    schedule = replace(config, strategies={"one": AdamW()}).schedule(len(rows))
    by_adagc, _ = test_adagc.by_hand(test_adagc.AdaGc(), gradients)  # goes on whichever strategy updates
    for t, (name, raw) in enumerate(zip(rows, gradients, strict=True)):
        row: Any = config.table[name]
        g = by_adagc[t] if row.adagc else {path: array.astype(np.float64) for path, array in raw.items()}
        g = clipped(g, row.max_grad_norm)
        b1 = row.beta2 if isinstance(row, Lion) else row.beta1
        matrix_b1 = row.momentum if isinstance(row, Muon) else b1
        b2 = row.beta2 if isinstance(row, (AdamW, Muon)) or getattr(row, "swats", False) else 0.95
        decays = {path: matrix_b1 if path in ("q.weight", "up.weight") else b1 for path in w}
        weight, matrix_weight = b1 * weight + 1 - b1, matrix_b1 * matrix_weight + 1 - matrix_b1
        nu_weight = b2 * nu_weight + 1 - b2
        before = mu
        mu = {path: decays[path] * mu[path] + (1 - decays[path]) * g[path] for path in w}
        nu = {path: b2 * nu[path] + (1 - b2) * g[path] ** 2 for path in w}
        mean = {path: mu[path] / (matrix_weight if path in ("q.weight", "up.weight") else weight) for path in w}
        step = {path: mean[path] / (np.sqrt(nu[path] / nu_weight) + 1e-8) for path in w}
        square = b2 * square + (1 - b2) * sum((s**2).sum() for s in step.values())
        dot = b2 * dot + (1 - b2) * sum((step[path] * g[path]).sum() for path in w)
        decay = config.weight_decay if row.weight_decay is None else row.weight_decay
        for path in w:
            scale = row.lr_scale
            if isinstance(row, Lion):
                direction = np.sign(row.beta1 * before[path] + (1 - row.beta1) * g[path])
            elif isinstance(row, Sgd):
                ahead = row.beta1 * mu[path] + (1 - row.beta1) * g[path] if row.nesterov else mu[path]
                direction = ahead * (max(square / dot, 0) if row.swats else 1 / (1 - row.beta1))
            elif isinstance(row, Muon) and path in ("q.weight", "up.weight"):
                ahead = row.momentum * mu[path] + (1 - row.momentum) * g[path]
                shape = (8, 16) if path == "q.weight" else (16, 8)
                found = [0.2 * 4 * orthogonal(one, 5) for one in ahead.reshape(-1, *shape)]
                direction = np.reshape(found, ahead.shape)
            else:
                direction = mean[path] / (np.sqrt(nu[path] / nu_weight) + row.epsilon)
                scale = row.adam_lr_scale if isinstance(row, Muon) else scale
            decayed = direction + decay * w[path] * (path != "norm.weight")
            w[path] = w[path] - float(schedule(t)) * scale * decayed
    return w


@pytest.mark.slow
def test_switches_between_all_rules_match_the_documented_state():
    """Each rule follows each other one at least once. The schedule goes on."""
    config = replace(PORTFOLIO, lr_schedule="linear", min_lr_ratio=0.1, warmup=4)
    rng, names = np.random.default_rng(0), list(EACH_RULE)
    pairs = [(one, other) for one in names for other in names if one != other]
    rows = [name for number in rng.permutation(len(pairs)) for name in pairs[number]]
    gradients = [{p: g + 0.3 * numbers(0)[p] for p, g in numbers(t).items()} for t in range(1, len(rows) + 1)]
    updates = Updates(config, len(rows))
    for row, gradient in zip(rows, gradients, strict=True):
        weights = updates.step(gradient, **config.facts.strategies[row])
    assert updates.update._cache_size() == 1
    for path, expected in by_hand(config, rows, gradients).items():
        np.testing.assert_allclose(weights[path], expected, rtol=0, atol=2e-5, err_msg=path)


@pytest.mark.slow
def test_eight_devices_update_as_one(portfolio):
    one, eight = started(portfolio), Updates(PORTFOLIO, where=layout())
    names = list(EACH_RULE)
    for t in range(1, 2 * len(names) + 1):
        row = controls(names[(3 * t) % len(names)])
        expected, found = one.step(numbers(t), **row), eight.step(numbers(t), **row)
        assert all(np.abs(found[path] - expected[path]).max() <= 1e-6 for path in AXES)
    assert len(eight.model["q"].weight.array.sharding.device_set) == 8
    assert one.update._cache_size() == eight.update._cache_size() == 1


@pytest.mark.slow
def test_a_table_of_one_needs_no_control():
    config = replace(PORTFOLIO, strategies={"adamw": EACH_RULE["adamw"]})
    adam = Updates(AdamConfig(**PLAIN, learning_rate=RATE, weight_decay=DECAY))
    free, controlled = Updates(config), Updates(config)
    for t in range(1, 21):
        expected, reference = free.step(numbers(t)), adam.step(numbers(t))
        found = controlled.step(numbers(t), strategy=0.0, lr_scale=1.0)
        for path, array in expected.items():
            np.testing.assert_array_equal(found[path], array)
            np.testing.assert_allclose(reference[path], array, rtol=0, atol=1e-6)


def test_the_learning_rate_of_a_switch_is_the_schedules_times_the_scale():
    rows: Any = {"a": Sgd(beta1=0.0, lr_scale=0.5), "b": Sgd(beta1=0.0, lr_scale=2.0), "c": Sgd(beta1=0.0)}
    config = PortfolioConfig(
        learning_rate=0.25, weight_decay=0.0, warmup=0, lr_schedule="linear", strategies=rows, initial="b"
    )
    assert list(config.facts.strategies) == ["b", "a", "c"]
    updates, schedule, before = Updates(config, 40), config.schedule(40), flat(as_model(numbers(0)))
    one = {path: np.ones_like(array) for path, array in numbers(0).items()}
    for t in range(12):
        name = "bbaabbccaacc"[t]
        given: Any = {} if t == 0 else config.facts.strategies[name]
        after = updates.step(one, **given)
        logged = float(scaled(schedule(t), given))
        expected = 0.25 * rows[name].lr_scale * float(replace(config, initial="c").schedule(40)(t)) / 0.25
        assert logged == pytest.approx(expected, rel=1e-6)
        for path, array in after.items():
            np.testing.assert_allclose(before[path] - array, logged, rtol=0, atol=3e-7)
        before = after


def num_bytes(state: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def test_all_strategies_together_need_the_memory_of_adamw():
    """Two moments, 8 scalars, and a count and a norm for each of the 3 + 6 + 3 + 1 + 1 tensors."""
    model = as_model(numbers(0))
    size = num_bytes(model)

    def state(**strategies: Strategy) -> int:
        config = replace(PORTFOLIO, strategies=strategies)
        return num_bytes(jax.eval_shape(build_optimizer(config, parameter_groups(model, config), 9).init, model))

    adamw = num_bytes(jax.eval_shape(optax.adam(1.0).init, model))
    assert state(a=AdamW()) == 2 * size + 3 * 4 == adamw + 8
    assert state(**{f"n{n}": row for n, row in enumerate(EACH_RULE.values())}) == 2 * size + 6 * 4 + 14 * 8
    assert state(a=Sgd(), b=Lion()) == size + 2 * 4
    matrices = num_bytes([model["q"], model["up"]])
    assert state(a=Sgd(), b=Muon()) == 2 * size - matrices + 4 * 4


def products_outside_of_conditionals(jaxpr: Any) -> int:
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == "dot_general"
        if equation.primitive.name != "cond":
            inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
            found += sum(products_outside_of_conditionals(one) for one in inner if hasattr(one, "eqns"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("where", [None, layout()], ids=["one device", "eight"])
def test_matrices_are_orthogonalized_only_while_muon_is_selected(where):
    model = as_model(numbers(0))
    optimizer = build_optimizer(PORTFOLIO, parameter_groups(model, PORTFOLIO), 9)

    def update(gradient: Any, state: Any, row: jax.Array) -> Any:
        return optimizer.update(gradient, state, model, controls={"strategy": row, "lr_scale": row})

    def traced() -> Any:
        return jax.make_jaxpr(update)(model, optimizer.init(model), jnp.float32(0))

    if where is None:
        made = traced()
    else:
        with where.use():
            made = traced()
    assert "dot_general" in str(made)
    assert products_outside_of_conditionals(made.jaxpr) == 0


@pytest.mark.slow
def test_bfloat16_parameters_are_updated_in_float32():
    """Also the moments: 0.999 would be 1, and neither are they rounded between steps."""
    rounded = lambda x: np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float32)  # noqa: E731
    config = replace(PORTFOLIO, strategies={"a": AdamW(beta2=0.999), "b": Lion()}, weight_decay=0.0)
    params = as_model(numbers(0), jnp.bfloat16)
    optimizer = build_optimizer(config, parameter_groups(params, config), 9)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    mu = nu = np.zeros((3, 16), np.float32)
    for t in range(1, 6):
        change, state = update(as_model(numbers(t), jnp.bfloat16), state, params)
        g = rounded(numbers(t)["norm.weight"])
        mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g**2
        expected = -RATE * mu / (1 - 0.9**t) / (np.sqrt(nu / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(flat(change)["norm.weight"], expected, rtol=1e-4)
        params = optax.apply_updates(params, change)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_moments_in_8_bits_serve_all_strategies():
    config = replace(PORTFOLIO, state=EightBit(min_size=256))
    updates, full = Updates(config), Updates(PORTFOLIO)
    moments = updates.state_of(PortfolioState)
    stored = [
        type(leaf)
        for part in (moments.mu, moments.nu)
        for leaf in jax.tree.leaves(part, is_leaf=lambda x: isinstance(x, QuantizedMoment))
    ]
    assert stored.count(QuantizedMoment) == 2
    before = flat(as_model(numbers(0)))
    for t, name in enumerate(EACH_RULE):
        found, expected = updates.step(numbers(t), **controls(name)), full.step(numbers(t), **controls(name))
    for path, array in found.items():
        moved = np.abs(expected[path] - before[path]).mean()
        assert np.abs(array - expected[path]).mean() < 0.1 * moved


LINE: Any = {"strategies": {"sgd": Sgd(beta1=0.0)}, "learning_rate": 1e-2, "weight_decay": 0.0}


def test_a_nowcast_continues_a_line():
    """Weights that move by equal steps are extrapolated to 1e-5. The window is then empty again."""
    updates = Updates(PortfolioConfig(**PLAIN, **LINE, nowcast=Nowcast(window=8)))
    gradient, weights = numbers(1), numbers(0)
    for t in range(1, 26):
        asked = t in (5, 12, 13, 20)  # only in the 12th and the 20th step is the window full
        found = updates.step(gradient, nowcast=50.0 if asked else 0.0)
        steps = 51 if t in (12, 20) else 1
        weights = {path: array - np.float32(steps * 1e-2) * gradient[path] for path, array in weights.items()}
        assert all(np.abs(found[path] - array).max() <= 1e-5 for path, array in weights.items()), t


@pytest.mark.slow
def test_the_trend_is_a_least_squares_line_through_recent_weights():
    """Against NumPy's, whose weights are the square roots of the points' weights."""
    config = PortfolioConfig(**PLAIN, **LINE, nowcast=Nowcast(window=6))
    updates, plain = Updates(config), Updates(replace(config, nowcast=None))
    points = [numbers(0)]
    for t in range(1, 15):
        points.append(updates.step(numbers(t), nowcast=0.0))
        for path, array in plain.step(numbers(t)).items():
            np.testing.assert_array_equal(points[-1][path], array)
    found = updates.step(numbers(15), nowcast=3.0)
    points.append(plain.step(numbers(15)))
    times = np.arange(len(points))
    for path, array in found.items():
        values = np.reshape([one[path] for one in points], (len(points), -1)).astype(np.float64)
        slope, _ = np.polyfit(times, values, 1, w=(1 - 1 / 6) ** (0.5 * times[::-1]))
        np.testing.assert_allclose(array.ravel(), values[-1] + 3 * slope, atol=2e-6)


def program(**strategies: Strategy) -> str:
    model, config = as_model(numbers(0)), replace(PORTFOLIO, strategies=strategies)
    optimizer = config.build(parameter_groups(model, config), 9)
    made = jax.make_jaxpr(lambda g, s, p: optimizer.update(g, s, p))(model, optimizer.init(model), model)
    return f"{made} {[np.asarray(const) for const in made.consts]}"


@pytest.mark.slow
@pytest.mark.parametrize("rule", [AdamW, Sgd, Lion, Muon])
def test_every_field_of_a_strategy_changes_the_program(rule):
    usual: dict[str, Any] = {"swats": True} if rule is Sgd else {"adam_lr_scale": 0.9} if rule is Muon else {}
    before = program(a=rule(**usual), b=AdamW())
    for field in fields(rule):
        value = usual.get(field.name, field.default)
        changed = (not value) if isinstance(value, bool) else 0.3 if value is None else value / 2
        after = program(a=rule(**usual | {field.name: changed}), b=AdamW())
        assert after != before, field.name


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"strategies": {}}, r"optimizer\.strategies: empty"),
        ({"initial": "x"}, r"optimizer\.initial: 'x' given, but the strategies are conservative_adamw, "),
        (
            {"strategies": {"a": {"type": "adamw", "nesterov": True}}},
            r"optimizer\.strategies\.a\.nesterov: no such key",
        ),
        ({"strategies": {"a": {"type": "sgd", "beta2": 0.5}}}, r"optimizer\.strategies\.a\.beta2: .*, or set swats"),
        ({"strategies": {"a": {"type": "sgd", "momentum": 0.5}}}, r"optimizer\.strategies\.a\.momentum: no such key"),
        (
            {"strategies": {"a": {"type": "adamw", "adagc": True}, "b": {"type": "lion", "adagc": {"beta": 0.5}}}},
            r"optimizer\.strategies: a and b have different sections adagc",
        ),
        ({"adagc": {}}, r"optimizer\.adagc: given, but spike_resistant has adagc too"),
        ({"groups": [{"match": "x", "type": "adam"}]}, r"optimizer\.groups: given, but a strategy acts on all"),
        ({"weight_decay": 0.0, "strategies": {"a": {"type": "lion", "weight_decay": 0.1}}}, r"of 'a' is 0\.1, but"),
        (
            {"nowcast": {}, "state": "8bit"},
            r"optimizer\.nowcast: .* together with state: \{type: 8bit\}, as 8",
        ),
    ],
)
def test_what_has_no_effect_is_refused(keys, named):
    with pytest.raises(ConfigError, match=named):
        config_of(type="portfolio", **keys)


def test_a_portfolio_is_no_entry_of_groups():
    with pytest.raises(ConfigError, match=r"optimizer\.groups\.0\.match: given, but a strategy acts on all parameters"):
        config_of(groups=[{"match": "x", "type": "portfolio"}])


def test_a_control_without_a_trend_is_refused():
    updates = Updates(PortfolioConfig(**PLAIN, **LINE))
    with pytest.raises(
        ConfigError, match=r"PortfolioConfig does not read the control 'nowcast', which a controller sets"
    ):
        updates.step(numbers(1), nowcast=1.0)


def test_the_tables_of_the_guide_and_of_its_source():
    guide, caramba = (config_of(type="portfolio", strategies=name) for name in ("guide", "caramba"))
    assert isinstance(guide, PortfolioConfig)
    assert isinstance(caramba, PortfolioConfig)
    scales = {name: row.lr_scale for name, row in guide.table.items()}
    assert scales == {"conservative_adamw": 1.0, "aggressive_adamw": 3.0, "spike_resistant": 0.3, "sgd_escape": 1.0}
    # Of a base of 1e-4: 1e-5, 5e-4, 1e-3, 1e-4, 1e-4.
    rates = {name: 1e-4 * row.lr_scale for name, row in caramba.table.items()}
    assert list(rates.values()) == pytest.approx([1e-5, 5e-4, 1e-3, 1e-4, 1e-4])
    assert list(rates)[-1] == "lion_conservative"
    assert caramba.facts.learning_rate == pytest.approx(caramba.learning_rate / 10)
    assert OptimizerConfig.get_known_choices()["adam"]().facts.strategies == {}
