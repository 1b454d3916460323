"""Gemma 1: Llama's blocks with GeGLU, scaled embeddings, and norms that multiply by 1 + weight.

Source: Gemma Team 2024 (arXiv:2403.08295), section 2.
"""

import jax
from haliax import Axis

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import Decoder, DecoderBlock, gated_mlp, projections
from jaxlm.models.decoders.gemma import gemma_norm
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.reading.choices import choice


@choice(ModelConfig, "gemma")
class Gemma1Config(RotaryDecoderConfig):
    """Gemma 1. The defaults are Gemma 2B.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
    """

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 2048
    intermediate_dim: PositiveInt = 16384
    num_layers: NumLayers = 18
    num_heads: PositiveInt = 8
    num_kv_heads: PositiveInt | None = 1
    head_dim: PositiveInt | None = 256
    activation_function: str = "gelu_new"
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 7)
        maps = projections(self, keys[:4], qkv_bias=self.attention_bias, out_bias=self.attention_bias)
        norms = [gemma_norm(self, self.Embed) for _ in range(2)]
        return DecoderBlock(norms[0], SelfAttention(**maps), norms[1], gated_mlp(self, keys[4:]))

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        final_norm = gemma_norm(self, self.Embed)
        return Decoder.init(self, Vocab, final_norm=final_norm, key=key, embed_scale=self.hidden_dim**0.5)
