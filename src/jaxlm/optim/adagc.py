"""AdaGC: scales the gradient of each tensor down if its norm is large compared with its own recent norms.

Source: Wang et al. 2025, AdaGC: Enhancing LLM Pretraining Stability via Adaptive Gradient Clipping (arXiv:2502.11034),
algorithm 1. The defaults are those of public ports; the authors' code (github.com/lishuai-97/AdaGC) has 1.04 and 0.99.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import AboveOne, BelowOne, NonNegativeInt, PositiveFloat
from jaxlm.optim.tensors import by_element, per_tensor, sums_per_tensor, with_array, with_arrays

_SMALLEST = 1e-30  # of a norm that another one is divided by


class AdaGcState(NamedTuple):
    """State of AdaGC. Each tree has the structure of the parameters, and one number for each tensor (`optim/tensors.py`).

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

    def __post_init__(self):
        unused = ("threshold",) if self.mode == "paper" else ("lambda_rel", "lambda_abs")
        for name in unused:
            if (value := getattr(self, name)) != getattr(AdaGc, name):
                raise ConfigError(
                    f"adagc.{name}: {value} given, but it has no effect with mode: {self.mode}. Remove it, or set"
                    f" mode: {'zscore' if self.mode == 'paper' else 'paper'}"
                )

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
            norms = {path: jnp.sqrt(sums_per_tensor(_square(leaf))) for path, leaf in gradients.items()}
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
        """What the gradients are multiplied by. Args: new: norms of this step's gradients; in_warmup: their factor then."""
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


def _square(leaf: Any) -> Any:
    return with_array(leaf, jnp.square(tree.raw(leaf).astype(jnp.float32)))
