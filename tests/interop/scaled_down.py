"""Published config.json files scaled down to models that a test can run: sizes shrink, every other key stays."""

import copy
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

LENGTH, ORIGINAL, HEAD_SIZE, VOCAB = 48, 16, 16, 61
_SIZES = {
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 40),
    "shared_expert_intermediate_size": 24,
    **{"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7},
    "vocab_size": VOCAB,
}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def scaled_down(content: Mapping[str, Any]) -> Json:
    """The same file for a model with few layers, few heads, a small vocabulary and a context of about 48 tokens."""
    small = {**copy.deepcopy(dict(content)), **_IDS}
    small |= {key: size for key, size in _SIZES.items() if key in content}
    _scale_heads(small)
    _scale_layers(small)
    _scale_lengths(small, content)
    if "global_head_dim" in small:
        small |= {"global_head_dim": 2 * HEAD_SIZE, "vocab_size_per_layer_input": VOCAB}
        small["num_global_key_value_heads"] = small["num_global_key_value_heads"] and 1
        small["num_kv_shared_layers"] = min(1, small["num_kv_shared_layers"])
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in small:
            chosen = next((small[name] for name in ("num_experts_per_tok", "top_k_experts") if name in small), None)
            small[key] = chosen and chosen + 2
    if small.get("n_group", 1) > 1:
        small |= {"n_routed_experts": 2 * small["num_experts_per_tok"], "n_group": 4, "topk_group": 3}
    if "rotary_dim" in small:
        small["rotary_dim"] = HEAD_SIZE // 2
    return small


def _scale_heads(small: Json) -> None:
    """Keeps the number of query heads per KV head, and whether heads fill the hidden width."""
    hidden = next(key for key in ("hidden_size", "n_embd", "d_model") if key in small)
    heads = next(key for key in ("num_attention_heads", "n_head", "n_heads") if key in small)
    kv_heads = small.get("num_key_value_heads", small[heads])
    group, small_kv = small[heads] // kv_heads, min(kv_heads, 2)
    fills = small.get("head_dim", small[hidden] // small[heads]) * small[heads] == small[hidden]
    small[heads] = group * small_kv
    if "num_key_value_heads" in small:
        small["num_key_value_heads"] = small_kv
    if "head_dim" in small:
        small["head_dim"] = HEAD_SIZE
    if "linear_num_key_heads" in small:
        group = small["linear_num_value_heads"] // small["linear_num_key_heads"]
        small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * group}
        small |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_SIZE)
    small[hidden] = HEAD_SIZE * small[heads] if fills else 40


def _scale_layers(small: Json) -> None:
    """Keeps at least one layer of every kind."""
    key = next(key for key in ("num_hidden_layers", "n_layer", "n_layers") if key in small)
    patterns = [
        small.get(name) for name in ("sliding_window_pattern", "no_rope_layer_interval", "full_attention_interval")
    ]
    patterns = [len(pattern) if isinstance(pattern, str) else pattern for pattern in patterns]  # "LLLG"
    kinds = small.get("layer_types") or []
    first_full = kinds.index("full_attention") + 1 if len({*kinds}) > 1 else 0
    first_sparse = small.get("first_k_dense_replace", 0)
    small[key] = max(1, first_full, first_sparse, *(pattern or 0 for pattern in patterns)) + 1
    for name in ("layer_types", "no_rope_layers"):
        if name in small:
            small[name] = small[name][: small[key]]


def _scale_lengths(small: Json, content: Mapping[str, Any]) -> None:
    """Keeps the ratio of the context to the original context, and whether windows are shorter than the context."""
    key = next(key for key in ("max_position_embeddings", "n_positions", "max_seq_len") if key in small)
    rope = small.get("rope_scaling") or small.get("rope_parameters") or {}
    original = rope.get("original_max_position_embeddings", small.get("original_max_position_embeddings"))
    scaled_context = original is not None and content[key] > original
    small[key] = content[key] * ORIGINAL // original if scaled_context else LENGTH
    for section in (rope, small):
        if "original_max_position_embeddings" in section:
            section["original_max_position_embeddings"] = ORIGINAL if scaled_context else LENGTH
    pairs = int(HEAD_SIZE * small.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = rope[name][:pairs]
    window = small.get("sliding_window")
    if window is not None and window < content[key]:
        small["sliding_window"] = 5
