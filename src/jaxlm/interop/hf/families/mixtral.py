"""Mixtral: Mistral's blocks with a mixture of experts in place of the MLP.

Source: Jiang et al. 2024 (arXiv:2401.04088), section 2.
"""

from dataclasses import field

from jaxlm.core.field_types import PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import rope, router, same_keys, usual_keys
from jaxlm.interop.hf.weights import expert_rows
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.moe_decoder import UniformMoeConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "mixtral")
class MixtralConfig(LlamaAttention, UniformMoeConfig):
    """Mixtral. The defaults are Mixtral 8x7B."""

    seq_len: PositiveInt = 8192
    intermediate_dim: PositiveInt = 14336
    num_kv_heads: PositiveInt | None = 8
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))


FAMILY = Family(
    model_types=("mixtral",),
    architecture="MixtralForCausalLM",
    config=MixtralConfig,
    aliases={"num_experts": "num_local_experts"},
    keys=(
        *usual_keys(length=131072, eps_default=1e-5, rotary=rope(1e6)),
        *same_keys(sliding_window=None),
        *router("num_local_experts", num_experts=8, chosen=2),
        FixedKey("router_jitter_noise", 0.0),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *llama_rows(config, norms_first=True, mlp=None),
        *expert_rows("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
)
