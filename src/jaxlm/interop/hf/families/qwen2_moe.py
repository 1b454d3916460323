"""Qwen2 mixture-of-experts models: config.json keys and weight names."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import (
    check_has_window,
    expert_layers,
    layer_types,
    local_layers,
    router,
    usual_keys,
)
from jaxlm.interop.hf.weights import (
    Tensor,
    attention,
    embeddings_and_head,
    expert_rows,
    gated_mlp,
    pre_norms,
    rows_by_stack,
    shared_expert_rows,
)
from jaxlm.models.families.qwen2_moe import Qwen2MoeConfig


def _windows_to_ours(theirs: Mapping[str, Any]) -> Json:
    num_layers, on = theirs["num_hidden_layers"], theirs.get("use_sliding_window", False)
    window, local = theirs.get("sliding_window", 4096) if on else None, local_layers(theirs)
    if local is None:  # as transformers chooses them
        local = list(range(0, min(num_layers, theirs.get("max_window_layers", 28)), 2)) if on else []
    check_has_window(local, window)
    return {
        "sliding_window": window if local else None,
        "local_layers": None if len(local) in (0, num_layers) else local,
    }


def _windows_to_theirs(config: Qwen2MoeConfig) -> Json:
    if config.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {"use_sliding_window": True, "sliding_window": config.sliding_window, "layer_types": layer_types(config)}


def _attention(config: Any) -> Iterator[Tensor]:
    yield from pre_norms()
    yield from attention(qkv_bias=config.qkv_bias)


_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

FAMILY = Family(
    model_types=("qwen2_moe",),
    architecture="Qwen2MoeForCausalLM",
    config=Qwen2MoeConfig,
    keys=(
        *usual_keys(length=32768, width=None),
        expert_layers(width=1408, dense_width=5632),
        JsonKey("shared_expert_intermediate_size", "shared_expert_intermediate_dim", 5632),
        KeyGroup(_WINDOWS, _windows_to_ours, _windows_to_theirs),
        *router("num_experts", num_experts=60, chosen=4),
        JsonKey("norm_topk_prob", "norm_topk_prob", False),
        JsonKey("qkv_bias", "qkv_bias", True),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(
        rows_by_stack(
            config,
            embeddings_and_head(config),
            experts=(*_attention(config), *expert_rows(), *shared_expert_rows()),
            dense=(*_attention(config), *gated_mlp()),
        )
    ),
    respelled=("local_layers",),
)
