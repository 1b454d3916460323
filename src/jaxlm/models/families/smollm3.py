"""SmolLM3: Llama's blocks, with a rotary position embedding in three of four layers.

Source: Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"; layers without one: Yang et al. 2025
(arXiv:2501.18795).
"""

from dataclasses import dataclass, field

from jaxlm.core.field_types import NonNegativeFloat, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.pre_norm import BiasedConfig, check_pre_norm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.models.stacks import LayerKind, grouped_kinds


@ModelConfig.register_subclass("smollm3")
@dataclass(frozen=True)
class SmolLm3Config(BiasedConfig):
    """SmolLM3. The defaults are SmolLM3 3B with half its context length.

    Attributes:
        no_rope_layer_interval: layers are grouped by this number; the last of each group has no rotary position
            embedding. `rope` applies to the others.
        sliding_window: number of tokens that each token attends to, including itself, in the layers without rotary
            position embedding. Null means all previous tokens.
    """

    seq_len: PositiveInt = 32768
    hidden_dim: PositiveInt = 2048
    num_layers: PositiveInt = 36
    num_heads: PositiveInt = 16
    num_kv_heads: PositiveInt | None = 4
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=5e6))
    no_rope_layer_interval: PositiveInt = 4
    sliding_window: PositiveInt | None = None

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        unrotated = LayerKind(None, self.sliding_window)
        return grouped_kinds(LayerKind(self.rope), unrotated, self.no_rope_layer_interval, self.num_layers)

    def check(self) -> None:
        check_pre_norm(self)
