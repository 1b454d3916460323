"""Mistral, alone or in a folder of Mistral 3: config.json keys and weight names."""

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import activation, head_dim, kv_heads, rope, size_keys
from jaxlm.interop.hf.text_part import pixtral_part
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
