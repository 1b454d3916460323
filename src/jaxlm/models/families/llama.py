"""Llama: rotary position embeddings, grouped-query attention, RMSNorm, SwiGLU.

Source: Touvron et al. 2023 (arXiv:2302.13971 and arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from dataclasses import dataclass

import jax

from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, gated_mlp, pre_norm_block, projections
from jaxlm.models.families.pre_norm import UniformConfig
from jaxlm.models.layers import SelfAttention


@ModelConfig.register_subclass("llama")
@dataclass(frozen=True)
class LlamaConfig(UniformConfig):
    """Llama. The defaults are Llama 2 7B with half its context length.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        mlp_bias: add biases to the MLP projections.
        hybrid_norm: also apply a norm to the output of attention and of the MLP, before it is added. Hugging Face's Llama
            has no such norm, so that the model cannot be exported.
        input_embedding_norm: apply a norm to the token embeddings before the first layer. Such a model cannot be exported
            either.
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    hybrid_norm: bool = False
    input_embedding_norm: bool = False

    def attention(self, keys: jax.Array) -> SelfAttention:
        return SelfAttention(**projections(self, keys, qkv_bias=self.attention_bias, out_bias=self.attention_bias))

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 7)
        return pre_norm_block(self, self.attention(keys[:4]), gated_mlp(self, keys[4:], use_bias=self.mlp_bias))
