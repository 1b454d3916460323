"""Gemma 3 text models: config.json keys and weight names."""

from collections.abc import Mapping
from typing import Any

from jaxlm.interop.hf.families.gemma import gemma_keys, gemma_tensors
from jaxlm.interop.hf.family import Family, Json, KeyGroup
from jaxlm.interop.hf.shared_keys import rope_from_json, rope_to_json
from jaxlm.interop.hf.shared_weights import qk_norms
from jaxlm.models.families.gemma3 import Gemma3Config


def _ropes_to_ours(theirs: Mapping[str, Any]) -> Json:
    given = theirs.get("rope_parameters") or {}
    full = dict(given.get("full_attention") or theirs.get("rope_scaling") or {})
    sliding = dict(given.get("sliding_attention") or {})
    full.setdefault("rope_theta", theirs.get("rope_theta", 1e6))
    sliding.setdefault("rope_theta", theirs.get("rope_local_base_freq", 10000.0))
    for rope in (full, sliding):
        rope.setdefault("partial_rotary_factor", 1.0)
    return {"rope": rope_from_json(full, theirs), "local_rope": rope_from_json(sliding, theirs)}


def _ropes_to_theirs(config: Gemma3Config) -> Json:
    ropes = {"full_attention": rope_to_json(config.rope), "sliding_attention": rope_to_json(config.local_rope)}
    return {"rope_parameters": ropes}


def _cap_notes(theirs: Mapping[str, Any]) -> list[str]:
    cap = theirs.get(_CAP)
    return [] if cap is None else [f"{_CAP}: {cap}: transformers does not cap the attention scores of Gemma 3"]


_CAP = "attn_logit_softcapping"
_ROPES = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")

FAMILY = Family(
    model_types=("gemma3_text",),
    architecture="Gemma3ForCausalLM",
    config=Gemma3Config,
    keys=(
        *gemma_keys(length=131072, pattern=6, final_cap=None, one_way=False),
        KeyGroup((_CAP,), lambda _: {}, lambda _: {_CAP: None}, _cap_notes),
        KeyGroup(_ROPES, _ropes_to_ours, _ropes_to_theirs),
    ),
    tensors=lambda config: (*gemma_tensors(config), *qk_norms()),
)
