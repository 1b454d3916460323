"""EXAONE 4: norms after attention and MLP and on each head. Layers without a sliding window have no rotary embedding.

Source: LG AI Research 2025 (arXiv:2507.11407), section 2.1.
"""

from dataclasses import field

from jaxlm.core.field_types import PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, usual_keys, window_pattern
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "exaone4")
class Exaone4Config(PatternConfig, LlamaBlocks):
    """EXAONE 4.

    Attributes:
        rope: rotary position embedding of local layers, or of all layers if there is no sliding window.
    """

    intermediate_dim: PositiveInt = 16384
    rope: RotaryConfig = field(default_factory=DefaultRotary)
    sliding_window_pattern: PositiveInt | None = 4
    use_qk_norm = True
    norms_only_follow = True

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig | None]:
        return self.rope, self.rope if self.sliding_window is None else None


FAMILY = Family(
    model_types=("exaone4",),
    architecture="Exaone4ForCausalLM",
    config=Exaone4Config,
    keys=(
        *usual_keys(length=2048, eps_default=1e-5),
        window_pattern(4, window=4096, key="sliding_window_pattern"),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(
        llama_rows(config, attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
    ),
    respelled=RESPELLED_WINDOWS,
)
