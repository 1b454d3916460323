"""GLM-4.7-Flash: multi-head latent attention, and experts as in GLM-4.5.

Source: GLM-4.5 Team 2025 (arXiv:2508.06471), section 2.1; attention: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from dataclasses import field

from jaxlm.core.field_types import NumLayers, PositiveFloat, PositiveInt
from jaxlm.interop.hf.family import Family, KeyGroup
from jaxlm.interop.hf.grouped_experts import balanced_experts
from jaxlm.interop.hf.latent import balanced_expert_rows, latent_keys, latent_moe_tensors
from jaxlm.interop.hf.mtp import COPIES_BEHIND_LAYERS
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.latent import LatentConfig
from jaxlm.models.decoders.moe_decoder import BalancedMoeConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice

_MTP = "num_nextn_predict_layers"


@choice(ModelConfig, "glm4_moe_lite")
class Glm4MoeLiteConfig(LatentConfig, BalancedMoeConfig):
    """GLM-4.7-Flash, with a shorter context length."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 2048
    intermediate_dim: PositiveInt = 1536
    dense_intermediate_dim: PositiveInt | None = 10240
    shared_expert_intermediate_dim: PositiveInt = 1536
    num_layers: NumLayers = 47
    num_heads: PositiveInt = 20
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    num_experts: PositiveInt = 64
    num_experts_per_token: PositiveInt = 4
    routed_scaling_factor: PositiveFloat = 1.8


FAMILY = Family(
    model_types=("glm4_moe_lite",),
    architecture="Glm4MoeLiteForCausalLM",
    config=Glm4MoeLiteConfig,
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    keys=(
        *latent_keys(length=202752, sizes=(768, 512, 192, 64, 256), eps=1e-5),
        *balanced_experts(
            width=1536, dense_width=10240, num_experts=64, chosen=4, num_dense=1, scale=1.8, lists_layers=True
        ),
        KeyGroup((_MTP,), lambda theirs: {}, lambda config: {_MTP: 1} if config.mtp else {}),
    ),
    tensors=lambda config: latent_moe_tensors(config, balanced_expert_rows()),
    further="eh_proj.weight",
    copies=COPIES_BEHIND_LAYERS,
)
