"""Arcee: Llama's blocks whose MLPs have no gate, but a squared ReLU.

Source: Arcee AI 2025, "AFM-4.5B", and its code in transformers; squared ReLU: So et al. 2021 (arXiv:2109.08668).
"""

from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import same_keys, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "arcee")
class ArceeConfig(RotaryDecoderConfig, LlamaBlocks):
    """Arcee. The defaults are AFM 4.5B before its context was extended."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 2560
    intermediate_dim: PositiveInt = 18432
    num_layers: NumLayers = 36
    num_heads: PositiveInt = 20
    num_kv_heads: PositiveInt | None = 4
    activation_function: str = "relu2"
    attention_bias: bool = False
    mlp_bias: bool = False
    mlp_matrices = 2


FAMILY = Family(
    model_types=("arcee",),
    architecture="ArceeForCausalLM",
    config=ArceeConfig,
    keys=(
        *usual_keys(length=4096, eps_default=1e-5, act="relu2"),
        *same_keys(attention_bias=False, mlp_bias=False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config)),
)
