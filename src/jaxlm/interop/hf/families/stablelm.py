"""StableLM: Llama's blocks with LayerNorms and rotations of a quarter of each head. MLP and attention may be parallel.

Source: Bellagamba et al. 2024 (arXiv:2402.17834), section 3; Stability AI 2024, "Stable LM 2 12B".
"""

from dataclasses import field

from jaxlm.core.field_types import PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import rope, same_keys, usual_keys
from jaxlm.interop.hf.weights import qk_norms
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "stablelm")
class StableLmConfig(RotaryDecoderConfig, LlamaBlocks):
    """StableLM. The defaults are StableLM 3B 4E1T.

    Attributes:
        attention_bias: add biases to the query, key and value projections.
    """

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 2560
    intermediate_dim: PositiveInt = 6912
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(partial_rotary_factor=0.25))
    attention_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    attention_out_bias = False
    norms = "layer"


_HEADWISE = "q_layernorm.norms.{head}", "k_layernorm.norms.{kv_head}"
FAMILY = Family(
    model_types=("stablelm",),
    architecture="StableLmForCausalLM",
    config=StableLmConfig,
    keys=(
        *usual_keys(length=4096, eps="layer_norm_eps", eps_default=1e-5, rotary=rope(partial=0.25, rotates_part=True)),
        JsonKey("use_qkv_bias", "attention_bias", False),
        *same_keys(qk_layernorm=False, use_parallel_residual=False),
        FixedKey("attention_dropout", 0.0),
        FixedKey("hidden_dropout", 0.0),
    ),
    tensors=lambda config: (
        *llama_rows(config, attn__q_norm=None, attn__k_norm=None),
        *(qk_norms(theirs=_HEADWISE) if config.qk_layernorm else ()),
    ),
)
