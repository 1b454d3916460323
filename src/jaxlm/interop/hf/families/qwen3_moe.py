"""Qwen3 mixture-of-experts models: config.json keys and weight names."""

from collections.abc import Mapping
from typing import Any

from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import activation, head_dim, kv_heads, rope, router, size_keys
from jaxlm.interop.hf.shared_weights import biased_attention, embeddings_and_head, experts, pre_norms, qk_norms
from jaxlm.models.families.qwen3_moe import Qwen3MoeConfig


def _window_to_ours(theirs: Mapping[str, Any]) -> Json:
    return {"sliding_window": theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window", False) else None}


def _window_to_theirs(config: Qwen3MoeConfig) -> Json:
    return {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}


def _width_to_ours(theirs: Mapping[str, Any]) -> Json:
    return {"intermediate_dim": theirs.get("moe_intermediate_size", 768)}


def _width_to_theirs(config: Qwen3MoeConfig) -> Json:
    # intermediate_size applies to layers without experts; there are none.
    return {"intermediate_size": config.intermediate_dim, "moe_intermediate_size": config.intermediate_dim}


FAMILY = Family(
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    config=Qwen3MoeConfig,
    keys=(
        *(key for key in size_keys(length=32768) if key.theirs != "intermediate_size"),
        KeyGroup(("intermediate_size", "moe_intermediate_size"), _width_to_ours, _width_to_theirs),
        kv_heads(),
        head_dim(),
        rope(),
        activation("hidden_act", "silu"),
        KeyGroup(("use_sliding_window", "sliding_window", "max_window_layers"), _window_to_ours, _window_to_theirs),
        *router("num_experts", "num_local_experts", num_experts=128, chosen=8),
        JsonKey("norm_topk_prob", "norm_topk_prob", False),
        JsonKey("attention_bias", "attention_bias", False),
        FixedKey("decoder_sparse_step", 1),
        FixedKey("mlp_only_layers", [], others=(None,)),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *embeddings_and_head(config),
        *pre_norms(),
        *biased_attention(config),
        *qk_norms(),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
)
