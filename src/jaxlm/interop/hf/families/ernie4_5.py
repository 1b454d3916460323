"""ERNIE 4.5, dense: Llama's blocks with rotations of neighboring features.

Source: Baidu 2025, "ERNIE 4.5 Technical Report", and its code in transformers.
"""

from dataclasses import field

from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family
from jaxlm.interop.hf.shared_keys import rope, use_bias, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "ernie4_5")
class Ernie45Config(RotaryDecoderConfig, LlamaBlocks):
    """ERNIE 4.5. The defaults are ERNIE 4.5 0.3B with a shorter context. In config.json, one key adds all biases."""

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 1024
    intermediate_dim: PositiveInt = 3072
    num_layers: NumLayers = 18
    num_heads: PositiveInt = 16
    num_kv_heads: PositiveInt | None = 2
    head_dim: PositiveInt | None = 128
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=500000.0))
    attention_bias: bool = False
    mlp_bias: bool = False
    interleaved = True


FAMILY = Family(
    model_types=("ernie4_5",),
    architecture="Ernie4_5ForCausalLM",
    config=Ernie45Config,
    keys=(
        *usual_keys(length=131072, eps_default=1e-5, tied=True, head=128, rotary=rope(500000.0)),
        use_bias(False),
    ),
    tensors=lambda config: tuple(llama_rows(config)),
)
