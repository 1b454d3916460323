"""GPT-2's blocks and model: LayerNorms, an embedding of positions, and scores that may shrink from layer to layer.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3, and the code released
with it (openai/gpt-2, `src/model.py`).
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from haliax import NamedArray

from jaxlm.core.axes import HEAD_SIZE
from jaxlm.core.sharding import for_lookup
from jaxlm.models.base import Inputs
from jaxlm.models.decoder import TransformerModel
from jaxlm.models.growth import StartsAsIdentity, without_output
from jaxlm.models.layers import Embedding, Mlp, dropout, token_embeddings
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext
from jaxlm.models.norms import LayerNorm
from jaxlm.models.stacks import Body


class Gpt2Block(StartsAsIdentity):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attn_norm: LayerNorm
    attn: SelfAttention
    mlp_norm: LayerNorm
    mlp: Mlp
    inverse_layer_scale: bool = eqx.field(static=True)
    resid_pdrop: float = eqx.field(static=True)

    def __call__(
        self,
        x: NamedArray,
        context: LayerContext,
        layer_cache: LayerCache | None,
        *,
        index: NamedArray,
        key: jax.Array | None,
    ) -> tuple[NamedArray, ForCache, None]:
        k_attn, k_attn_out, k_mlp_out = (None, None, None) if key is None else jax.random.split(key, 3)
        scale = None
        if self.inverse_layer_scale:
            scale = self.attn.q_proj.weight.axis_size(HEAD_SIZE) ** -0.5 if self.attn.scale is None else self.attn.scale
            scale = scale / (index.array + 1)
        out, new = self.attn(self.attn_norm(x), context, layer_cache, scale=scale, key=k_attn)
        x = x + dropout(out, self.resid_pdrop, k_attn_out)
        out = self.mlp(self.mlp_norm(x))
        return x + dropout(out, self.resid_pdrop, k_mlp_out), new, None

    def as_identity(self) -> "Gpt2Block":
        attn, _ = without_output(self.attn, "o_proj", None)
        mlp, _ = without_output(self.mlp, "down_proj", None)
        return dataclasses.replace(self, attn=attn, mlp=mlp)


class Gpt2(TransformerModel):
    """A transformer with an embedding of positions."""

    tokens: Embedding
    positions: Embedding
    body: Body
    head: Linear | None
    config: Any = eqx.field(static=True)

    def embedded(
        self, inputs: Inputs, stream: NamedArray | None, key: jax.Array | None
    ) -> tuple[NamedArray, jax.Array | None]:
        k_embed, k_body = (None, None) if key is None else jax.random.split(key)
        if stream is None:
            tokens, positions = for_lookup((self.tokens, self.positions))
            x = token_embeddings(tokens, inputs) + positions(inputs.positions)
            stream = dropout(x, self.config.embed_pdrop, k_embed)
        return stream, k_body
