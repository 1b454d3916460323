"""OLMo 1: Llama's blocks with LayerNorms that have no parameters, and queries, keys and values that may be clipped.

Source: Groeneveld et al. 2024 (arXiv:2402.00838), section 2.1.
"""

import jax

from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, gated_mlp, projections
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.norms import UnweightedLayerNorm
from jaxlm.reading.choices import choice


@choice(ModelConfig, "olmo")
class OlmoConfig(RotaryDecoderConfig):
    """OLMo and OLMo 1.7. The defaults are OLMo 7B.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        clip_qkv: queries, keys and values are clipped to [-clip_qkv, clip_qkv]. Null does not clip.
    """

    seq_len: PositiveInt = 2048
    layer_norm_epsilon: NonNegativeFloat = 1e-5
    attention_bias: bool = False
    clip_qkv: PositiveFloat | None = None

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 7)
        maps = projections(self, keys[:4], qkv_bias=self.attention_bias, out_bias=self.attention_bias)
        attn = SelfAttention(**maps, clip_qkv=self.clip_qkv)
        return DecoderBlock(self.norm(), attn, self.norm(), gated_mlp(self, keys[4:]))

    def norm(self) -> UnweightedLayerNorm:
        return UnweightedLayerNorm(self.Embed, self.layer_norm_epsilon)
