"""Qwen3 mixture-of-experts models: config.json keys and weight names."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import (
    activation,
    expert_layers,
    head_dim,
    kv_heads,
    local_layers,
    rope,
    router,
    size_keys,
    unused_window_notes,
)
from jaxlm.interop.hf.weights import (
    Tensor,
    biased_attention,
    embeddings_and_head,
    experts,
    gated_mlp,
    pre_norms,
    qk_norms,
    rows_by_stack,
)
from jaxlm.models.families.qwen3_moe import Qwen3MoeConfig


def _window_to_ours(theirs: Mapping[str, Any]) -> Json:
    local_layers(theirs)  # raises for what is no list of layers; the window of all layers is the same
    return {"sliding_window": theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window", False) else None}


_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def _attention(config: Qwen3MoeConfig) -> Iterator[Tensor]:
    yield from pre_norms()
    yield from biased_attention(config)
    yield from qk_norms()


FAMILY = Family(
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    config=Qwen3MoeConfig,
    aliases={"num_local_experts": "num_experts"},
    keys=(
        *(key for key in size_keys(length=32768) if key.theirs != "intermediate_size"),
        expert_layers(width=768, dense_width=6144),
        kv_heads(),
        head_dim(),
        rope(),
        activation("hidden_act", "silu"),
        KeyGroup(
            _WINDOWS,
            _window_to_ours,
            lambda config: {
                "use_sliding_window": config.sliding_window is not None,
                "sliding_window": config.sliding_window,
            },
            unused_window_notes,
        ),
        *router("num_experts", num_experts=128, chosen=8),
        JsonKey("norm_topk_prob", "norm_topk_prob", False),
        JsonKey("attention_bias", "attention_bias", False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(
        rows_by_stack(
            config,
            embeddings_and_head(config),
            experts=(*_attention(config), *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")),
            dense=(*_attention(config), *gated_mlp()),
        )
    ),
)
