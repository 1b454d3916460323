"""The block that most decoders have: attention or another mixer, then an MLP."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from haliax import NamedArray

from jaxlm.models.growth import StartsAsIdentity, without_output
from jaxlm.models.layers import GatedMlp, Mlp, dropout
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext, Mixer
from jaxlm.models.norms import Norm


class DecoderBlock(StartsAsIdentity):
    """x + attention(x), then x + mlp(x), with optional norms before and after each of the two. `attn` may be another mixer.

    Attributes:
        attn_norm, mlp_norm: applied to the input. None applies no norm.
        attn_post_norm, mlp_post_norm: applied to the output before it is added to x. None applies no norm.
        parallel: attention and MLP read the same x, and both outputs are added to it.
        residual_scale: factor of both outputs.
        dropout: dropout probability of both outputs.
    """

    attn_norm: Norm | None
    attn: Mixer
    mlp_norm: Norm | None
    mlp: Mlp | GatedMlp
    attn_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    parallel: bool = eqx.field(static=True, default=False)
    residual_scale: float = eqx.field(static=True, default=1.0)
    dropout: float = eqx.field(static=True, default=0.0)

    def __call__(
        self, x: NamedArray, context: LayerContext, layer_cache: LayerCache | None, *, key: jax.Array | None, **_: Any
    ) -> tuple[NamedArray, ForCache, None]:
        keys = (key, None, None) if key is None or not self.dropout else jax.random.split(key, 3)
        attended, new = self.attn(apply_norm(self.attn_norm, x), context, layer_cache, key=keys[0])
        attended = self._scaled(apply_norm(self.attn_post_norm, attended), keys[1])
        if self.parallel:
            return x + attended + self._feed_forward(x, keys[2]), new, None
        x = x + attended
        return x + self._feed_forward(x, keys[2]), new, None

    def as_identity(self) -> "DecoderBlock":
        attn, attn_post_norm = without_output(self.attn, "o_proj", self.attn_post_norm)
        mlp, mlp_post_norm = without_output(self.mlp, "down_proj", self.mlp_post_norm)
        return dataclasses.replace(self, attn=attn, mlp=mlp, attn_post_norm=attn_post_norm, mlp_post_norm=mlp_post_norm)

    def _feed_forward(self, x: NamedArray, key: jax.Array | None) -> NamedArray:
        return self._scaled(apply_norm(self.mlp_post_norm, self.mlp(apply_norm(self.mlp_norm, x))), key)

    def _scaled(self, out: NamedArray, key: jax.Array | None) -> NamedArray:
        return dropout(out if self.residual_scale == 1.0 else out * self.residual_scale, self.dropout, key)


def apply_norm(norm: Norm | None, x: NamedArray) -> NamedArray:
    """Applies a norm, or none."""
    return x if norm is None else norm(x)
