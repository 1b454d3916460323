"""config.json files of Gemma 4. Keys are from memory and copies in public repositories; sizes are those of MaxText.

The numbers of parameters are those of transformers' text models with these configurations.
"""

from typing import Any

Json = dict[str, Any]


def gemma4_text(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, every: int = 6, **more: Any) -> Json:
    """The keys of a text model. Args: every: how many layers form a group, of which the last one is global."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": mlp,
        "layer_types": (["sliding_attention"] * (every - 1) + ["full_attention"]) * (layers // every),
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": heads,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        **more,
    }


_LARGE = {
    "attention_k_eq_v": True,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
_31B = gemma4_text(5376, 21504, 60, 32, 16, num_global_key_value_heads=4, **_LARGE)
_26B = gemma4_text(
    *(2816, 2112, 30, 16, 8),
    enable_moe_block=True,
    moe_intermediate_size=704,
    num_experts=128,
    num_global_key_value_heads=2,
    top_k_experts=8,
    **_LARGE,
)
_SMALL = {"hidden_size_per_layer_input": 256}
_E2B = gemma4_text(1536, 6144, 35, 8, 1, every=5, num_kv_shared_layers=20, use_double_wide_mlp=True, **_SMALL)
_E4B = gemma4_text(2560, 10240, 42, 8, 2, num_kv_shared_layers=18, **_SMALL)
TEXTS: dict[str, tuple[Json, int]] = {
    "gemma-4-E2B": ({"architectures": ["Gemma4ForCausalLM"], **_E2B}, 4_628_569_379),
    "gemma-4-E4B": ({"architectures": ["Gemma4ForCausalLM"], **_E4B}, 7_463_013_418),
    "gemma-4-31B": ({"architectures": ["Gemma4ForCausalLM"], **_31B}, 30_697_345_340),
    "gemma-4-26B-A4B": ({"architectures": ["Gemma4ForCausalLM"], **_26B}, 25_233_141_790),
}

UNUSED = {
    name: tuple(
        f"model.language_model.layers.{layer}.self_attn.{module}.weight"
        for layer in range(content["num_hidden_layers"] - content["num_kv_shared_layers"], content["num_hidden_layers"])
        for module in ("k_proj", "v_proj", "k_norm")
    )
    for name, (content, _) in TEXTS.items()
}
"""Tensors of published folders that no layer reads."""


def gemma4_folder(text: Json, *, audio: bool) -> Json:
    """The config.json of a folder with towers."""
    tower = {
        "head_dim": 64 if audio else 72,
        "hidden_size": 768 if audio else 1152,
        "intermediate_size": 3072 if audio else 4304,
        "num_attention_heads": 12 if audio else 16,
        "num_hidden_layers": 16 if audio else 27,
        "num_key_value_heads": 12 if audio else 16,
        "standardize": not audio,
        "use_clipped_linears": audio,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": {"model_type": "gemma4_audio"} if audio else None,
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eoa_token_index": 258883,
        "eoi_token_id": 258882,
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "video_token_id": 258884,
        "vision_config": {"model_type": "gemma4_vision", **tower},
        "vision_soft_tokens_per_image": 280,
    }
