"""PSGD Kron: momentum of hidden matrices, whitened from both sides; everything else by Adam.

Source: Li 2015, Preconditioned Stochastic Gradient Descent (arXiv:1512.04202); github.com/lixilinx/psgd_torch, whose
whitening of the momentum by Kronecker products this is. `jaxlm.optim.preconditioner` says what is done differently.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray

from jaxlm.core.errors import ConfigError
from jaxlm.optim.base import OptimizerConfig, ParameterGroup
from jaxlm.optim.clipping import clip_by_rms
from jaxlm.optim.matrices import MatrixView, matrices, replace_matrices
from jaxlm.optim.preconditioner import Factor, initial_factor, precondition
from jaxlm.optim.with_adam_fallback import with_adam_fallback


@OptimizerConfig.register_subclass("kron")
@dataclass(frozen=True)
class KronConfig(OptimizerConfig):
    """Clip the global norm, whiten the momentum of matrices, Adam for the rest, add the decay.

    Matrices are the weights of linear maps, each layer's on its own and whole (all heads of a projection together), but
    for those of the vocabulary. The whitened momentum of an m x n matrix has entries of about 1, where Adam's has 0.2 to
    0.4: its learning rate is smaller than Adam's. Beside the momentum, m^2 + n^2 numbers are kept. Both learning rates
    follow the one schedule.

    Attributes:
        learning_rate: the peak, of matrices.
        adam_lr: the peak, of everything else.
        beta1: decay of the running mean of gradients, of matrices and of everything else.
        preconditioner_lr: how far a step moves the factors towards what whitens its momentum; at most 1.
        preconditioner_init_scale: the first step's momentum is multiplied by its square.
        max_dense_size: a side of a matrix that is longer than this gets a diagonal factor.
        damping: standard deviation of the noise that gradients are taken to have; it bounds what is made of small ones.
        update_rms_clipping: whitened momenta of a larger root mean square are scaled down to it, parameter by parameter
            and layer by layer; null never scales.
        beta2, epsilon: Adam's, for everything else.
        max_grad_norm: gradients of a larger global norm are scaled down to it; null never scales.
    """

    learning_rate: float = 3e-4
    adam_lr: float = 6e-4
    beta1: float = 0.9
    preconditioner_lr: float = 0.1
    preconditioner_init_scale: float = 1.0
    max_dense_size: int = 8192
    damping: float = 1e-9
    update_rms_clipping: float | None = 1.1
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0

    separates_matrices: ClassVar[bool] = True

    def __post_init__(self):
        fits = {
            "preconditioner_lr": (0 < self.preconditioner_lr <= 1, "above 0 and at most 1"),
            "preconditioner_init_scale": (self.preconditioner_init_scale > 0, "above 0"),
            "max_dense_size": (self.max_dense_size >= 0, "0 (none) or more"),
            "damping": (self.damping >= 0, "0 or more"),
        }
        for name, (is_fine, expected) in fits.items():
            if not is_fine:
                raise ConfigError(f"optimizer.{name}: {getattr(self, name)} given, {expected} expected")

    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        clip = [] if self.update_rms_clipping is None else [clip_by_rms(self.update_rms_clipping)]
        direction = optax.chain(self._whitened(), *clip)
        return with_adam_fallback(
            self,
            groups,
            num_steps,
            ("kron", direction),
            optax.scale_by_adam(self.beta1, self.beta2, self.epsilon),
            adam_lr=self.adam_lr,
            max_grad_norm=self.max_grad_norm,
        )

    def _whitened(self) -> optax.GradientTransformation:
        def init_fn(params: Any) -> Any:
            return _State(
                jnp.zeros((), jnp.int32), {path: self._first(view) for path, view in matrices(params).items()}
            )

        def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            count, directions, memories = state.count + 1, {}, {}
            for path, view in matrices(updates).items():
                directions[path], memories[path] = self._step(view, state.memories[path], count)
            return replace_matrices(updates, directions), _State(count, memories)

        return optax.GradientTransformation(init_fn, update_fn)

    def _first(self, view: MatrixView) -> "_Memory":
        scale = self.preconditioner_init_scale**0.5  # shared between the two sides
        sides = (initial_factor(view.stacked, side, scale, self.max_dense_size) for side in (view.outputs, view.inputs))
        return _Memory(hax.zeros(view.weight.axes, jnp.float32), *sides)

    def _step(self, view: MatrixView, memory: "_Memory", count: jax.Array) -> tuple[NamedArray, "_Memory"]:
        """The whitened momentum of all matrices in one weight, and what is kept of them; `count`: steps with this one."""
        mean = self.beta1 * memory.mean + (1 - self.beta1) * view.weight.astype(jnp.float32)
        unbiased = view.of(mean) / (1 - self.beta1**count)
        white, left, right = precondition(
            unbiased, memory.left, memory.right, rate=self.preconditioner_lr, damping=self.damping
        )
        return view.named(white).astype(view.weight.dtype), _Memory(mean, left, right)


class _Memory(NamedTuple):
    """What is kept of a matrix: the running mean of its gradients, and what whitens its rows and its columns."""

    mean: NamedArray
    left: Factor
    right: Factor


class _State(NamedTuple):
    count: jax.Array
    memories: dict[str, _Memory]
