"""Limits updates (clipping, cautious masks) and the gradient of each tensor (AdaGC).

A tensor is what one layer has of a parameter, and of an expert's parameter what one expert has. Layers are stacked, so an
array contains many tensors, and the numbers that an optimizer keeps for each have the axes that tell them apart: {layers},
{layers, experts} or none. All heads of a projection are one tensor.

AdaGC scales the gradient of a tensor down if its norm is large compared with its own recent norms. Its defaults are those
of public ports; the authors' code (github.com/lishuai-97/AdaGC) has 1.04 and 0.99.

Source: AdaGC: Wang et al. 2025, AdaGC: Enhancing LLM Pretraining Stability via Adaptive Gradient Clipping
(arXiv:2502.11034), algorithm 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import EXPERTS, STACKED_LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import AboveOne, BelowOne, NonNegativeInt, PositiveFloat
from jaxlm.core.rules import Rules, only
from jaxlm.optim.bad_steps import RollingWindow

_SEPARATE = (*STACKED_LAYERS, EXPERTS)


def per_tensor(parameter: Any, value: float, dtype: jax.typing.DTypeLike) -> Any:
    """One number for each tensor of a parameter. A parameter without named axes is one tensor."""
    if not tree.is_named(parameter):
        return jnp.full([], value, dtype)
    axes = tuple(axis for axis in parameter.axes if axis.name in _SEPARATE)
    return NamedArray(jnp.full([axis.size for axis in axes], value, dtype), axes)


def sums_per_tensor(leaf: Any) -> jax.Array:
    """The sum over each tensor in float32, with the shape of `per_tensor`."""
    within = tuple(n for n, kept in enumerate(_is_separate(leaf)) if not kept)
    return jnp.sum(tree.raw(leaf).astype(jnp.float32), axis=within)


def by_element(numbers: jax.Array, leaf: Any) -> jax.Array:
    """Numbers of tensors in a shape that broadcasts against the array of the parameter."""
    sizes = [size if kept else 1 for size, kept in zip(tree.raw(leaf).shape, _is_separate(leaf), strict=True)]
    assert math.prod(sizes) == numbers.size, f"{numbers.shape} are not the numbers of the tensors of {sizes}"
    return numbers.reshape(sizes)


def with_array(leaf: Any, array: jax.Array) -> Any:
    """The leaf with another array of the same axes."""
    return NamedArray(array, leaf.axes) if tree.is_named(leaf) else array


def with_arrays(old: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """The tree with other arrays of the same axes, by path."""
    return tree.map_leaves(lambda path, leaf: with_array(leaf, arrays[path]), old)


def _is_separate(leaf: Any) -> list[bool]:
    """Tells whether each axis tells tensors apart."""
    if tree.is_named(leaf):
        return [axis.name in _SEPARATE for axis in leaf.axes]
    return [False] * tree.raw(leaf).ndim


_MIN_STD = 1e-6


def clip_by_rms(max_rms: float) -> optax.GradientTransformation:
    """Scales each parameter's update in each layer down to a root mean square of at most `max_rms`.

    Source: Shazeer and Stern 2018, Adafactor (arXiv:1804.04235), section 6; applied to the update including momentum.
    """

    def clipped(update: Any) -> Any:
        if not tree.is_named(update):
            return update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(jnp.square(update))) / max_rms)
        axes = tuple(axis for axis in update.axes if axis.name not in STACKED_LAYERS)
        square = hax.mean(hax.square(update), axes) if axes else hax.square(update)
        return update / hax.maximum(hax.sqrt(square) / max_rms, 1.0)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(clipped, updates, is_leaf=tree.is_named), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)


def cautious(direction: optax.GradientTransformation, enabled: bool) -> optax.GradientTransformation:
    """Drops the elements of an update that point against the gradient, and scales up the rest of each parameter's layer.

    Source: Liang et al. 2024, Cautious Optimizers (arXiv:2411.16085), algorithm 1. The state is that of `direction`.
    """
    if not enabled:
        return direction

    def masked(update: Any, gradient: Any) -> Any:
        agrees = (update * gradient > 0) * 1.0
        if not tree.is_named(update):
            return update * agrees * update.size / (jnp.sum(agrees) + 1)
        axes = tuple(axis for axis in update.axes if axis.name not in STACKED_LAYERS)
        size, count = hax.axis_size(axes), hax.sum(agrees, axes) if axes else agrees
        return (update * agrees * (size / (count + 1))).astype(update.dtype)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moved, state = direction.update(updates, state, params)
        return jax.tree.map(masked, moved, updates, is_leaf=tree.is_named), state

    return optax.GradientTransformation(direction.init, update_fn)


@dataclass(frozen=True)
class ClipUpdateNorm:
    """Scales an update down to the mean norm of recent updates plus a multiple of their standard deviation.

    Attributes:
        rolling_interval_length: number of recent steps to compare with. Nothing is clipped before half of them have run.
        sigma_factor: the limit is this many standard deviations above the mean.
    """

    rolling_interval_length: Annotated[int, Interval(ge=4, le=1_000_000)] = 128
    sigma_factor: PositiveFloat = 3.0

    def build(self) -> optax.GradientTransformation:
        """The gradient transformation.

        Its window stores norms before clipping: clipped norms would lower the limit further and further.
        """

        def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
            norm = optax.global_norm(updates)
            limit = state.mean() + self.sigma_factor * jnp.maximum(state.std(), _MIN_STD)
            ready = state.count >= self.rolling_interval_length // 2
            scale = jnp.where(ready & (norm > limit), limit / norm, 1.0)
            return jax.tree.map(lambda u: (u * scale).astype(u.dtype), updates), state.push(norm)

        def init_fn(params: Any) -> Any:
            return RollingWindow.empty(self.rolling_interval_length)

        return optax.GradientTransformation(init_fn, update_fn)


_SMALLEST = 1e-30  # of a norm that another one is divided by


class AdaGcState(NamedTuple):
    """State of AdaGC. Each tree has the structure of the parameters, and one number for each tensor (`per_tensor`).

    Attributes:
        count: int32, number of steps so far in which the tensor had a gradient.
        norm: float32, running norm of the clipped gradients: with `mode: paper`, gamma of the paper; with zscore, their mean.
        variance: float32, running variance of the norms of the clipped gradients; None with `mode: paper`.
    """

    count: Any
    norm: Any
    variance: Any


@dataclass(frozen=True)
class AdaGc:
    """Clips the gradient of each tensor by its own recent norms. A tensor is a parameter's part in one layer and one expert.

    In the first steps (`warmup`) norms are not representative yet, and mode paper clips the norm of the whole gradient
    instead. A tensor whose gradient is exactly 0, such as that of an expert without tokens, is left out of that step. The
    warmup of a tensor begins with its first gradient, so layers that a model gains later have their own.

    The paper uses it in place of clipping the global norm: set `max_grad_norm: null` beside it. Otherwise both apply, AdaGC
    first.

    Attributes:
        mode: what a norm may be at most. paper: `lambda_rel` times the running norm. zscore: the running mean of the norms
            plus `threshold` times their standard deviation; its warmup clips nothing.
        lambda_rel: for mode paper: the norm of a tensor's gradient is at most this many times its running norm.
        lambda_abs: for mode paper: the largest norm of the whole gradient during the warmup.
        threshold: for mode zscore: number of standard deviations.
        beta: decay rate of the running norm. The norms are those after clipping, so that a spike does not raise its own
            limit.
        warmup: number of steps of the warmup.
    """

    mode: Literal["paper", "zscore"] = "paper"
    lambda_rel: AboveOne = 1.05
    lambda_abs: PositiveFloat = 1.0
    threshold: PositiveFloat = 3.0
    beta: BelowOne = 0.98
    warmup: NonNegativeInt = 100

    key_rules: ClassVar[Rules] = (
        only("threshold", when="mode", is_="zscore"),
        only("lambda_rel", "lambda_abs", when="mode", is_="paper"),
    )

    def __post_init__(self):
        if self.mode == "zscore" and self.warmup < 2:
            raise ConfigError(
                f"adagc.warmup: {self.warmup} given, at least 2 expected with mode: zscore: one norm has no deviation, so no"
                " later one could be larger"
            )

    def build(self) -> optax.GradientTransformation:
        """The gradient transformation. Its state is an `AdaGcState`."""

        def init_fn(params: Any) -> AdaGcState:
            numbers = lambda dtype: tree.map_leaves(lambda _, leaf: per_tensor(leaf, 0, dtype), params)  # noqa: E731
            variance = numbers(jnp.float32) if self.mode == "zscore" else None
            return AdaGcState(numbers(jnp.int32), numbers(jnp.float32), variance)

        def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, AdaGcState]:
            gradients = dict(tree.leaves(updates))
            square = lambda leaf: with_array(leaf, jnp.square(tree.raw(leaf).astype(jnp.float32)))  # noqa: E731
            norms = {path: jnp.sqrt(sums_per_tensor(square(leaf))) for path, leaf in gradients.items()}
            count, norm, variance = (
                {path: tree.raw(leaf) for path, leaf in tree.leaves(numbers)}  # {} of None
                for numbers in (state.count, state.norm, state.variance)
            )
            total = jnp.sqrt(sum(jnp.sum(jnp.square(n)) for n in norms.values()))
            in_warmup = jnp.minimum(1.0, self.lambda_abs / jnp.maximum(total, _SMALLEST))
            scaled, new_count, new_norm, new_variance = {}, {}, {}, {}
            for path, n in norms.items():
                scale = self._scale(count[path], norm[path], variance.get(path), n, in_warmup)
                after = self._after(count[path], norm[path], variance.get(path), scale * n)
                kept, seen = (count[path], norm[path], variance.get(path)), n > 0
                new_count[path], new_norm[path], new_variance[path] = (
                    None if old is None else jnp.where(seen, new, old) for new, old in zip(after, kept, strict=True)
                )
                leaf = gradients[path]
                scaled[path] = (tree.raw(leaf).astype(jnp.float32) * by_element(scale, leaf)).astype(leaf.dtype)
            pairs = ((state.count, new_count), (state.norm, new_norm), (state.variance, new_variance))
            return with_arrays(updates, scaled), AdaGcState(*(with_arrays(*pair) for pair in pairs))

        return optax.GradientTransformation(init_fn, update_fn)

    def _scale(self, count: Any, norm: Any, variance: Any, new: jax.Array, in_warmup: jax.Array) -> jax.Array:
        """Returns the factor of the gradients. Args: new: norms of this step's gradients; in_warmup: their factor then."""
        if self.mode == "paper":
            limit, early = self.lambda_rel * norm, in_warmup
        else:
            limit, early = norm + self.threshold * jnp.sqrt(variance), 1.0
        adaptive = jnp.minimum(1.0, limit / jnp.maximum(new, _SMALLEST))
        return jnp.where(count < self.warmup, early, jnp.where(count == 0, 1.0, adaptive))

    def _after(self, count: Any, norm: Any, variance: Any, clipped: jax.Array) -> tuple[Any, Any, Any]:
        """Count, norm and variance after a step. Args: clipped: norms of the clipped gradients."""
        if self.mode == "paper":
            mean = self.beta * norm + (1 - self.beta) * clipped
            following = jnp.where(count < self.warmup, jnp.minimum(norm, clipped), mean)
            return count + 1, jnp.where(count == 0, clipped, following), None
        # The first norms have equal weights.
        rate = jnp.maximum(1 / (count + 1), 1 - self.beta)
        change = clipped - norm
        return count + 1, norm + rate * change, (1 - rate) * (variance + rate * jnp.square(change))
