"""Gemma 3: norms on each head's queries and keys, and a separate rotary embedding for local layers.

Source: Gemma Team 2025 (arXiv:2503.19786), section 2, the text model.
"""

from dataclasses import field

from jaxlm.core.field_types import PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.gemma import GemmaConfig, gemma_norm
from jaxlm.models.norms import RMSNorm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "gemma3")
class Gemma3Config(GemmaConfig):
    """Gemma 3 (text only). The defaults are Gemma 3 1B.

    Attributes:
        rope: rotary position embedding of global layers.
        local_rope: rotary position embedding of local layers (those with a sliding window).
        use_bidirectional_attention: tokens attend to later ones too, in local layers to half of `sliding_window` on either
            side. For models that embed text, such as EmbeddingGemma; their logits do not predict the next token.
    """

    hidden_dim: PositiveInt = 1152
    intermediate_dim: PositiveInt = 6912
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt | None = 1
    sliding_window: PositiveInt = 512
    sliding_window_pattern: PositiveInt | None = 6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    local_rope: RotaryConfig = field(default_factory=DefaultRotary)
    use_bidirectional_attention: bool = False

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        return self.local_rope, self.rope

    def head_norms(self) -> tuple[RMSNorm, RMSNorm]:
        return gemma_norm(self, self.HeadSize), gemma_norm(self, self.HeadSize)
