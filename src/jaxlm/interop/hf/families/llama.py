"""Llama: config.json keys and weight names."""

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import causality, usual_keys
from jaxlm.interop.hf.weights import usual_tensors
from jaxlm.models.families.llama import LlamaConfig

FAMILY = Family(
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    config=LlamaConfig,
    keys=(
        *usual_keys(length=2048),
        causality(),
        JsonKey("attention_bias", "attention_bias", False),
        JsonKey("mlp_bias", "mlp_bias", False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(usual_tensors(config)),
)
