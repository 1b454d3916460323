"""Llama: rotary positions, grouped queries, RMSNorm, SwiGLU.

Source: Touvron et al. 2023 (arXiv:2302.13971 and arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from dataclasses import dataclass

import jax

from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, decoder_flops, gated_mlp, pre_norm_block, projections
from jaxlm.models.families.pre_norm import UniformConfig
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.layers import SelfAttention


@ModelConfig.register_subclass("llama")
@dataclass(frozen=True)
class LlamaConfig(UniformConfig):
    """Llama's sizes; the defaults are Llama 2 7B at half its context.

    Attributes:
        attention_bias: whether queries, keys, values and attention's output have biases.
        mlp_bias: whether the maps of the feed-forward network have biases.
    """

    attention_bias: bool = False
    mlp_bias: bool = False

    def attention(self, keys: jax.Array) -> SelfAttention:
        """See `PreNormConfig.attention`."""
        return SelfAttention(**projections(self, keys, qkv_bias=self.attention_bias, out_bias=self.attention_bias))

    def block(self, *, key: jax.Array) -> DecoderBlock:
        """One freshly initialised block."""
        keys = jax.random.split(key, 7)
        return pre_norm_block(self, self.attention(keys[:4]), gated_mlp(self, keys[4:], use_bias=self.mlp_bias))

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Floating-point operations of one training token."""
        return decoder_flops(self, vocab_size, mlp_matrices=3)
