"""OLMo 3: OLMo 2's blocks with a sliding window in three of four layers, which long contexts do not rescale.

Source: OLMo Team 2025, "OLMo 3", section 3.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import jax

from jaxlm.core.field_types import NonNegativeFloat, NonNegativeInt, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, DecoderConfig, check_sizes
from jaxlm.models.decoders.pre_norm import check_pattern, pattern_keys, pattern_kinds
from jaxlm.models.families.olmo2 import post_norm_block
from jaxlm.models.rope import DefaultRotary, RotaryConfig, check_rope
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice


@choice(ModelConfig, "olmo3")
class Olmo3Config(DecoderConfig):
    """OLMo 3. The defaults are OLMo 3 7B before its context was extended.

    Attributes:
        rope: rotary position embedding of global layers.
        local_rope: rotary position embedding of local layers (those with a sliding window).
        sliding_window: number of tokens that each token attends to in local layers, including itself.
        sliding_window_pattern: layers are grouped by this number; the last of each group is global (full attention),
            the others are local (sliding window). Null if `local_layers` is set.
        local_layers: numbers of the local layers, counted from 0, instead of `sliding_window_pattern`.
        attention_bias: add biases to the query, key, value and output projections.
    """

    seq_len: PositiveInt = 8192
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=500000.0))
    local_rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=500000.0))
    sliding_window: PositiveInt = 4096
    sliding_window_pattern: PositiveInt | None = 4
    local_layers: list[NonNegativeInt] | None = None
    attention_bias: bool = False

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        local_kind, global_kind = LayerKind(self.local_rope, self.sliding_window), LayerKind(self.rope)
        return pattern_kinds(self, local_kind, global_kind)

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        return pattern_keys(self, kept)

    def check(self) -> None:
        check_sizes(self)
        check_pattern(self)
        for rope in (self.rope, self.local_rope):
            check_rope(rope, self.num_heads, self.HeadSize.size)

    def block(self, *, key: jax.Array) -> DecoderBlock:
        return post_norm_block(self, use_bias=self.attention_bias, key=key)
