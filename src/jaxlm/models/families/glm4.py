"""GLM 4: Llama's blocks with norms before and after attention and MLP, and rotations of neighboring features.

Source: GLM Team 2024 (arXiv:2406.12793), section 2, and the code of the 0414 models in transformers.
"""

from dataclasses import field

import jax

from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, gated_mlp, projections, rms_norm
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "glm4")
class Glm4Config(RotaryDecoderConfig):
    """GLM 4. The defaults are GLM-4 9B 0414 with half its context length.

    Attributes:
        attention_bias: add biases to the query, key and value projections.
    """

    seq_len: PositiveInt = 16384
    intermediate_dim: PositiveInt = 13696
    num_layers: NumLayers = 40
    num_kv_heads: PositiveInt | None = 2
    head_dim: PositiveInt | None = 128
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(partial_rotary_factor=0.5))
    attention_bias: bool = True
    interleaved = True

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 7)
        attn = SelfAttention(**projections(self, keys[:4], qkv_bias=self.attention_bias, out_bias=False))
        norms = [rms_norm(self) for _ in range(4)]
        return DecoderBlock(norms[0], attn, norms[1], gated_mlp(self, keys[4:]), norms[2], norms[3])
