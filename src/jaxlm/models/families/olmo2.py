"""OLMo 2: Llama's blocks with norms after attention and MLP, and query and key norms over all heads jointly.

Source: OLMo Team 2025 (arXiv:2501.00656), section 3.2.
"""

from dataclasses import field

import jax

from jaxlm.core.field_types import NonNegativeFloat, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, DecoderConfig, gated_mlp, projections, rms_norm
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.norms import RMSNorm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "olmo2")
class Olmo2Config(RotaryDecoderConfig):
    """OLMo 2. The defaults are OLMo 2 7B.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
    """

    seq_len: PositiveInt = 4096
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=500000.0))
    attention_bias: bool = False

    def block(self, *, key: jax.Array) -> DecoderBlock:
        return post_norm_block(self, use_bias=self.attention_bias, key=key)


def post_norm_block(config: DecoderConfig, *, use_bias: bool, key: jax.Array) -> DecoderBlock:
    """Initializes a block whose norms follow attention and MLP, with query and key norms over all heads jointly.

    Args:
        use_bias: add biases to the projections of attention.
    """
    keys = jax.random.split(key, 7)
    q_norm, k_norm = (
        RMSNorm.init((axis, config.HeadSize), config.layer_norm_epsilon) for axis in (config.Heads, config.KVHeads)
    )
    maps = projections(config, keys[:4], qkv_bias=use_bias, out_bias=use_bias)
    attn = SelfAttention(**maps, q_norm=q_norm, k_norm=k_norm)
    return DecoderBlock(
        None, attn, None, gated_mlp(config, keys[4:]), attn_post_norm=rms_norm(config), mlp_post_norm=rms_norm(config)
    )
