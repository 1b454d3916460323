"""GLM 4: Llama's blocks with norms before and after attention and MLP, and rotations of neighboring features.

Source: GLM Team 2024 (arXiv:2406.12793), section 2, and the code of the 0414 models in transformers.
"""

from dataclasses import field

from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import rope, same_keys, usual_keys
from jaxlm.interop.hf.weights import fused_gated_mlp
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "glm4")
class Glm4Config(RotaryDecoderConfig, LlamaBlocks):
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
    attention_out_bias = False
    hybrid_norm = True
    interleaved = True


FAMILY = Family(
    model_types=("glm4",),
    architecture="Glm4ForCausalLM",
    config=Glm4Config,
    keys=(
        *usual_keys(length=131072, eps_default=1.5625e-07, head=128, rotary=rope(partial=0.5, rotates_part=True)),
        *same_keys(attention_bias=True),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *llama_rows(
            config,
            norms_first=True,
            mlp=None,
            attn_post_norm="post_self_attn_layernorm",
            mlp_norm="post_attention_layernorm",
            mlp_post_norm="post_mlp_layernorm",
        ),
        *fused_gated_mlp(),
    ),
)
