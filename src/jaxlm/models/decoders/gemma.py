"""Base config of Gemma 2 and 3: pre- and post-norms, scaled embeddings, alternating local and global layers."""

import abc
from dataclasses import dataclass

import jax
from haliax import Axis

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveFloat, PositiveInt
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.decoder import Decoder, DecoderBlock, DecoderConfig, gated_mlp, projections
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.norms import RMSNorm


@dataclass(frozen=True)
class GemmaConfig(PatternConfig):
    """A Gemma family. Subclasses define the rotary embeddings and the norms of queries and keys.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        query_pre_attn_scalar: attention scores are divided by the square root of this number.
        attn_soft_cap: soft cap of the attention scores, `cap * tanh(score / cap)`. Null applies no cap.
        final_soft_cap: soft cap of the logits, `cap * tanh(logit / cap)`. Null applies no cap.
    """

    seq_len: PositiveInt = 8192
    num_layers: NumLayers = 26
    head_dim: PositiveInt | None = 256
    activation_function: str = "gelu_new"
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: PositiveInt = 256
    attn_soft_cap: PositiveFloat | None = None
    final_soft_cap: PositiveFloat | None = None

    @abc.abstractmethod
    def head_norms(self) -> tuple[RMSNorm | None, RMSNorm | None]:
        """The norms of each head's queries and keys; None for no norm."""

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 7)
        q_norm, k_norm = self.head_norms()
        attn = SelfAttention(
            **projections(self, keys[:4], qkv_bias=self.attention_bias, out_bias=self.attention_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            scale=self.query_pre_attn_scalar**-0.5,
            rule=ScoreRule(soft_cap=self.attn_soft_cap),
        )
        norms = [gemma_norm(self, self.Embed) for _ in range(4)]
        return DecoderBlock(norms[0], attn, norms[1], gated_mlp(self, keys[4:]), norms[2], norms[3])

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        return Decoder.init(
            self,
            Vocab,
            final_norm=gemma_norm(self, self.Embed),
            key=key,
            embed_scale=self.hidden_dim**0.5,
            logit_soft_cap=self.final_soft_cap,
        )


def gemma_norm(config: DecoderConfig, Over: Axis) -> RMSNorm:
    """Initializes an RMSNorm that multiplies by 1 + weight."""
    return RMSNorm.init(Over, config.layer_norm_epsilon, offset=1.0)
