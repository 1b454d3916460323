"""OLMo 3: config.json keys and weight names. Only the global layers' rotary embedding is scaled."""

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import (
    RESPELLED_WINDOWS,
    activation,
    head_dim,
    kv_heads,
    layer_ropes,
    size_keys,
    window_pattern,
)
from jaxlm.interop.hf.weights import biased_attention, block_norms, embeddings_and_head, gated_mlp, qk_norms
from jaxlm.models.families.olmo3 import Olmo3Config

FAMILY = Family(
    model_types=("olmo3",),
    architecture="Olmo3ForCausalLM",
    config=Olmo3Config,
    keys=(
        *size_keys(length=2048, eps_default=1e-5),
        kv_heads(),
        head_dim(),
        layer_ropes(theta=500000.0, local_theta=500000.0),
        activation("hidden_act", "silu"),
        window_pattern(4, window=4096),
        JsonKey("attention_bias", "attention_bias", False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *embeddings_and_head(config),
        *block_norms(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"),
        *biased_attention(config),
        *qk_norms("heads head_size", "kv_heads head_size"),
        *gated_mlp(),
    ),
    respelled=RESPELLED_WINDOWS,
)
