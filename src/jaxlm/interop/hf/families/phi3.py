"""Phi-3 and Phi-4: Llama's blocks with optional partial rotary embeddings and LongRoPE.

Source: Abdin et al. 2024 (arXiv:2404.14219), section 2. Files have queries, keys and values as one matrix, and gate and up.
"""

from collections.abc import Iterator
from typing import Any

from jaxlm.core.field_types import PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey, Json, KeyGroup
from jaxlm.interop.hf.shared_keys import activation, head_dim, kv_heads, rope, rope_to_json, same_keys, size_keys
from jaxlm.interop.hf.weights import BLOCK, HEADS, Tensor, fused, fused_gated_mlp, single
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import UniformConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "phi3")
class Phi3Config(LlamaBlocks, UniformConfig):
    """Phi-3 and Phi-4. The defaults are Phi-3 mini 4k. Set `rope: {type: longrope}` for the long-context models."""

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 3072
    intermediate_dim: PositiveInt = 8192
    sliding_window: PositiveInt | None = 2047


_ATTN = "model.layers.{layer}.self_attn."
_ORIGINAL = "original_max_position_embeddings"


def _tensors(config: Phi3Config) -> Iterator[Tensor]:
    yield from llama_rows(config, norms_first=True, attn=None, mlp=None)
    qkv = {f"{BLOCK}attn.{name}.weight": f"{out} | embed" for name, out in HEADS.items()}
    yield fused(f"{_ATTN}qkv_proj.weight", qkv)
    yield single(f"{_ATTN}o_proj.weight", f"{BLOCK}attn.o_proj.weight", "embed | heads head_size")
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
        *same_keys(sliding_window=None),
        FixedKey("attention_dropout", 0.0),
        FixedKey("resid_pdrop", 0.0),
        FixedKey("embd_pdrop", 0.0),
        FixedKey("attention_bias", False),
    ),
    tensors=lambda config: tuple(_tensors(config)),
)
