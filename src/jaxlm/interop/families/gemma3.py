"""Gemma 3's text models in config.json and in their files."""

from collections.abc import Mapping
from typing import Any

from jaxlm.interop.family import Family, Fixed, Group, Json, Key
from jaxlm.interop.shared_keys import (
    activation,
    head_dim,
    kv_heads,
    rope_from_json,
    rope_to_json,
    sizes,
    window_pattern,
)
from jaxlm.interop.shared_weights import attention, ends, four_norms, gated_mlp, head_norms
from jaxlm.models.gemma3 import Gemma3Config


def _ropes_to_ours(theirs: Mapping[str, Any]) -> Json:
    given = theirs.get("rope_parameters") or {}
    whole = dict(given.get("full_attention") or theirs.get("rope_scaling") or {})
    local = dict(given.get("sliding_attention") or {})
    whole.setdefault("rope_theta", theirs.get("rope_theta", 1e6))
    local.setdefault("rope_theta", theirs.get("rope_local_base_freq", 10000.0))
    for one in (whole, local):
        one.setdefault("partial_rotary_factor", 1.0)
    return {"rope": rope_from_json(whole, theirs), "local_rope": rope_from_json(local, theirs)}


def _ropes_to_theirs(config: Gemma3Config) -> Json:
    ropes = {"full_attention": rope_to_json(config.rope), "sliding_attention": rope_to_json(config.local_rope)}
    return {"rope_parameters": ropes}


FAMILY = Family(
    model_types=("gemma3_text",),
    architecture="Gemma3ForCausalLM",
    config=Gemma3Config,
    keys=(
        *sizes(length=131072, tied=True),
        kv_heads(),
        head_dim(256),
        Group(
            ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"), _ropes_to_ours, _ropes_to_theirs
        ),
        activation("hidden_activation", "gelu_pytorch_tanh", written={"gelu_new": "gelu_pytorch_tanh"}),
        window_pattern(6, window=4096),
        Key("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
        Key("attn_logit_softcapping", "attn_soft_cap", None),
        Key("final_logit_softcapping", "final_soft_cap", None),
        Fixed("use_bidirectional_attention", False, others=(None,)),
        Fixed("attention_bias", False),
        Fixed("attention_dropout", 0.0),
        Fixed("cache_implementation", "hybrid", others=(None,)),
    ),
    tensors=lambda config: (*ends(config), *four_norms(), *attention(), *head_norms(), *gated_mlp()),
)
