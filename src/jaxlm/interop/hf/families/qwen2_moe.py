"""Qwen2 mixture-of-experts models: config.json keys and weight names."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import activation, head_dim, kv_heads, rope, router, size_keys
from jaxlm.interop.hf.shared_weights import BLOCK, attention, embeddings_and_head, experts, gated_mlp, pre_norms
from jaxlm.interop.hf.weights import Tensor, single
from jaxlm.models.families.qwen2_moe import Qwen2MoeConfig


def _shared_expert() -> Iterator[Tensor]:
    yield from gated_mlp(theirs="mlp.shared_expert", ours="shared_expert.mlp", features="shared_mlp")
    yield single("model.layers.{layer}.mlp.shared_expert_gate.weight", f"{BLOCK}shared_expert.gate", "| embed")


def _windows_to_ours(theirs: Mapping[str, Any]) -> Json:
    kinds = theirs.get("layer_types") or []
    if theirs.get("use_sliding_window", False) or any(kind != "full_attention" for kind in kinds):
        raise ConfigError("use_sliding_window: only full attention is supported for this family; false expected")
    return {"sliding_window": None}


def _widths_to_ours(theirs: Mapping[str, Any]) -> Json:
    return {
        "intermediate_dim": theirs.get("moe_intermediate_size", 1408),
        "shared_expert_intermediate_dim": theirs.get("shared_expert_intermediate_size", 5632),
    }


def _widths_to_theirs(config: Qwen2MoeConfig) -> Json:
    # intermediate_size applies to layers without experts; there are none.
    return {
        "intermediate_size": config.intermediate_dim,
        "moe_intermediate_size": config.intermediate_dim,
        "shared_expert_intermediate_size": config.shared_expert_intermediate_dim,
    }


_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

FAMILY = Family(
    model_types=("qwen2_moe",),
    architecture="Qwen2MoeForCausalLM",
    config=Qwen2MoeConfig,
    keys=(
        *(key for key in size_keys(length=32768) if key.theirs != "intermediate_size"),
        KeyGroup(_WIDTHS, _widths_to_ours, _widths_to_theirs),
        kv_heads(),
        head_dim(),
        rope(),
        activation("hidden_act", "silu"),
        KeyGroup(_WINDOWS, _windows_to_ours, lambda _: {"use_sliding_window": False, "sliding_window": None}),
        *router("num_experts", num_experts=60, chosen=4),
        JsonKey("norm_topk_prob", "norm_topk_prob", False),
        JsonKey("qkv_bias", "qkv_bias", True),
        FixedKey("decoder_sparse_step", 1),
        FixedKey("mlp_only_layers", [], others=(None,)),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *embeddings_and_head(config),
        *pre_norms(),
        *attention(qkv_bias=config.qkv_bias),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *_shared_expert(),
    ),
)
