"""Combines an update rule for matrices with Adam for all other parameters."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import optax

from jaxlm.core import tree
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, add_weight_decay, clip_by_norm, scale_by_learning_rate


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
    """Clips the global norm, computes each parameter's direction, adds weight decay, and scales by the learning rate.

    Args:
        config: has the learning rate of matrices, and the schedule of both learning rates.
        matrices: name in the optimizer state and transformation for the groups with `as_matrices`.
        adam: transformation for all other groups.
        adam_lr: peak learning rate of all other groups.
    """
    name, direction = matrices
    paths = {path for group in groups if group.as_matrices for path in group.paths}

    def labels(params: Any) -> Any:
        return tree.map_leaves(lambda path, _: name if path in paths else "adam", params)

    directions: Any = {name: direction, "adam": adam}
    rates: Any = {
        name: scale_by_learning_rate(config.schedule(num_steps)),
        "adam": scale_by_learning_rate(dataclasses.replace(config, learning_rate=adam_lr).schedule(num_steps)),
    }
    return optax.with_extra_args_support(
        optax.chain(
            clip_by_norm(max_grad_norm),
            optax.partition(directions, labels),
            add_weight_decay(config, groups),
            optax.partition(rates, labels),
        )
    )
