"""SWATS: Adam, until the learning rate that SGD would need is known; then SGD with that learning rate.

Source: Keskar and Socher 2017, Improving Generalization Performance by Switching from Adam to SGD (arXiv:1712.07628),
algorithm 1; Loshchilov and Hutter 2019 (arXiv:1711.05101) for the decoupled weight decay, which the paper does not have.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlm.core import tree
from jaxlm.core.field_types import BelowOne, LearningRate, NonNegativeFloat, NonNegativeInt, PositiveFloat
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, chained, clip_by_norm
from jaxlm.optim.clipping import by_element, per_tensor, sums_per_tensor, with_array, with_arrays
from jaxlm.reading.choices import choice


class Projection(NamedTuple):
    """Describes how long an SGD step along the gradient would be, whose projection onto Adam's step is that step.

    Attributes:
        average: running mean of gamma, the learning rate of that SGD step, divided by Adam's learning rate: lambda of the
            paper, without bias correction. float32.
        is_sgd: bool, whether the switch has happened.
        rate: the learning rate of SGD divided by Adam's: Lambda of the paper; 0 before the switch. float32.
    """

    average: Any
    is_sgd: Any
    rate: Any


class SwatsState(NamedTuple):
    """State of SWATS.

    Attributes:
        count: int32, number of updates so far.
        mu: Adam's running mean of the gradients; after the switch, the momentum of SGD.
        nu: running mean of the squared gradients.
        mu_weight, nu_weight: sums of the weights of those means, 1 - beta^k. Computed in this way, they have no digits that
            cancel, which would hide a difference of 1e-9.
        projection: scalars with `scope: global`; with `scope: group`, trees with a number for each tensor.
    """

    count: jax.Array
    mu: Any
    nu: Any
    mu_weight: jax.Array
    nu_weight: jax.Array
    projection: Projection


@choice(OptimizerConfig, "swats")
class SwatsConfig(OptimizerConfig):
    """Clips the global norm, applies Adam or, after the switch, SGD with momentum, adds weight decay.

    Each step of Adam is compared with the gradient: gamma is the learning rate with which SGD's step, projected onto Adam's,
    is as long as Adam's. When gamma and its running mean agree, the mean becomes the learning rate of SGD, and the switch is
    never undone. From then on, the schedule scales that learning rate instead of the peak, from the same position on. Weight
    decay is not part of the steps that are compared; it goes on as before, multiplied by the scheduled learning rate.

    Attributes:
        learning_rate: peak learning rate of Adam.
        beta1: decay rate of the first moment, and of SGD's momentum.
        beta2: decay rate of the second moment, and of the running mean of gamma.
        epsilon: added to the square root of the second moment, before the bias correction.
        max_grad_norm: maximum global gradient norm; larger gradients are scaled down to it. Null disables clipping.
        switch_threshold: gamma and its mean agree if they differ by less than this, as in the paper. With noisy gradients,
            they hardly ever do.
        rtol: they also agree if they differ by less than this fraction of the mean. 0 is the paper's algorithm.
        min_steps: number of updates before the first that may switch.
        scope: what switches: global, all parameters at once; group, each tensor (a parameter's part in one layer and one
            expert) by itself, with its own learning rate.
    """

    learning_rate: LearningRate = 1e-3
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    epsilon: NonNegativeFloat = 1e-9
    max_grad_norm: PositiveFloat | None = 1.0
    switch_threshold: NonNegativeFloat = 1e-9
    rtol: NonNegativeFloat = 1e-3
    min_steps: NonNegativeInt = 1000
    scope: Literal["global", "group"] = "global"

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        direction = optax.GradientTransformation(self._init, self._update)
        return chained(self, groups, num_steps, clip_by_norm(self.max_grad_norm), direction)

    def _init(self, params: Any) -> SwatsState:
        def numbers(dtype: Any) -> Any:
            if self.scope == "global":
                return jnp.zeros((), dtype)
            return tree.map_leaves(lambda _, leaf: per_tensor(leaf, 0, dtype), params)

        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))  # donated, so not the same buffers
        mu_weight, nu_weight = (jnp.zeros((), jnp.float32) for _ in range(2))
        projection = Projection(*map(numbers, (jnp.float32, jnp.bool_, jnp.float32)))
        return SwatsState(jnp.zeros((), jnp.int32), mu, nu, mu_weight, nu_weight, projection)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, SwatsState]:
        before = self._by_path(state.projection, updates)
        mu_weight = self.beta1 * state.mu_weight + (1 - self.beta1)
        nu_weight = self.beta2 * state.nu_weight + (1 - self.beta2)
        correction = jnp.sqrt(nu_weight) / mu_weight
        mu, nu, steps, squares, dots = {}, {}, {}, {}, {}
        for (path, leaf), (_, m), (_, v) in zip(*map(tree.leaves, (updates, state.mu, state.nu)), strict=True):
            g = tree.raw(leaf)
            share = self._by_element(jnp.where(before[path].is_sgd, 1.0, 1 - self.beta1), leaf)
            mu[path] = self.beta1 * tree.raw(m) + share * g
            nu[path] = self.beta2 * tree.raw(v) + (1 - self.beta2) * jnp.square(g)
            step = steps[path] = correction * mu[path] / (jnp.sqrt(nu[path]) + self.epsilon)
            squares[path], dots[path] = (sums_per_tensor(with_array(leaf, step * other)) for other in (step, g))
        if self.scope == "global":
            squares, dots = (dict.fromkeys(of, sum(map(jnp.sum, of.values()))) for of in (squares, dots))
        after, directions = {}, {}
        for path, leaf in tree.leaves(updates):
            one = before[path]
            after[path], switches = self._projected(one, squares[path], dots[path], nu_weight, state.count + 1)
            sgd = self._by_element((1 - self.beta1) * one.rate, leaf) * mu[path]
            directions[path] = jnp.where(self._by_element(one.is_sgd, leaf), sgd, steps[path])
            mu[path] = jnp.where(self._by_element(switches, leaf), 0.0, mu[path])  # SGD's momentum starts at 0
        moved, mu, nu = (with_arrays(*pair) for pair in ((updates, directions), (state.mu, mu), (state.nu, nu)))
        projection = self._from_paths(after, state.projection)
        return moved, SwatsState(state.count + 1, mu, nu, mu_weight, nu_weight, projection)

    def _projected(
        self, before: Projection, square: Any, dot: Any, weight: jax.Array, count: jax.Array
    ) -> tuple[Projection, jax.Array]:
        """The projection after a step, and whether it is the last one of Adam.

        Args:
            square: of Adam's step with a learning rate of 1. dot: its product with the gradient.
            weight: sum of the weights of the running mean.
            count: number of this step, from 1.
        """
        gamma = square / jnp.where(dot == 0, 1.0, dot)
        goes_on = (dot != 0) & ~before.is_sgd
        average = jnp.where(goes_on, self.beta2 * before.average + (1 - self.beta2) * gamma, before.average)
        rate = average / weight
        tolerance = jnp.maximum(self.switch_threshold, self.rtol * self.learning_rate * rate)
        agrees = self.learning_rate * jnp.abs(rate - gamma) < tolerance
        # The paper does not say what a negative learning rate, against the gradient, would mean.
        switches = goes_on & agrees & (rate > 0) & (count > max(1, self.min_steps))
        return Projection(average, before.is_sgd | switches, jnp.where(switches, rate, before.rate)), switches

    def _by_path(self, projection: Projection, params: Any) -> dict[str, Projection]:
        if self.scope == "global":
            return {path: projection for path, _ in tree.leaves(params)}
        rows = zip(*map(tree.leaves, projection), strict=True)
        return {row[0][0]: Projection(*(tree.raw(leaf) for _, leaf in row)) for row in rows}

    def _from_paths(self, numbers: Mapping[str, Projection], before: Projection) -> Projection:
        if self.scope == "global":
            return next(iter(numbers.values()))
        columns = [{path: row[n] for path, row in numbers.items()} for n in range(len(before))]
        return Projection(*(with_arrays(*pair) for pair in zip(before, columns, strict=True)))

    def _by_element(self, numbers: jax.Array, leaf: Any) -> jax.Array:
        return numbers if self.scope == "global" else by_element(numbers, leaf)
