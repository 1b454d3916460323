"""Qwen3, alone or in a folder of Qwen3-VL: config.json keys and weight names."""

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, causality, late_window, usual_keys
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import biased_attention, embeddings_and_head, gated_mlp, pre_norms, qk_norms
from jaxlm.models.families.qwen3 import Qwen3Config

FAMILY = Family(
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    config=Qwen3Config,
    keys=(
        *usual_keys(length=32768, head=128),
        causality(),
        late_window(28),
        JsonKey("attention_bias", "attention_bias", False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *embeddings_and_head(config),
        *pre_norms(),
        *biased_attention(config),
        *qk_norms(),
        *gated_mlp(),
    ),
    respelled=RESPELLED_WINDOWS,
    text=(
        TextPart(
            ("qwen3_vl",),
            ("qwen3_vl_text", None),
            kept=(r"(model\.)?visual\.",),
            defaults={"max_position_embeddings": 128000, "rope_theta": 5e5, "num_key_value_heads": 32},
        ),
    ),
)
