"""Mistral: config.json keys and weight names."""

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import activation, head_dim, kv_heads, rope, size_keys
from jaxlm.interop.hf.weights import attention, embeddings_and_head, gated_mlp, pre_norms
from jaxlm.models.families.mistral import MistralConfig

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
        JsonKey("sliding_window", "sliding_window", 4096),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (*embeddings_and_head(config), *pre_norms(), *attention(), *gated_mlp()),
)
