"""Hunyuan, dense: Llama's blocks with a norm on each head's queries and keys, after the rotation.

Source: Tencent 2025, "Hunyuan Dense Models", and their code in transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlm.core.field_types import PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey, Json
from jaxlm.interop.hf.shared_keys import rope, same_keys, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.rope import DefaultRotary
from jaxlm.reading.choices import choice


@choice(ModelConfig, "hunyuan_v1_dense")
class HunyuanDenseConfig(RotaryDecoderConfig, LlamaBlocks):
    """Hunyuan. The defaults are the sizes of Hunyuan 7B."""

    intermediate_dim: PositiveInt = 14336
    num_kv_heads: PositiveInt | None = 8
    attention_bias: bool = False
    use_qk_norm = True
    norms_follow_rotation = True


def _to_ours(theirs: Mapping[str, Any]) -> Json:
    """Of the type dynamic with a fixed `alpha`, the file gives the theta before it is multiplied."""
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if not given.get("alpha"):
        return _ROPE.to_ours(theirs)
    size = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    theta = given.get("rope_theta", theirs.get("rope_theta", 10000.0))
    return {"rope": DefaultRotary(theta=theta * given["alpha"] ** (size / (size - 2)))}


_ROPE = rope()

FAMILY = Family(
    model_types=("hunyuan_v1_dense",),
    architecture="HunYuanDenseV1ForCausalLM",
    config=HunyuanDenseConfig,
    keys=(
        *usual_keys(length=2048, eps_default=1e-5, rotary=dataclasses.replace(_ROPE, to_ours=_to_ours)),
        *same_keys(attention_bias=False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(
        llama_rows(config, attn__q_norm="self_attn.query_layernorm", attn__k_norm="self_attn.key_layernorm")
    ),
)
