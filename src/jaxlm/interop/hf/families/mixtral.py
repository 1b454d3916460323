"""Mixtral: config.json keys and weight names."""

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import rope, router, usual_keys
from jaxlm.interop.hf.weights import attention, embeddings_and_head, expert_rows, pre_norms
from jaxlm.models.families.mixtral import MixtralConfig

FAMILY = Family(
    model_types=("mixtral",),
    architecture="MixtralForCausalLM",
    config=MixtralConfig,
    aliases={"num_experts": "num_local_experts"},
    keys=(
        *usual_keys(length=131072, eps_default=1e-5, rotary=rope(1e6)),
        JsonKey("sliding_window", "sliding_window", None),
        *router("num_local_experts", num_experts=8, chosen=2),
        FixedKey("router_jitter_noise", 0.0),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *embeddings_and_head(config),
        *pre_norms(),
        *attention(),
        *expert_rows("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
)
