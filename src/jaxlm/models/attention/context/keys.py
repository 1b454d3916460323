"""Keys and values as devices send them to each other: as they are, or as what they are computed from.

Source: the latent of multi-head latent attention: DeepSeek-AI 2024, DeepSeek-V2 (arXiv:2405.04434), section 2.1, equations 9
to 19. It has fewer numbers than the keys and values of all heads, so a device computes these again for tokens of others.

Shapes: B batch, T position, S position of keys, K key/value heads, L latent, R rotated features of a key, P other features of
a key, V features of a value.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.tracing import CustomVjp

Pair = tuple[jax.Array, jax.Array]


class Keys(eqx.Module):
    """Keys [B, K, S, H] and values [B, K, S, V], or what they are computed from.

    Attributes:
        parts: what travels, [B, heads, S, features] each.
        weights: what all devices have.
        expand: `expand(parts, weights)` -> keys and values. None if the parts are these.
    """

    parts: Pair
    weights: tuple[jax.Array, ...] = ()
    expand: Callable[..., Pair] | None = eqx.field(static=True, default=None)

    def of(self, parts: Iterable[jax.Array]) -> "Keys":
        """The same for other tokens."""
        first, second = parts
        return dataclasses.replace(self, parts=(first, second))

    def expanded(self) -> Pair:
        return self.parts if self.expand is None else self.expand(self.parts, self.weights)

    def with_gradients(self) -> tuple[Pair, Callable[..., "Keys"]]:
        """Keys and values, and a function of their float32 gradients that returns those of `parts` and `weights`."""
        if self.expand is None:
            return self.parts, lambda dk, dv: self.of((dk, dv))
        keys, backward = jax.vjp(self.expand, self.parts, self.weights)

        def gradients(*d_keys: jax.Array) -> Keys:
            found = backward(tuple(d.astype(a.dtype) for d, a in zip(d_keys, keys, strict=True)))
            parts, weights = jax.tree.map(lambda a: a.astype(jnp.float32), found)
            return dataclasses.replace(self, parts=parts, weights=weights)

        return keys, gradients


@dataclass(frozen=True)
class _Expand:
    """Computes keys and values from a latent. Attributes: plain: features of a key that are not rotated."""

    plain: int

    def __call__(self, parts: Pair, weights: tuple[jax.Array]) -> Pair:
        (latents_BSL, rotated_BSR), (weight_KFL,) = (a[:, 0] for a in parts), weights
        both = jnp.einsum("bsl,kfl->bksf", latents_BSL.astype(weight_KFL.dtype), weight_KFL).astype(latents_BSL.dtype)
        plain, values = jnp.split(both, [self.plain], axis=-1)
        rotated = jnp.broadcast_to(rotated_BSR[:, None], (*plain.shape[:-1], rotated_BSR.shape[-1]))
        return jnp.concatenate([plain, rotated], axis=-1), values


class LatentKeys(NamedTuple):
    """What keys and values of all heads are computed from.

    Attributes:
        latents_BTL: normalized latents.
        rotated_BTR: the rotated features of keys, which all heads share.
        weight_K1FL: the projection of latents to the P other features of keys and to values, F = P + V.
    """

    latents_BTL: jax.Array
    rotated_BTR: jax.Array
    weight_K1FL: jax.Array

    def keys(self, axes: tuple[str, ...], size: int) -> Keys:
        """Keys and values of the heads of the weight, inside `jax.shard_map`.

        Args:
            axes: of the mesh, among whose devices the tokens are gathered.
            size: features of a key.
        """
        parts = (self.latents_BTL[:, None], self.rotated_BTR[:, None])
        parts = (_all_tokens(axes, parts[0]), _all_tokens(axes, parts[1])) if axes else parts
        return Keys(parts, (self.weight_K1FL[:, 0],), _Expand(size - self.rotated_BTR.shape[-1]))


@functools.partial(CustomVjp, nondiff_argnums=(0,))
def _all_tokens(axes: tuple[str, ...], part: jax.Array) -> jax.Array:
    """Gathers the tokens of all devices; gradients are summed in float32."""
    return jax.lax.all_gather(part, axes, axis=2, tiled=True)


def _all_tokens_forward(axes, part):
    return _all_tokens(axes, part), None


def _all_tokens_backward(axes, _, gradient):
    total = jax.lax.psum_scatter(gradient.astype(jnp.float32), axes, scatter_dimension=2, tiled=True)
    return (total.astype(gradient.dtype),)


_all_tokens.defvjp(_all_tokens_forward, _all_tokens_backward)
