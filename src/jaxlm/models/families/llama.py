"""Llama: rotary position embeddings, grouped-query attention, RMSNorm, SwiGLU.

Source: Touvron et al. 2023 (arXiv:2302.13971 and arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.pre_norm import BiasedConfig, UniformConfig
from jaxlm.models.diffusion import TimeEmbeddingConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "llama")
class LlamaConfig(UniformConfig, BiasedConfig):
    """Llama. The defaults are Llama 2 7B with half its context length.

    Attributes:
        hybrid_norm: also apply a norm to the output of attention and of the MLP, before it is added. Hugging Face's Llama
            has no such norm, so that the model cannot be exported.
        input_embedding_norm: apply a norm to the token embeddings before the first layer. Such a model cannot be exported
            either.
        use_layer_norm_weight: norms multiply by a weight. A model without norm weights cannot be exported either.
        use_bidirectional_attention: tokens attend to later ones too, for masked and diffusion language models. Such a model
            does not generate token by token. In config.json it is `is_causal: false`, which transformers reads from version 5
            on.
        time_embedding: adds what the model knows of the time, such as `{type: sinusoidal}`: the fraction of hidden tokens in
            training, and of masks that are left in generation. It starts as zero. Such a model cannot be exported. Null adds
            nothing.
    """

    hybrid_norm: bool = False
    input_embedding_norm: bool = False
    use_layer_norm_weight: bool = True
    use_bidirectional_attention: bool = False
    time_embedding: TimeEmbeddingConfig | None = None
