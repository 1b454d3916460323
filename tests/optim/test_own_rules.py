"""Parameters with an update rule of their own: they move by it alone, beside every optimizer, which does not see them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.pace import Pace
from jaxlm.core.parameters import DeclaresParameters, Parameter, SignUpdate
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.curvature import Curvature
from jaxlm.optim.groups import build_optimizer, parameter_groups
from tests.optim.test_family import LAYERS, STEPS, arrays, config_of, curvature, flat, model

Experts = Axis("experts", 3)
RULE = SignUpdate(0.25)


class Router(DeclaresParameters):
    bias: NamedArray

    def parameters(self) -> dict[str, Parameter]:
        return {"bias": Parameter(float32=True, rule=RULE)}


def router(seed: int, scale: float = 1.0) -> Router:
    values = np.random.default_rng(seed).integers(-1, 2, size=(LAYERS.size, Experts.size))
    return Router(NamedArray(jnp.asarray(scale * values, jnp.float32), (LAYERS, Experts)))


def curvature_of_both(number: int | jax.Array) -> Curvature:
    """That of the shared parameters, and any for the router."""
    without = curvature(number)

    def gradient(params: dict[str, Any]) -> dict[str, Any]:
        others = {name: part for name, part in params.items() if name != "router"}
        return without.gradient(others) | {"router": jax.tree.map(lambda b: 5.0 * b, params["router"])}

    return Curvature(gradient, without.key)


def trained(config: OptimizerConfig, with_router: bool) -> tuple[dict[str, np.ndarray], Any]:
    extra = {"router": router(0)} if with_router else {}
    params = model(arrays(0)) | extra
    optimizer = build_optimizer(config, parameter_groups(params, config), STEPS)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradient, number):
        seen = (curvature_of_both if with_router else curvature)(number)
        updates, state = optimizer.update(gradient, state, params, curvature=seen)
        return optax.apply_updates(params, updates), state

    for number in range(3):
        # Large enough to change the norm, if it were counted.
        gradient = model(arrays(number + 1)) | ({"router": router(number + 1, 1e3)} if with_router else {})
        params, state = step(params, state, gradient, number)
    return flat(params), state


OTHERS = ("lion", "soap", "kron", "adam-mini", "adagrad", "mars")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "muon", "sophia-h", *(kind for kind in OTHERS)])
def test_every_optimizer_does_the_same_without_them_and_they_follow_their_rule(kind):
    check_beside(config_of(kind))


def test_groups_and_adagc_do_not_see_them_either():
    check_beside(config_of("adam", adagc={"warmup": 2}, groups=[{"match": "norm", "learning_rate": 1e-3}]))


def check_beside(config: OptimizerConfig) -> None:
    (alone, state_alone), (beside, state) = trained(config, False), trained(config, True)
    bias = beside.pop("router.bias")
    for path, expected in alone.items():
        np.testing.assert_array_equal(beside[path], expected, err_msg=path)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [leaf.shape for leaf in jax.tree.leaves(state_alone)]
    signs = sum(np.sign(np.asarray(router(n).bias.array)) for n in (1, 2, 3))
    np.testing.assert_array_equal(bias, np.asarray(router(0).bias.array) - 0.25 * signs)


def test_they_have_a_group_of_their_own_which_the_plan_shows():
    params = model(arrays(0)) | {"router": router(0)}
    *others, last = parameter_groups(params, config_of("adam"))
    assert (last.paths, last.num_parameters, last.weight_decay) == (("router.bias",), 6, 0.0)
    assert last.name == "own rule: 0.25 against the sign of the gradient"
    assert all(group.rule is None and "router.bias" not in group.paths for group in others)


def test_an_entry_for_them_alone_is_refused():
    config = config_of("adam", groups=[{"match": "router", "learning_rate": 1.0}])
    with pytest.raises(
        ConfigError, match=r"optimizer\.groups\.0\.match: 'router' matches only parameters with a rule of their"
    ):
        parameter_groups(model(arrays(0)) | {"router": router(0)}, config)


@pytest.mark.slow
def test_a_layer_that_stands_still_keeps_its_own():
    params = model(arrays(0)) | {"router": router(0)}
    config = config_of("adam")
    optimizer = build_optimizer(config, parameter_groups(params, config), STEPS)
    gradient = model(arrays(1)) | {"router": Router(NamedArray(jnp.ones((2, 3)), (LAYERS, Experts)))}
    pace = Pace({"router.bias": jnp.array([0.0, 1.0])}, None)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params, pace=pace)
    np.testing.assert_array_equal(updates["router"].bias.array, [[0.0] * 3, [-0.25] * 3])


def test_sixteen_bit_gradients_are_widened_first():
    params = {"router": tree.map_leaves(lambda _, leaf: leaf.astype(jnp.bfloat16), router(0))}
    config = config_of("adam")
    optimizer = build_optimizer(config, parameter_groups(params, config), STEPS)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert updates["router"].bias.dtype == jnp.float32
