"""Llama's blocks and those of its relatives, put together from what a family declares."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
from haliax import Axis, NamedArray

from jaxlm.core.field_types import BelowOne, PositiveFloat
from jaxlm.models.decoder import Decoder, DecoderConfig, gated_mlp, plain_mlp, pre_norm_block, projections, rms_norm
from jaxlm.models.growth import StartsAsIdentity, without_output
from jaxlm.models.layers import GatedMlp, Mlp
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext, Mixer
from jaxlm.models.norms import HeadwiseLayerNorm, LayerNorm, Norm, RMSNorm
from jaxlm.models.stacks import Block


class ParallelBlock(StartsAsIdentity):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm for both (Wang & Komatsuzaki 2021, GPT-J)."""

    attn_norm: Norm
    attn: Mixer
    mlp: Mlp | GatedMlp

    def __call__(
        self, x: NamedArray, context: LayerContext, layer_cache: LayerCache | None, *, key: jax.Array | None, **_: Any
    ) -> tuple[NamedArray, ForCache, None]:
        normed = self.attn_norm(x)
        attended, new = self.attn(normed, context, layer_cache, key=key)
        return x + attended + self.mlp(normed), new, None

    def as_identity(self) -> "ParallelBlock":
        attn, _ = without_output(self.attn, "o_proj", None)
        mlp, _ = without_output(self.mlp, "down_proj", None)
        return dataclasses.replace(self, attn=attn, mlp=mlp)


class LlamaBlocks(DecoderConfig):
    """A family declares those of these values as keys that its config.json has. It may set the others for all its models,
    without an annotation: `interleaved = True`; `mlp_matrices = 2` gives MLPs without a gate.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        attention_out_bias: add a bias to the output projection of attention. Null means `attention_bias`.
        mlp_bias: add biases to the MLP projections.
        qk_layernorm: apply a LayerNorm to each head's queries and keys, with weights of its own.
        use_parallel_residual: attention and MLP read the same normed input. False runs the MLP on the output of attention.
        attention_dropout: dropout probability of the attention weights.
        residual_dropout: dropout probability of the outputs of attention and MLP.
        embedding_dropout: dropout probability of the token embeddings.
        logit_scale: logits are multiplied by this number.
    """

    attention_bias: bool = False
    attention_out_bias: bool | None = None
    mlp_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    attention_dropout: BelowOne = 0.0
    residual_dropout: BelowOne = 0.0
    embedding_dropout: BelowOne = 0.0
    logit_scale: PositiveFloat = 1.0
    norms: ClassVar[Literal["rms", "layer", "layer without bias"]] = "rms"
    """The norms over the residual stream: RMSNorms, or LayerNorms."""
    head_norms: ClassVar[Literal["before rotation", "after rotation"] | None] = None
    """Where an RMSNorm is applied to each head's queries and keys, with the same weights for all heads."""

    def norm(self) -> Norm:
        if self.norms == "rms":
            return rms_norm(self)
        return LayerNorm.init(self.Embed, self.layer_norm_epsilon, use_bias=self.norms == "layer")

    def attention(self, keys: jax.Array) -> SelfAttention:
        """Initializes the attention of one layer. Takes four keys."""
        out_bias = self.attention_bias if self.attention_out_bias is None else self.attention_out_bias
        maps = projections(self, keys, qkv_bias=self.attention_bias, out_bias=out_bias)
        q_norm, k_norm = None, None
        if self.head_norms is not None:
            q_norm, k_norm = (RMSNorm.init(self.HeadSize, self.layer_norm_epsilon) for _ in range(2))
        if self.qk_layernorm:
            heads = (self.Heads, self.KVHeads)
            q_norm, k_norm = (HeadwiseLayerNorm.init(axis, self.HeadSize, self.layer_norm_epsilon) for axis in heads)
        follow = self.head_norms == "after rotation"
        options: dict[str, Any] = {"norms_follow_rotation": follow, "dropout": self.attention_dropout}
        return SelfAttention(**maps, q_norm=q_norm, k_norm=k_norm, **options)

    def mlp(self, keys: jax.Array) -> Mlp | GatedMlp:
        """Initializes the MLP of one layer. Takes three keys."""
        initial = gated_mlp if self.mlp_matrices == 3 else plain_mlp
        return initial(self, keys, use_bias=self.mlp_bias)

    def block(self, *, key: jax.Array) -> Block:
        keys = jax.random.split(key, 7)
        attn, mlp = self.attention(keys[:4]), self.mlp(keys[4:])
        if self.use_parallel_residual:
            return ParallelBlock(self.norm(), attn, mlp)
        return pre_norm_block(self, attn, mlp, dropout=self.residual_dropout)

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        scale = None if self.logit_scale == 1.0 else self.logit_scale
        dropped = self.embedding_dropout
        return Decoder.init(self, Vocab, final_norm=self.norm(), key=key, embed_dropout=dropped, final_scale=scale)
