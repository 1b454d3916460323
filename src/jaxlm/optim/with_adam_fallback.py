"""Two optimizers in one: matrices go their own way, everything else goes Adam's."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import optax

from jaxlm.core import tree
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, add_weight_decay, clip_by_norm, times_learning_rate


def with_adam_fallback(
    config: OptimizerConfig,
    groups: Sequence[ParameterGroup],
    num_steps: int,
    matrices: tuple[str, optax.GradientTransformation],
    adam: optax.GradientTransformation,
    *,
    adam_lr: float,
    max_grad_norm: float | None,
) -> optax.GradientTransformationExtraArgs:
    """Clips the global norm, then takes each parameter's direction, adds the decay, and multiplies by its learning rate.

    Args:
        config: its learning rate is that of matrices; both follow its schedule.
        matrices: what makes directions of the groups that are `as_matrices`, and its name in the optimizer's state.
        adam: what makes those of all others.
        adam_lr: their peak.
    """
    name, direction = matrices
    paths = {path for group in groups if group.as_matrices for path in group.paths}

    def labels(params: Any) -> Any:
        return tree.map_leaves(lambda path, _: name if path in paths else "adam", params)

    directions: Any = {name: direction, "adam": adam}
    rates: Any = {
        name: times_learning_rate(config.schedule(num_steps)),
        "adam": times_learning_rate(dataclasses.replace(config, learning_rate=adam_lr).schedule(num_steps)),
    }
    return optax.with_extra_args_support(
        optax.chain(
            clip_by_norm(max_grad_norm),
            optax.partition(directions, labels),
            add_weight_decay(config, groups),
            optax.partition(rates, labels),
        )
    )
