"""Qwen3 MoE: Qwen3's attention with a mixture of experts in place of the MLP.

Source: Yang et al. 2025 (arXiv:2505.09388), section 2.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import (
    expert_layers,
    local_layers,
    router,
    unused_window_notes,
    usual_keys,
)
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import (
    Tensor,
    attention,
    embeddings_and_head,
    expert_rows,
    gated_mlp,
    pre_norms,
    qk_norms,
    rows_by_stack,
    stacked_expert_rows,
)
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.moe_decoder import MixedMoeConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen3_moe")
class Qwen3MoeConfig(LlamaAttention, MixedMoeConfig):
    """Qwen3 MoE. The defaults are Qwen3 30B-A3B."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 2048
    intermediate_dim: PositiveInt = 768
    num_layers: NumLayers = 48
    num_heads: PositiveInt = 32
    num_kv_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 128
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    num_experts: PositiveInt = 128
    num_experts_per_token: PositiveInt = 8
    attention_bias: bool = False
    norm_topk_prob: bool = True
    use_qk_norm = True


def _window_to_ours(theirs: Mapping[str, Any]) -> Json:
    local_layers(theirs)  # raises for what is no list of layers; the window of all layers is the same
    return {"sliding_window": theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window", False) else None}


_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def _attention(config: Qwen3MoeConfig) -> Iterator[Tensor]:
    yield from pre_norms()
    yield from attention(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    yield from qk_norms()


def _tensors(config: Qwen3MoeConfig, with_experts: Iterable[Tensor]) -> tuple[Tensor, ...]:
    sparse, dense = (*_attention(config), *with_experts), (*_attention(config), *gated_mlp())
    return tuple(rows_by_stack(config, embeddings_and_head(config), experts=sparse, dense=dense))


FAMILY = Family(
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    config=Qwen3MoeConfig,
    aliases={"num_local_experts": "num_experts"},
    keys=(
        *usual_keys(length=32768, width=None),
        expert_layers(width=768, dense_width=6144),
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
    tensors=lambda config: _tensors(config, expert_rows()),
    # Published folders of Qwen3-VL have the inputs first, those that transformers 5 saves the outputs.
    layouts=(
        lambda config: _tensors(config, stacked_expert_rows(inputs_first=True)),
        lambda config: _tensors(config, stacked_expert_rows()),
    ),
    text=(
        TextPart(
            ("qwen3_vl_moe",),
            ("qwen3_vl_moe_text", None),
            kept=(r"(model\.)?visual\.",),
            defaults={
                "max_position_embeddings": 128000,
                "num_key_value_heads": 16,
                "moe_intermediate_size": 1408,
                "intermediate_size": 5632,
                "num_experts_per_tok": 4,
                "norm_topk_prob": True,
                "rope_theta": 5e5,
            },
            fixed=("norm_topk_prob",),
        ),
    ),
)
