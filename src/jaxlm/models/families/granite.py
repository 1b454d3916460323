"""Granite: Llama's blocks with factors for embeddings, attention scores, residual additions and logits.

Source: Granite Team 2024, "Granite 3.0 Language Models", section 2; the factors are those of Maximal Update
Parametrization (Yang et al. 2022, arXiv:2203.03466).
"""

import jax

from jaxlm.core.field_types import BelowOne, NumLayers, PositiveFloat, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, gated_mlp, pre_norm_block
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "granite")
class GraniteConfig(LlamaAttention, RotaryDecoderConfig):
    """Granite 3. The defaults are Granite 3.0 8B.

    Attributes:
        mlp_bias: add biases to the MLP projections.
        residual_multiplier: the outputs of attention and MLP are multiplied by this number before they are added.
    """

    seq_len: PositiveInt = 4096
    intermediate_dim: PositiveInt = 12800
    num_layers: NumLayers = 40
    num_kv_heads: PositiveInt | None = 8
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: PositiveFloat = 12.0
    attention_multiplier: PositiveFloat = 0.0078125
    residual_multiplier: PositiveFloat = 0.22
    logits_scaling: PositiveFloat = 16.0
    attention_dropout: BelowOne = 0.0

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 7)
        attn, mlp = self.attention(keys[:4]), gated_mlp(self, keys[4:], use_bias=self.mlp_bias)
        return pre_norm_block(self, attn, mlp, residual_scale=self.residual_multiplier)
