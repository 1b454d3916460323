"""Mistral, alone or in a folder of Mistral 3: Llama's blocks with sliding-window attention.

Source: Jiang et al. 2023 (arXiv:2310.06825), section 2.
"""

from jaxlm.core.field_types import PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import activation, head_dim, kv_heads, rope, same_keys, size_keys
from jaxlm.interop.hf.text_part import pixtral_part
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import UniformConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "mistral")
class MistralConfig(LlamaBlocks, UniformConfig):
    """Mistral. The defaults are Mistral 7B v0.1."""

    seq_len: PositiveInt = 8192
    intermediate_dim: PositiveInt = 14336
    num_kv_heads: PositiveInt | None = 8
    sliding_window: PositiveInt | None = 4096


FAMILY = Family(
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    config=MistralConfig,
    keys=(
        *size_keys(length=131072),
        kv_heads(),
        head_dim(),
        rope(),
        activation("hidden_act", "silu", written={"gelu_new": "gelu_pytorch_tanh"}),
        *same_keys(sliding_window=4096),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config, norms_first=True)),
    text=(
        pixtral_part(
            "mistral",
            None,
            hidden_size=5120,
            intermediate_size=32768,
            num_hidden_layers=40,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=1e9,
            sliding_window=None,
            vocab_size=131072,
        ),
    ),
)
