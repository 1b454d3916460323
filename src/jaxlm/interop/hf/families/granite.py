"""Granite: config.json keys and weight names."""

from jaxlm.interop.hf.family import Family, JsonKey
from jaxlm.interop.hf.shared_keys import usual_keys
from jaxlm.interop.hf.weights import usual_tensors
from jaxlm.models.families.granite import GraniteConfig

FAMILY = Family(
    model_types=("granite",),
    architecture="GraniteForCausalLM",
    config=GraniteConfig,
    keys=(
        *usual_keys(length=2048),
        JsonKey("attention_bias", "attention_bias", False),
        JsonKey("mlp_bias", "mlp_bias", False),
        JsonKey("embedding_multiplier", "embedding_multiplier", 1.0),
        JsonKey("attention_multiplier", "attention_multiplier", 1.0),
        JsonKey("residual_multiplier", "residual_multiplier", 1.0),
        JsonKey("logits_scaling", "logits_scaling", 1.0),
        JsonKey("attention_dropout", "attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(usual_tensors(config)),
)
