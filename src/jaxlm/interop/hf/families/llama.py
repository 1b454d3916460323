"""Llama: rotary position embeddings, grouped-query attention, RMSNorm, SwiGLU.

Source: Touvron et al. 2023 (arXiv:2302.13971 and arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import causality, same_keys, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import TwoWayConfig, UniformConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "llama")
class LlamaConfig(LlamaBlocks, UniformConfig, TwoWayConfig):
    """Llama. The defaults are Llama 2 7B with half its context length.

    Attributes:
        hybrid_norm: also apply a norm to the output of attention and of the MLP, before it is added. Hugging Face's Llama
            has no such norm, so that the model cannot be exported.
        input_embedding_norm: apply a norm to the token embeddings before the first layer. Such a model cannot be exported
            either.
        use_layer_norm_weight: norms multiply by a weight. A model without norm weights cannot be exported either.
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    hybrid_norm: bool = False
    input_embedding_norm: bool = False
    use_layer_norm_weight: bool = True


FAMILY = Family(
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    config=LlamaConfig,
    keys=(
        *usual_keys(length=2048),
        causality(),
        *same_keys(attention_bias=False, mlp_bias=False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config, norms_first=True)),
)
