"""MiniMax-M2: experts with a router by sigmoid scores and a correction bias, and query and key norms over all heads jointly.

Source: the code of the model in transformers.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey, Json, KeyGroup
from jaxlm.interop.hf.grouped_experts import correction_bias
from jaxlm.interop.hf.shared_keys import rope, router, usual_keys
from jaxlm.interop.hf.weights import correction_bias as bias_tensor
from jaxlm.interop.hf.weights import expert_rows
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.moe_decoder import UniformMoeConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "minimax_m2")
class MiniMaxM2Config(LlamaAttention, UniformMoeConfig):
    """MiniMax-M2. The defaults are those of the published model."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 3072
    intermediate_dim: PositiveInt = 1536
    num_layers: NumLayers = 62
    num_heads: PositiveInt = 48
    num_kv_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 128
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=5e6, partial_rotary_factor=0.5))
    num_experts: PositiveInt = 256
    num_experts_per_token: PositiveInt = 8
    router_bias_step: NonNegativeFloat = 0.001
    scores = "sigmoid"
    use_qk_norm = True
    norms_all_heads = True


_ROPE = rope(5e6, rotates_part=True)


def _with_factor(theirs: Mapping[str, Any]) -> Json:
    """`rotary_dim` counts rotated features."""
    size = theirs.get("rotary_dim")
    return {**theirs} if size is None else {**theirs, "partial_rotary_factor": size / theirs.get("head_dim", 128)}


def _rope_to_theirs(config: MiniMaxM2Config) -> Json:
    written = _ROPE.to_theirs(config)
    factor = written.pop("partial_rotary_factor", 1.0)
    return {**written, "rotary_dim": round(factor * config.HeadSize.size)}


FAMILY = Family(
    model_types=("minimax_m2",),
    architecture="MiniMaxM2ForCausalLM",
    config=MiniMaxM2Config,
    aliases={"num_experts": "num_local_experts"},
    keys=(
        *usual_keys(
            length=196608,
            head=128,
            rotary=KeyGroup(
                (*_ROPE.theirs, "rotary_dim"),
                lambda theirs: _ROPE.to_ours(_with_factor(theirs)),
                _rope_to_theirs,
                lambda theirs: _ROPE.notes(_with_factor(theirs)),
            ),
        ),
        *router("num_local_experts", num_experts=256, chosen=8),
        correction_bias(),
        FixedKey("sliding_window", None),
        FixedKey("router_jitter_noise", 0.0),
        FixedKey("attention_dropout", 0.0),
        FixedKey("scoring_func", "sigmoid"),
        FixedKey("use_routing_bias", True),
        FixedKey("use_qk_norm", True),
        FixedKey("qk_norm_type", "per_layer"),
        FixedKey("shared_intermediate_size", 0),
    ),
    tensors=lambda config: (
        *llama_rows(config, norms_first=True, mlp=None),
        *expert_rows("block_sparse_moe", gate="w1", up="w3", down="w2"),
        bias_tensor("block_sparse_moe"),
    ),
)
