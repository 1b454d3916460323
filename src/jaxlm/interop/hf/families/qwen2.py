"""Qwen2 and Qwen2.5, alone or in a folder of Qwen2-VL or Qwen2.5-VL: config.json keys and weight names."""

from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, causality, late_window, usual_keys
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import attention, embeddings_and_head, gated_mlp, pre_norms
from jaxlm.models.families.qwen2 import Qwen2Config

FAMILY = Family(
    model_types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    config=Qwen2Config,
    keys=(
        *usual_keys(length=32768),
        causality(),
        late_window(28),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (*embeddings_and_head(config), *pre_norms(), *attention(qkv_bias=True), *gated_mlp()),
    respelled=RESPELLED_WINDOWS,
    text=(
        TextPart(
            ("qwen2_vl", "qwen2_5_vl"),
            ("qwen2_vl_text", "qwen2_5_vl_text", None),
            kept=(r"(model\.)?visual\.",),
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80, "num_key_value_heads": 8},
        ),
    ),
)
