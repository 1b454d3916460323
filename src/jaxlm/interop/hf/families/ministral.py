"""Ministral of 2024: Llama's blocks, of which some have a sliding window.

Source: Mistral AI 2024, "Un Ministral, des Ministraux", and its code in transformers.
"""

from dataclasses import field

from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, usual_keys, window_pattern
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "ministral")
class MinistralConfig(PatternConfig, LlamaBlocks):
    """Ministral. The defaults are Ministral 8B.

    Attributes:
        rope: rotary position embedding of queries and keys.
        sliding_window_pattern: layers are grouped by this number; the first of each group is global, the others are local.
    """

    seq_len: PositiveInt = 32768
    intermediate_dim: PositiveInt = 12288
    num_layers: NumLayers = 36
    num_kv_heads: PositiveInt | None = 8
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e8))
    sliding_window: PositiveInt | None = 32768
    sliding_window_pattern: PositiveInt | None = 4
    first_is_global = True

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        return self.rope, self.rope


FAMILY = Family(
    model_types=("ministral",),
    architecture="MinistralForCausalLM",
    config=MinistralConfig,
    keys=(
        *usual_keys(length=131072),
        window_pattern(None, window=4096, first_is_global=True),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config)),
    respelled=RESPELLED_WINDOWS,
)
