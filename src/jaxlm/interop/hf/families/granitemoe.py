"""Granite MoE: Granite's blocks with a mixture of experts in place of the MLP.

Source: Granite Team 2024, "Granite 3.0 Language Models", section 2.
"""

from jaxlm.core.field_types import NumLayers, PositiveFloat, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import router, same_keys, usual_keys
from jaxlm.interop.hf.weights import stacked_expert_rows
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.moe_decoder import UniformMoeConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "granitemoe")
class GraniteMoeConfig(LlamaAttention, UniformMoeConfig):
    """Granite MoE. The defaults are Granite 3.0 1B-A400M."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 1024
    intermediate_dim: PositiveInt = 512
    num_layers: NumLayers = 24
    num_heads: PositiveInt = 16
    num_kv_heads: PositiveInt | None = 8
    num_experts: PositiveInt = 32
    num_experts_per_token: PositiveInt = 8
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    embedding_multiplier: PositiveFloat = 12.0
    attention_multiplier: PositiveFloat = 0.015625
    residual_multiplier: PositiveFloat = 0.22
    logits_scaling: PositiveFloat = 6.0


FAMILY = Family(
    model_types=("granitemoe",),
    architecture="GraniteMoeForCausalLM",
    config=GraniteMoeConfig,
    keys=(
        *usual_keys(length=2048),
        *router("num_local_experts", num_experts=8, chosen=2),
        *same_keys(attention_bias=False, embedding_multiplier=1.0, attention_multiplier=1.0),
        *same_keys(residual_multiplier=1.0, logits_scaling=1.0),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *llama_rows(config, mlp=None),
        *stacked_expert_rows(
            "block_sparse_moe", ("router.layer.weight", "input_linear.weight", "output_linear.weight")
        ),
    ),
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.router",
)
