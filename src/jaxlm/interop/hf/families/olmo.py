"""OLMo 1: Llama's blocks with LayerNorms that have no parameters, and queries, keys and values that may be clipped.

Source: Groeneveld et al. 2024 (arXiv:2402.00838), section 2.1.
"""

from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import same_keys, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.norms import UnweightedLayerNorm
from jaxlm.reading.choices import choice


@choice(ModelConfig, "olmo")
class OlmoConfig(RotaryDecoderConfig, LlamaBlocks):
    """OLMo and OLMo 1.7. The defaults are OLMo 7B."""

    seq_len: PositiveInt = 2048
    layer_norm_epsilon: NonNegativeFloat = 1e-5
    attention_bias: bool = False
    clip_qkv: PositiveFloat | None = None

    def norm(self) -> UnweightedLayerNorm:
        return UnweightedLayerNorm(self.Embed, self.layer_norm_epsilon)


FAMILY = Family(
    model_types=("olmo",),
    architecture="OlmoForCausalLM",
    config=OlmoConfig,
    keys=(
        *usual_keys(length=2048, eps=None),
        *same_keys(attention_bias=False, clip_qkv=None),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config)),
)
