"""OLMo 2: Llama's blocks with norms after attention and MLP, and query and key norms over all heads jointly.

Source: OLMo Team 2025 (arXiv:2501.00656), section 3.2.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeFloat, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import same_keys, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "olmo2")
class Olmo2Config(RotaryDecoderConfig, LlamaBlocks):
    """OLMo 2. The defaults are OLMo 2 7B."""

    seq_len: PositiveInt = 4096
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=500000.0))
    attention_bias: bool = False
    use_qk_norm = True
    norms_all_heads = True
    norms_only_follow = True


FAMILY = Family(
    model_types=("olmo2",),
    architecture="Olmo2ForCausalLM",
    config=Olmo2Config,
    keys=(
        *usual_keys(length=2048, eps_default=1e-5),
        *same_keys(attention_bias=False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(
        llama_rows(
            config,
            norms_first=True,
            attn_post_norm="post_attention_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        )
    ),
)
