"""Gemma 1: config.json keys and weight names; and those shared by Gemma 2 and Gemma 3."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import activation, head_dim, kv_heads, rope, size_keys, window_pattern
from jaxlm.interop.hf.weights import Tensor, biased_attention, embeddings_and_head, gated_mlp, pre_norms, sandwich_norms
from jaxlm.models.families.gemma import Gemma1Config

ONLY_CAUSAL = FixedKey("use_bidirectional_attention", None, others=(False,))
"""For Gemma 1 and 2, transformers' attention backends disagree about what the key means."""


def gemma_keys(
    *, length: int, pattern: int, final_cap: float | None, pattern_key: str | None = None
) -> tuple[JsonKey | FixedKey | KeyGroup, ...]:
    """All keys except those of the rotary embedding, the soft cap of the attention scores and bidirectional attention.

    Args:
        length, pattern, final_cap: defaults for keys that are missing.
        pattern_key: as `key` in `window_pattern`.
    """
    return (
        *size_keys(length=length, tied=True),
        kv_heads(),
        head_dim(256),
        activation("hidden_activation", "gelu_pytorch_tanh", written={"gelu_new": "gelu_pytorch_tanh"}),
        window_pattern(pattern, window=4096, key=pattern_key),
        JsonKey("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
        JsonKey("final_logit_softcapping", "final_soft_cap", final_cap),
        JsonKey("attention_bias", "attention_bias", False),
        FixedKey("attention_dropout", 0.0),
        FixedKey("cache_implementation", "hybrid", others=(None,)),
    )


def gemma_tensors(config: Any) -> Iterator[Tensor]:
    """All weights except query and key norms."""
    yield from embeddings_and_head(config)
    yield from sandwich_norms()
    yield from biased_attention(config)
    yield from gated_mlp()


def _activation() -> JsonKey:
    """The first files say `gelu` for the approximation with tanh, as transformers reads it."""
    exact = activation("hidden_act", "gelu_pytorch_tanh", written={"gelu_new": "gelu_pytorch_tanh"})
    return dataclasses.replace(exact, to_ours=lambda name: "gelu_new" if name == "gelu" else exact.to_ours(name))


FAMILY = Family(
    model_types=("gemma",),
    architecture="GemmaForCausalLM",
    config=Gemma1Config,
    keys=(
        *size_keys(length=8192, tied=True),
        kv_heads(),
        head_dim(256),
        rope(),
        _activation(),
        ONLY_CAUSAL,
        JsonKey("attention_bias", "attention_bias", False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *embeddings_and_head(config),
        *pre_norms(),
        *biased_attention(config),
        *gated_mlp(),
    ),
)
