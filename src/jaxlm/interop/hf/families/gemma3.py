"""Gemma 3, alone or in a multimodal folder: config.json keys and weight names."""

from collections.abc import Mapping
from typing import Any

from jaxlm.interop.hf.families.gemma import gemma_keys, gemma_tensors
from jaxlm.interop.hf.family import Family, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, layer_ropes
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import qk_norms
from jaxlm.models.families.gemma3 import Gemma3Config


def _cap_notes(theirs: Mapping[str, Any]) -> list[str]:
    cap = theirs.get(_CAP)
    return [] if cap is None else [f"{_CAP}: {cap}: transformers does not cap the attention scores of Gemma 3"]


_CAP = "attn_logit_softcapping"

FAMILY = Family(
    model_types=("gemma3_text",),
    architecture="Gemma3ForCausalLM",
    config=Gemma3Config,
    keys=(
        *gemma_keys(length=131072, pattern=6, final_cap=None, pattern_key="sliding_window_pattern"),
        JsonKey("use_bidirectional_attention", "use_bidirectional_attention", False, to_ours=bool),
        KeyGroup((_CAP,), lambda _: {}, lambda _: {_CAP: None}, _cap_notes),
        layer_ropes(theta=1e6, local_theta=10000.0, local_key="rope_local_base_freq"),
    ),
    tensors=lambda config: (*gemma_tensors(config), *qk_norms()),
    respelled=RESPELLED_WINDOWS,
    text=(
        TextPart(
            ("gemma3",),
            ("gemma3_text", None),
            kept=(r"(model\.)?(vision_tower|multi_modal_projector)\.",),
            defaults={
                "vocab_size": 262208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
            },
        ),
    ),
)
