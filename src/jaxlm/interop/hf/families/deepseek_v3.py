"""DeepSeek-V3 and R1, and Kimi K2: multi-head latent attention, and experts in groups.

Source: DeepSeek-AI 2024, DeepSeek-V3 Technical Report (arXiv:2412.19437), section 2.1. Kimi K2 has the same layers, in other
numbers: Kimi Team 2025 (arXiv:2507.20534), section 2.3.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeInt, NumLayers, PositiveFloat, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.grouped_experts import balanced_experts, further_layers
from jaxlm.interop.hf.latent import balanced_expert_rows, latent_keys, latent_moe_tensors
from jaxlm.interop.hf.mtp import COPIES_BEHIND_LAYERS
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.latent import LatentConfig
from jaxlm.models.decoders.moe_decoder import BalancedMoeConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "deepseek_v3")
class DeepseekV3Config(LatentConfig, BalancedMoeConfig):
    """DeepSeek-V3 before its context was extended."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 7168
    intermediate_dim: PositiveInt = 2048
    dense_intermediate_dim: PositiveInt | None = 18432
    shared_expert_intermediate_dim: PositiveInt = 2048
    num_layers: NumLayers = 61
    num_heads: PositiveInt = 128
    mlp_only_layers: list[NonNegativeInt] = field(default_factory=lambda: [0, 1, 2])
    q_lora_rank: PositiveInt | None = 1536
    qk_nope_head_dim: PositiveInt = 128
    v_head_dim: PositiveInt = 128
    num_experts: PositiveInt = 256
    num_experts_per_token: PositiveInt = 8
    num_expert_groups: PositiveInt = 8
    num_groups_per_token: PositiveInt = 4
    routed_scaling_factor: PositiveFloat = 2.5


FAMILY = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    architecture="DeepseekV3ForCausalLM",
    config=DeepseekV3Config,
    aliases={"num_local_experts": "n_routed_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    keys=(
        *latent_keys(length=4096, sizes=(1536, 512, 128, 64, 128)),
        *balanced_experts(
            **{"width": 2048, "dense_width": 18432, "num_experts": 256, "chosen": 8, "num_dense": 3},
            **{"groups": 8, "groups_chosen": 4, "scale": 2.5},
        ),
        further_layers(),
        FixedKey("moe_layer_freq", 1),
    ),
    tensors=lambda config: latent_moe_tensors(config, balanced_expert_rows()),
    further="eh_proj.weight",
    copies=COPIES_BEHIND_LAYERS,
)
