"""The control `lr_scale` in every optimizer: a step with it is a step with another learning rate."""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.groups import build_optimizer, parameter_groups
from tests.optim.test_family import arrays, curvature, flat, model

SHARED: Any = {"learning_rate": 0.25, "lr_schedule": "constant", "warmup": 0, "weight_decay": 0.5}


def after_two(config: OptimizerConfig, *scales: float | None) -> list[dict[str, np.ndarray]]:
    """The parameters after two updates, with each scale in turn."""
    optimizer = build_optimizer(config, parameter_groups(model(arrays(0)), config), 6)

    @jax.jit
    def step(params, state, gradient, extra):
        updates, state = optimizer.update(gradient, state, params, curvature=curvature(), **extra)
        return optax.apply_updates(params, updates), state

    found = []
    for scale in scales:
        params = model(arrays(0))
        state = optimizer.init(params)
        extra = {} if scale is None else {"controls": {"lr_scale": jnp.float32(scale)}}
        for seed in (1, 2):
            params, state = step(params, state, model(arrays(seed)), extra)
        found.append(flat(params))
    return found


def scaled(config: OptimizerConfig, scale: float) -> OptimizerConfig:
    """The same optimizer with other learning rates."""
    rates = {field.name for field in fields(config)} & {"learning_rate", "adam_lr"}
    groups = [scaled(group, scale) for group in config.groups]
    return replace(config, groups=groups, **{name: getattr(config, name) * scale for name in rates})


GROUPS: list[OptimizerConfig] = [AdamConfig(match="norm", **{**SHARED, "learning_rate": 0.5})]
CONFIGS = {
    **{
        name: kind(**SHARED) for name, kind in OptimizerConfig.get_known_choices().items() if "jaxlm" in kind.__module__
    },
    "groups": AdamConfig(**SHARED, groups=GROUPS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_scale_is_another_learning_rate(name):
    config = CONFIGS[name]
    found, one = after_two(config, 0.5, 1.0)
    (expected,) = after_two(scaled(config, 0.5), None)
    assert all(np.array_equal(found[path], expected[path]) for path in expected)
    assert not np.array_equal(one["q.weight"], found["q.weight"])


def test_the_weight_decay_of_adamc_follows_the_learning_rate_twice():
    config = AdamConfig(**SHARED, adamc_weight_decay=True)
    (expected,) = after_two(replace(scaled(config, 0.5), weight_decay=0.25), None)
    (found,) = after_two(config, 0.5)
    assert all(np.array_equal(found[path], expected[path]) for path in expected)


@dataclass(frozen=True)
class Sgd(OptimizerConfig):
    """An optimizer that knows no controls."""

    def build(self, groups: Any, num_steps: int) -> optax.GradientTransformationExtraArgs:
        return optax.with_extra_args_support(optax.sgd(self.learning_rate))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Sgd(), r"optimizer\.type: Sgd does not read the control 'lr_scale'"),
        (AdamConfig(**SHARED, groups=[Sgd(match="norm")]), r"optimizer\.groups\.0\.type: Sgd"),
    ],
)
def test_an_optimizer_that_ignores_a_control_is_refused(config, named):
    assert after_two(config, None)
    with pytest.raises(ConfigError, match=named):
        after_two(config, 0.5)
