"""OLMo 1: config.json keys and weight names. Its norms have no weights, and config.json has no key for their epsilon."""

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import usual_keys
from jaxlm.interop.hf.weights import biased_attention, embeddings_and_head, gated_mlp
from jaxlm.models.families.olmo import OlmoConfig

FAMILY = Family(
    model_types=("olmo",),
    architecture="OlmoForCausalLM",
    config=OlmoConfig,
    keys=(
        *usual_keys(length=2048, eps=None),
        JsonKey("attention_bias", "attention_bias", False),
        JsonKey("clip_qkv", "clip_qkv", None),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *embeddings_and_head(config, final_norm=False),
        *biased_attention(config),
        *gated_mlp(),
    ),
)
