"""Cohere: attention and MLP in parallel, LayerNorms without biases, rotations of neighboring features, scaled logits.

Source: the code of Command R in transformers.
"""

from dataclasses import field

from jaxlm.core.field_types import NumLayers, PositiveFloat, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import rope, same_keys, usual_keys
from jaxlm.interop.hf.weights import qk_norms
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "cohere")
class CohereConfig(RotaryDecoderConfig, LlamaBlocks):
    """Cohere. The defaults are Command R."""

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 8192
    intermediate_dim: PositiveInt = 22528
    num_layers: NumLayers = 40
    num_heads: PositiveInt = 64
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=8e6))
    attention_bias: bool = False
    qk_layernorm: bool = False
    logit_scale: PositiveFloat = 0.0625
    interleaved = True
    norms = "layer without bias"
    use_parallel_residual = True


FAMILY = Family(
    model_types=("cohere",),
    architecture="CohereForCausalLM",
    config=CohereConfig,
    keys=(
        *usual_keys(length=8192, eps="layer_norm_eps", eps_default=1e-5, tied=True, rotary=rope(500000.0)),
        *same_keys(attention_bias=False, logit_scale=0.0625),
        JsonKey("use_qk_norm", "qk_layernorm", False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *llama_rows(config, attn__q_norm=None, attn__k_norm=None),
        *(qk_norms("heads | head_size", "kv_heads | head_size") if config.qk_layernorm else ()),
    ),
)
