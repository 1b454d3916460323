"""GLM 4: config.json keys and weight names. Gate and up are one matrix."""

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import rope, usual_keys
from jaxlm.interop.hf.weights import attention, block_norms, embeddings_and_head, fused_gated_mlp
from jaxlm.models.families.glm4 import Glm4Config

FAMILY = Family(
    model_types=("glm4",),
    architecture="Glm4ForCausalLM",
    config=Glm4Config,
    keys=(
        *usual_keys(length=131072, eps_default=1.5625e-07, head=128, rotary=rope(partial=0.5, rotates_part=True)),
        JsonKey("attention_bias", "attention_bias", True),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *embeddings_and_head(config),
        *block_norms(
            attn_norm="input_layernorm",
            attn_post_norm="post_self_attn_layernorm",
            mlp_norm="post_attention_layernorm",
            mlp_post_norm="post_mlp_layernorm",
        ),
        *attention(qkv_bias=config.attention_bias),
        *fused_gated_mlp(),
    ),
)
