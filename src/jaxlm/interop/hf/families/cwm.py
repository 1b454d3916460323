"""CWM, the Code World Model: Llama's blocks, of which three of four have a sliding window.

Source: FAIR CodeGen Team 2025 (arXiv:2510.02387), section 3.
"""

from dataclasses import field

from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, rope, same_keys, usual_keys, window_pattern
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.rope import Llama3Rotary, RotaryConfig
from jaxlm.reading.choices import choice

_SCALED = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE = {"rope_type": "llama3", **_SCALED}


@choice(ModelConfig, "cwm")
class CwmConfig(PatternConfig, LlamaBlocks):
    """CWM. The defaults are CWM 32B with a shorter context.

    Attributes:
        rope: rotary position embedding of queries and keys.
        sliding_window_pattern: layers are grouped by this number; the first of each group is global, the others are local.
    """

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 6144
    intermediate_dim: PositiveInt = 21504
    num_layers: NumLayers = 64
    num_heads: PositiveInt = 48
    num_kv_heads: PositiveInt | None = 8
    rope: RotaryConfig = field(default_factory=lambda: Llama3Rotary(theta=1e6, **_SCALED))
    sliding_window: PositiveInt | None = 8192
    sliding_window_pattern: PositiveInt | None = 4
    mlp_bias: bool = False
    first_is_global = True

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        return self.rope, self.rope


FAMILY = Family(
    model_types=("cwm",),
    architecture="CwmForCausalLM",
    config=CwmConfig,
    keys=(
        *usual_keys(length=131072, eps_default=1e-5, head=128, rotary=rope(1e6, unset=_ROPE)),
        window_pattern(4, window=8192, first_is_global=True),
        *same_keys(mlp_bias=False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config)),
    respelled=RESPELLED_WINDOWS,
)
