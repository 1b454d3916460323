"""Gemma 1: Llama's blocks with GeGLU, scaled embeddings, and norms that multiply by 1 + weight. And keys and names that
later Gemmas share.

Source: Gemma Team 2024 (arXiv:2403.08295), section 2.
"""

import dataclasses

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import activation, head_dim, kv_heads, rope, size_keys, window_pattern
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "gemma")
class Gemma1Config(RotaryDecoderConfig, LlamaBlocks):
    """Gemma 1. The defaults are Gemma 2B."""

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 2048
    intermediate_dim: PositiveInt = 16384
    num_layers: NumLayers = 18
    num_heads: PositiveInt = 8
    num_kv_heads: PositiveInt | None = 1
    head_dim: PositiveInt | None = 256
    activation_function: str = "gelu_new"
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    scales_embeddings = True
    norm_offset = 1.0


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


GEMMA_NORMS = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""The norms of later blocks that are not called as in Llama: name in jaxlm -> name in the files."""


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
    tensors=lambda config: tuple(llama_rows(config, norms_first=True)),
)
