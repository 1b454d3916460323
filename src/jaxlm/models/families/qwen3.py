"""Qwen3: Llama's blocks with a norm on each head's queries and keys.

Source: Yang et al. 2025 (arXiv:2505.09388), section 2.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.pre_norm import LateWindowConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen3")
class Qwen3Config(LlamaAttention, LateWindowConfig):
    """Qwen3. The defaults are Qwen3 0.6B."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 1024
    intermediate_dim: PositiveInt = 3072
    num_layers: NumLayers = 28
    num_heads: PositiveInt = 16
    num_kv_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 128
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    attention_bias: bool = False
    use_qk_norm = True
