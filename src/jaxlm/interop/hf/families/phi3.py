"""Phi-3 and Phi-4: config.json keys and weight names. Queries, keys and values are one matrix, as are gate and up."""

from collections.abc import Iterator
from typing import Any

from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import activation, head_dim, kv_heads, rope, rope_to_json, size_keys
from jaxlm.interop.hf.weights import (
    BLOCK,
    HEADS,
    Tensor,
    embeddings_and_head,
    fused,
    fused_gated_mlp,
    pre_norms,
    single,
)
from jaxlm.models.families.phi3 import Phi3Config

_LAYER = "model.layers.{layer}."
_ORIGINAL = "original_max_position_embeddings"


def _tensors(config: Phi3Config) -> Iterator[Tensor]:
    yield from embeddings_and_head(config)
    yield from pre_norms()
    qkv = {f"{BLOCK}attn.{name}.weight": f"{out} | embed" for name, out in HEADS.items()}
    yield fused(f"{_LAYER}self_attn.qkv_proj.weight", qkv)
    yield single(f"{_LAYER}self_attn.o_proj.weight", f"{BLOCK}attn.o_proj.weight", "embed | heads head_size")
    yield from fused_gated_mlp()


def _original_to_theirs(config: Any) -> Json:
    written = rope_to_json(config.rope)
    return {key: written[key] for key in (_ORIGINAL,) if written["rope_type"] == "longrope"}


FAMILY = Family(
    model_types=("phi3",),
    architecture="Phi3ForCausalLM",
    config=Phi3Config,
    keys=(
        *size_keys(length=4096, eps_default=1e-5),
        kv_heads(),
        head_dim(),
        # The names are those in older files.
        rope(rotates_part=True, renamed={"su": "longrope", "yarn": "longrope"}, original=4096),
        KeyGroup((_ORIGINAL,), lambda _: {}, _original_to_theirs),  # `rope` reads it
        activation("hidden_act", "silu"),
        JsonKey("sliding_window", "sliding_window", None),
        FixedKey("attention_dropout", 0.0),
        FixedKey("resid_pdrop", 0.0),
        FixedKey("embd_pdrop", 0.0),
        FixedKey("attention_bias", False),
    ),
    tensors=lambda config: tuple(_tensors(config)),
)
