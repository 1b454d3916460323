"""Llama's blocks and those of its relatives, put together from what a family declares."""

import dataclasses
from typing import Any, ClassVar, Literal

import haliax as hax
import jax
from haliax import NamedArray

from jaxlm.core.field_types import BelowOne, PositiveFloat, PositiveInt
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.decoder import DecoderConfig, gated_mlp, plain_mlp, pre_norm_block, projections, rms_norm
from jaxlm.models.decoders.block import DecoderBlock
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


class LlamaAttention(DecoderConfig):
    """A family declares as keys the values that its config.json has. Others it may set for all its models, without an
    annotation: `use_qk_norm = True`.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        attention_out_bias: add a bias to the output projection of attention. Null means `attention_bias`.
        qk_layernorm: apply a LayerNorm to each head's queries and keys, with weights of its own.
        use_qk_norm: apply an RMSNorm to each head's queries and keys, with the same weights for all heads.
        clip_qkv: queries and keys, after their norms, and values are clipped to [-clip_qkv, clip_qkv]. Null does not clip.
        attention_multiplier: attention scores are multiplied by this number, in place of `1 / sqrt(head_dim)`.
        query_pre_attn_scalar: attention scores are divided by the square root of this number, in place of both.
        attn_soft_cap: soft cap of the attention scores, `cap * tanh(score / cap)`. Null applies no cap.
        attention_dropout: dropout probability of the attention weights.
    """

    attention_bias: bool = False
    attention_out_bias: bool | None = None
    qk_layernorm: bool = False
    use_qk_norm: bool = False
    clip_qkv: PositiveFloat | None = None
    attention_multiplier: PositiveFloat | None = None
    query_pre_attn_scalar: PositiveInt | None = None
    attn_soft_cap: PositiveFloat | None = None
    attention_dropout: BelowOne = 0.0
    norms_all_heads: ClassVar[bool] = False
    """The RMSNorms of queries and keys are over all heads jointly."""
    attention_sinks: ClassVar[bool] = False
    """Each head has a score beside those of the keys, without a value."""
    norms_follow_rotation: ClassVar[bool] = False
    """The norms of queries and keys come after the rotation."""

    def attention(self, keys: jax.Array) -> SelfAttention:
        """Initializes the attention of one layer. Takes four keys."""
        heads, (Size, eps) = (self.Heads, self.KVHeads), (self.HeadSize, self.layer_norm_epsilon)
        joint, offset = self.norms_all_heads, self.norm_offset
        norms: list[Any] = [None, None]
        if self.qk_layernorm:
            norms = [HeadwiseLayerNorm.init(axis, Size, eps) for axis in heads]
        elif self.use_qk_norm:
            norms = [RMSNorm.init((axis, Size) if joint else Size, eps, offset=offset) for axis in heads]
        out_bias = self.attention_bias if self.attention_out_bias is None else self.attention_out_bias
        sinks, divisor = None, self.query_pre_attn_scalar
        if self.attention_sinks:
            sinks = hax.random.normal(jax.random.fold_in(keys[0], 1), self.Heads) * self.initializer_range
        return SelfAttention(
            **projections(self, keys, qkv_bias=self.attention_bias, out_bias=out_bias),
            q_norm=norms[0],
            k_norm=norms[1],
            sinks=sinks,
            norms_follow_rotation=self.norms_follow_rotation,
            clip_qkv=self.clip_qkv,
            scale=self.attention_multiplier if divisor is None else divisor**-0.5,
            rule=ScoreRule(soft_cap=self.attn_soft_cap),
            dropout=self.attention_dropout,
        )


class LlamaBlocks(LlamaAttention):
    """As in `LlamaAttention`, families declare or set these values: `mlp_matrices = 2` gives MLPs without a gate.

    Attributes:
        mlp_bias: add biases to the MLP projections.
        use_parallel_residual: attention and MLP read the same normed input. False runs the MLP on the output of attention.
        residual_multiplier: the outputs of attention and MLP are multiplied by this number before they are added.
        residual_dropout: dropout probability of the outputs of attention and MLP.
    """

    mlp_bias: bool = False
    use_parallel_residual: bool = False
    residual_multiplier: PositiveFloat = 1.0
    residual_dropout: BelowOne = 0.0
    mlp_matrices: ClassVar[int] = 3
    """Weight matrices of an MLP: 3 with a gate, 2 without."""
    norms: ClassVar[Literal["rms", "layer", "layer without bias"]] = "rms"
    """The norms over the residual stream: RMSNorms, or LayerNorms."""
    norms_only_follow: ClassVar[bool] = False
    """Norms come after attention and MLP, instead of before. With `hybrid_norm`, there are both."""

    def norm(self) -> Norm:
        if self.norms == "rms":
            return rms_norm(self)
        return LayerNorm.init(self.Embed, self.layer_norm_epsilon, use_bias=self.norms == "layer")

    def mlp(self, keys: jax.Array) -> Mlp | GatedMlp:
        """Initializes the MLP of one layer. Takes three keys."""
        initial = gated_mlp if self.mlp_matrices == 3 else plain_mlp
        return initial(self, keys, use_bias=self.mlp_bias)

    def block(self, *, key: jax.Array) -> Block:
        keys = jax.random.split(key, 7)
        attn, mlp = self.attention(keys[:4]), self.mlp(keys[4:])
        if self.use_parallel_residual:
            return ParallelBlock(self.norm(), attn, mlp)
        if self.norms_only_follow:
            return DecoderBlock(None, attn, None, mlp, self.norm(), self.norm())
        return pre_norm_block(self, attn, mlp, residual_scale=self.residual_multiplier, dropout=self.residual_dropout)
