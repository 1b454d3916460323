"""The products of a chunk of hidden states with the head, and those of their gradients: plain, or in fp8.

Shapes: as in `jaxlm.models.chunked_loss`.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxlm.core.products.fp8 import Fp8, Scaled, scaled_product, to_fp8
from jaxlm.core.products.matmul import einsum
from jaxlm.core.products.stored_weights import StoredArray
from jaxlm.core.sharding import current_platform
from jaxlm.core.tracing import trace_options
from jaxlm.models.token_sharding import TokenSharding


class HeadProducts(abc.ABC):
    """The products with the head. All results are float32."""

    @abc.abstractmethod
    def logits(self, x_CD: jax.Array) -> jax.Array:
        """[C, V]."""

    @abc.abstractmethod
    def hidden_gradient(self, d_logits_CV: jax.Array) -> jax.Array:
        """[C, D], of this shard of the vocabulary."""

    @abc.abstractmethod
    def head_gradient(self, d_logits_CV: jax.Array, x_CD: jax.Array) -> jax.Array:
        """[V, D], of these tokens."""


@dataclass(frozen=True)
class PlainHead(HeadProducts):
    """Products in the dtype of the head."""

    w_VD: jax.Array | StoredArray

    def logits(self, x_CD: jax.Array) -> jax.Array:
        return einsum("cd,vd->cv", x_CD, self.w_VD, jnp.float32)

    def hidden_gradient(self, d_logits_CV: jax.Array) -> jax.Array:
        return einsum("cv,vd->cd", d_logits_CV, self.w_VD, jnp.float32)

    def head_gradient(self, d_logits_CV: jax.Array, x_CD: jax.Array) -> jax.Array:
        return head_gradient(d_logits_CV, x_CD)


def head_gradient(d_logits_CV: jax.Array, x_CD: jax.Array) -> jax.Array:
    """The gradient of the head, [V, D] in float32, as a product in the dtype of the logits' gradient."""
    x_CD = x_CD.astype(d_logits_CV.dtype)
    parts = trace_options().block_sizes.head_gradient_parts or _default_parts(x_CD.dtype)
    if parts > 1 and len(x_CD) % parts == 0:
        divided = (a.reshape(parts, -1, a.shape[-1]) for a in (d_logits_CV, x_CD))
        return jnp.einsum("pcv,pcd->vd", *divided, preferred_element_type=jnp.float32)
    return jnp.einsum("cv,cd->vd", d_logits_CV, x_CD, preferred_element_type=jnp.float32)


def _default_parts(dtype: Any) -> int:
    """XLA for CPUs leaves this product to no library, and computes it in float32, unless it sums over two axes. In float32,
    that is not faster with all vocabularies: `jaxlm bench --tune` measures it."""
    return 2 if current_platform() == "cpu" and dtype == jnp.bfloat16 else 1


@dataclass(frozen=True)
class TensorwiseHead(HeadProducts):
    """Products in fp8, with one scale for all hidden states, one for the head and one for the gradient of all logits.

    The scale of the gradient is that of an upper bound: the largest gradient of all tokens is not known while they are
    processed in chunks, and the chunks depend on the number of devices. e5m2 has the range for it.

    Attributes:
        x_scale, gradient_scale: scales of the hidden states and of the gradient of the logits.
        w_VD: the head.
    """

    fp8: Fp8
    x_scale: jax.Array
    gradient_scale: jax.Array
    w_VD: Scaled

    @staticmethod
    def of(fp8: Fp8, x_BSD: jax.Array, w_VD: jax.Array, bound: jax.Array, sharding: TokenSharding) -> "TensorwiseHead":
        """The products for these hidden states. Args: bound: no gradient of this device's logits is larger."""
        x_scale = fp8.scale(sharding.max_tokens(fp8.maximum(x_BSD, ()).reshape(1, 1)))
        gradient_scale = fp8.scale(sharding.max_tokens(bound.reshape(1, 1)), fp8.gradient_dtype)
        w_scale = fp8.scale(sharding.max_vocab(fp8.maximum(w_VD, ())))
        return TensorwiseHead(fp8, x_scale, gradient_scale, to_fp8(w_VD, w_scale))

    def logits(self, x_CD: jax.Array) -> jax.Array:
        return scaled_product(to_fp8(x_CD, self.x_scale), self.w_VD, (1,), (1,), jnp.float32, fast=True)

    def hidden_gradient(self, d_logits_CV: jax.Array) -> jax.Array:
        return scaled_product(self._gradient(d_logits_CV), self.w_VD, (1,), (0,), jnp.float32)

    def head_gradient(self, d_logits_CV: jax.Array, x_CD: jax.Array) -> jax.Array:
        x = to_fp8(x_CD, self.x_scale)
        return scaled_product(self._gradient(d_logits_CV), x, (0,), (0,), jnp.float32)

    def _gradient(self, d_logits_CV: jax.Array) -> Scaled:
        return to_fp8(d_logits_CV, self.gradient_scale, self.fp8.gradient_dtype)


