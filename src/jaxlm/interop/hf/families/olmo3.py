"""OLMo 3: OLMo 2's blocks with a sliding window in three of four layers, which long contexts do not rescale.

Source: OLMo Team 2025, "OLMo 3", section 3.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeFloat, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import (
    RESPELLED_WINDOWS,
    activation,
    head_dim,
    kv_heads,
    layer_ropes,
    same_keys,
    size_keys,
    window_pattern,
)
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "olmo3")
class Olmo3Config(PatternConfig, LlamaBlocks):
    """OLMo 3. The defaults are OLMo 3 7B before its context was extended.

    Attributes:
        rope: rotary position embedding of global layers.
        local_rope: rotary position embedding of local layers (those with a sliding window).
    """

    seq_len: PositiveInt = 8192
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=500000.0))
    local_rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=500000.0))
    sliding_window_pattern: PositiveInt | None = 4
    attention_bias: bool = False
    use_qk_norm = True
    norms_all_heads = True
    norms_only_follow = True

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        return self.local_rope, self.rope


FAMILY = Family(
    model_types=("olmo3",),
    architecture="Olmo3ForCausalLM",
    config=Olmo3Config,
    keys=(
        *size_keys(length=2048, eps_default=1e-5),
        kv_heads(),
        head_dim(),
        layer_ropes(theta=500000.0, local_theta=500000.0),
        activation("hidden_act", "silu"),
        window_pattern(4, window=4096),
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
    respelled=RESPELLED_WINDOWS,
)
