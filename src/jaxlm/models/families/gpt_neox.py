"""GPT-NeoX and Pythia: parallel attention and MLP, biases everywhere, partial rotary embeddings.

Source: Black et al. 2022 (arXiv:2204.06745), section 2.1; Biderman et al. 2023 (arXiv:2304.01373).
"""

from dataclasses import field

import jax

from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, plain_mlp, projections
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.norms import LayerNorm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "gpt_neox")
class GptNeoxConfig(RotaryDecoderConfig):
    """GPT-NeoX and Pythia. The defaults are Pythia 160M.

    Attributes:
        use_parallel_residual: attention and MLP read the same input. False runs the MLP on the output of attention.
        attention_bias: add biases to the query, key, value and output projections.
    """

    hidden_dim: PositiveInt = 768
    intermediate_dim: PositiveInt = 3072
    num_layers: NumLayers = 12
    num_heads: PositiveInt = 12
    activation_function: str = "gelu"
    use_parallel_residual: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(partial_rotary_factor=0.25))
    attention_bias: bool = True

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 6)
        attn = SelfAttention(**projections(self, keys[:4], qkv_bias=self.attention_bias, out_bias=self.attention_bias))
        mlp = plain_mlp(self, keys[4:], use_bias=True)
        return DecoderBlock(self.norm(), attn, self.norm(), mlp, parallel=self.use_parallel_residual)

    def norm(self) -> LayerNorm:
        return LayerNorm.init(self.Embed, self.layer_norm_epsilon, use_bias=True)
