"""OLMo 3: OLMo 2's blocks with a sliding window in three of four layers, which long contexts do not rescale.

Source: OLMo Team 2025, "OLMo 3", section 3.
"""

from dataclasses import field

import jax

from jaxlm.core.field_types import NonNegativeFloat, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.families.olmo2 import post_norm_block
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "olmo3")
class Olmo3Config(PatternConfig):
    """OLMo 3. The defaults are OLMo 3 7B before its context was extended.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        rope: rotary position embedding of global layers.
        local_rope: rotary position embedding of local layers (those with a sliding window).
    """

    seq_len: PositiveInt = 8192
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=500000.0))
    local_rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=500000.0))
    sliding_window_pattern: PositiveInt | None = 4
    attention_bias: bool = False

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        return self.local_rope, self.rope

    def block(self, *, key: jax.Array) -> DecoderBlock:
        return post_norm_block(self, use_bias=self.attention_bias, key=key)
