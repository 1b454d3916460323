"""Mistral in config.json and in its files."""

from jaxlm.interop.hf.family import Family, Fixed, Key
from jaxlm.interop.hf.shared_keys import activation, head_dim, kv_heads, rope, sizes
from jaxlm.interop.hf.shared_weights import attention, ends, gated_mlp, pre_norms
from jaxlm.models.families.mistral import MistralConfig

FAMILY = Family(
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    config=MistralConfig,
    keys=(
        *sizes(length=131072),
        kv_heads(),
        head_dim(),
        rope(),
        activation("hidden_act", "silu", written={"gelu_new": "gelu_pytorch_tanh"}),
        Key("sliding_window", "sliding_window", 4096),
        Fixed("attention_dropout", 0.0),
    ),
    tensors=lambda config: (*ends(config), *pre_norms(), *attention(), *gated_mlp()),
)
