"""Qwen2 MoE: Qwen2's attention with a mixture of experts in place of the MLP, and an expert that all tokens share.

Source: Yang et al. 2024 (arXiv:2407.10671), section 2.2.2.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar

import jax

from jaxlm.core.field_types import NonNegativeFloat, NonNegativeInt, NumLayers, PositiveInt
from jaxlm.core.rules import Rules, needs
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
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import projections
from jaxlm.models.decoders.moe_decoder import MixedMoeConfig
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen2_moe")
class Qwen2MoeConfig(MixedMoeConfig):
    """Qwen1.5 MoE and Qwen2 MoE. The defaults are Qwen1.5 MoE A2.7B.

    Attributes:
        local_layers: numbers of the layers that `sliding_window` applies to, counted from 0. Null means all layers.
        qkv_bias: add biases to the query, key and value projections.
    """

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 2048
    intermediate_dim: PositiveInt = 1408
    num_layers: NumLayers = 24
    num_heads: PositiveInt = 16
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    num_experts: PositiveInt = 60
    num_experts_per_token: PositiveInt = 4
    local_layers: list[NonNegativeInt] | None = None
    key_rules: ClassVar[Rules] = (needs("sliding_window", when="local_layers"),)
    shared_expert_intermediate_dim: PositiveInt = 5632
    norm_topk_prob: bool = False
    qkv_bias: bool = True

    def attention(self, keys: jax.Array) -> SelfAttention:
        return SelfAttention(**projections(self, keys, qkv_bias=self.qkv_bias, out_bias=False))


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