@dataclass(frozen=True)
class RowwiseHead(HeadProducts):
    """Products in fp8 with a scale for each vector that they sum over, except the gradient of the head.

    That product sums over all tokens, so its scales would depend on how the tokens are divided into chunks and devices. It
    is computed in the dtype of the head.

    Attributes:
        w_VD: the head with a scale per token of the vocabulary.
        w_for_gradient_VD: the head with a scale per feature.
    """

    fp8: Fp8
    sharding: TokenSharding
    w_VD: Scaled
    w_for_gradient_VD: Scaled

    @staticmethod
    def of(fp8: Fp8, w_VD: jax.Array, sharding: TokenSharding) -> "RowwiseHead":
        """The products with this head."""
        scale = fp8.scale(sharding.max_vocab(fp8.maximum(w_VD, (0,))))
        return RowwiseHead(fp8, sharding, fp8.quantized(w_VD, (1,)), to_fp8(w_VD, scale))

    def logits(self, x_CD: jax.Array) -> jax.Array:
        return scaled_product(self.fp8.quantized(x_CD, (1,)), self.w_VD, (1,), (1,), jnp.float32, fast=True)

    def hidden_gradient(self, d_logits_CV: jax.Array) -> jax.Array:
        largest_C1 = self.sharding.max_vocab(self.fp8.maximum(d_logits_CV, (1,)))
        gradient = to_fp8(d_logits_CV, self.fp8.scale(largest_C1, self.fp8.gradient_dtype), self.fp8.gradient_dtype)
        return scaled_product(gradient, self.w_for_gradient_VD, (1,), (0,), jnp.float32)

    def head_gradient(self, d_logits_CV: jax.Array, x_CD: jax.Array) -> jax.Array:
        return head_gradient(d_logits_CV, x_CD)


class HeadKind(Protocol):
    """Computes the products with a head. Static, so it must be hashable."""

    def __call__(
        self, x_BSD: jax.Array, w_VD: jax.Array | StoredArray, columns: Sequence[jax.Array], sharding: TokenSharding
    ) -> HeadProducts:
        """The products for these hidden states. Args: columns: those of the loss."""
        ...


def plain_head(x_BSD: Any, w_VD: jax.Array | StoredArray, columns: Any, sharding: TokenSharding) -> HeadProducts:
    """Products in the dtype of the head."""
    return PlainHead(w_VD)


@dataclass(frozen=True)
class NextTokenFp8:
    """Products in fp8, for the next-token loss with targets and the loss mask as columns.

    Attributes:
        z: weight of the z-loss.
    """

    fp8: Fp8
    z: float

    def __call__(self, x_BSD, w_VD, columns, sharding: TokenSharding) -> HeadProducts:
        if self.fp8.recipe == "rowwise":
            return RowwiseHead.of(self.fp8, w_VD, sharding)
        # A probability minus a target is within [-1, 1]. The z-loss adds 2 z lse times a probability.
        bound = jnp.max(jnp.abs(columns[1])) * (1 + 2 * self.z * _LARGE_LSE)
        return TensorwiseHead.of(self.fp8, x_BSD, w_VD, bound, sharding)


_LARGE_LSE = 1000.0  # logsumexp of a model that is about to diverge; beyond it, gradients saturate
