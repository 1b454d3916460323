"""StarCoder 2: Llama's blocks with LayerNorms, MLPs without a gate, biases everywhere, a sliding window and dropout.

Source: Lozhkov et al. 2024 (arXiv:2402.19173), section 5.
"""

from dataclasses import field

from jaxlm.core.field_types import BelowOne, NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import same_keys, use_bias, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import UniformConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "starcoder2")
class Starcoder2Config(LlamaBlocks, UniformConfig):
    """StarCoder 2. The defaults are StarCoder2 3B without dropout. In config.json, one key adds all biases."""

    seq_len: PositiveInt = 16384
    hidden_dim: PositiveInt = 3072
    intermediate_dim: PositiveInt = 12288
    num_layers: NumLayers = 30
    num_heads: PositiveInt = 24
    num_kv_heads: PositiveInt | None = 2
    activation_function: str = "gelu_new"
    initializer_range: NonNegativeFloat = 0.018042
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    sliding_window: PositiveInt | None = 4096
    attention_bias: bool = True
    mlp_bias: bool = True
    attention_dropout: BelowOne = 0.0
    residual_dropout: BelowOne = 0.0
    embedding_dropout: BelowOne = 0.0
    mlp_matrices = 2
    norms = "layer"


FAMILY = Family(
    model_types=("starcoder2",),
    architecture="Starcoder2ForCausalLM",
    config=Starcoder2Config,
    keys=(
        *usual_keys(length=4096, eps="norm_epsilon", eps_default=1e-5, tied=True, act="gelu_pytorch_tanh"),
        use_bias(True),
        FixedKey("norm_type", "layer_norm"),
        *same_keys(sliding_window=None, attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config, mlp__up_proj="mlp.c_fc", mlp__down_proj="mlp.c_proj")),
)
