"""OLMo 2: config.json keys and weight names."""

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import usual_keys
from jaxlm.interop.hf.weights import biased_attention, block_norms, embeddings_and_head, gated_mlp, qk_norms
from jaxlm.models.families.olmo2 import Olmo2Config

FAMILY = Family(
    model_types=("olmo2",),
    architecture="Olmo2ForCausalLM",
    config=Olmo2Config,
    keys=(
        *usual_keys(length=2048, eps_default=1e-5),
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
)
