"""Granite: Llama's blocks with factors for embeddings, attention scores, residual additions and logits.

Source: Granite Team 2024, "Granite 3.0 Language Models", section 2; the factors are those of Maximal Update
Parametrization (Yang et al. 2022, arXiv:2203.03466).
"""

from jaxlm.core.field_types import BelowOne, NumLayers, PositiveFloat, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family
from jaxlm.interop.hf.shared_keys import same_keys, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "granite")
class GraniteConfig(LlamaBlocks, RotaryDecoderConfig):
    """Granite 3. The defaults are Granite 3.0 8B."""

    seq_len: PositiveInt = 4096
    intermediate_dim: PositiveInt = 12800
    num_layers: NumLayers = 40
    num_kv_heads: PositiveInt | None = 8
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: PositiveFloat = 12.0
    attention_multiplier: PositiveFloat = 0.0078125
    residual_multiplier: PositiveFloat = 0.22
    logits_scaling: PositiveFloat = 16.0
    attention_dropout: BelowOne = 0.0


FAMILY = Family(
    model_types=("granite",),
    architecture="GraniteForCausalLM",
    config=GraniteConfig,
    keys=(
        *usual_keys(length=2048),
        *same_keys(attention_bias=False, mlp_bias=False, embedding_multiplier=1.0, attention_multiplier=1.0),
        *same_keys(residual_multiplier=1.0, logits_scaling=1.0, attention_dropout=0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config, norms_first=True)),
)
