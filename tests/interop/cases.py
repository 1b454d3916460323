"""Small random transformers models, several per family, for the family tests."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from jaxlm.interop.hf.folder import save_folder
from jaxlm.models.base import Inputs, vocab_axis
from tests.engine.helpers import one_device

VOCAB, SEQ_LEN = 61, 48
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ_LEN,
    "initializer_range": 0.2,
}
GPT2 = {"vocab_size": VOCAB, "n_positions": SEQ_LEN, "n_embd": 32, "n_layer": 2, "n_head": 4}
NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
YARN = {"rope_type": "yarn", **STRETCHED}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCHED}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
# Texts of tests/interop/test_longrope.py grow beyond the original length.
GROWS = LONGROPE | {"original_max_position_embeddings": SEQ_LEN, "long_factor": [3.0, 5.0, 6.0, 8.0]}
GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 12}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_LINEAR, _FULL = "linear_attention", "full_attention"
LISTED = {"num_hidden_layers": 6, "layer_types": [_GLOBAL, _LOCAL, _LOCAL, _GLOBAL, _LOCAL, _GLOBAL]}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
OLMO3_ROPES = {
    "full_attention": {**YARN, "attention_factor": 1.1, "beta_fast": 16.0, "beta_slow": 1.0, "truncate": True},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA4 = {
    "num_hidden_layers": 7,  # of which the sixth is global, and the last one always is
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 5,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 16}
GEMMA4_SHARED = GEMMA4 | {
    "attention_k_eq_v": False,
    "layer_types": [_LOCAL, _GLOBAL] * 4,
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
GROWING_SCORES = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
BALANCED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "head_dim": 8,
    "num_mtp_layers": 0,
}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 5}
LATENT = {
    **{key: value for key, value in BALANCED.items() if key not in ("head_dim", "num_mtp_layers")},
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}
SCALED_SCORES = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}
MISTRAL4 = {
    **LATENT,
    **{"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
    **{"first_k_dense_replace": 1, "rope_parameters": {**GROWING_SCORES, "partial_rotary_factor": 6 / 16}},
}
MIXED = {**EXPERTS, "intermediate_size": 28, "initializer_range": 0.2}
HYBRID = {
    **LLAMA,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
QWEN_HYBRID = {**HYBRID, "head_dim": 32, "rms_norm_eps": 1e-5}
NO_ROTATION = {"rope_type": "default", "rope_theta": None}
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
MPT = {"vocab_size": VOCAB, "max_seq_len": SEQ_LEN, "d_model": 32, "n_layers": 2, "n_heads": 4}

# name -> (model_type, options that override the family's); the first of each family is a default test, others are slow.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 64}),
    "gpt2-gelu": ("gpt2", {"activation_function": "gelu"}),
    "gpt2-relu": ("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 1e-3}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "activation_function": "quick_gelu"}),
    "gpt2-narrow": ("gpt2", {"n_inner": 50, "activation_function": "relu2"}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False, "activation_function": "gelu_accurate"}),
    "gpt2-only-by-layer": ("gpt2", {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-own-heads": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 16}),
    "llama-bidirectional": ("llama", {"is_causal": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC, "hidden_act": "relu2"}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "num_hidden_layers": 3},
    ),
    "qwen2-listed": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, **LISTED}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "qwen2-yarn-mscale": (
        "qwen2",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 2.0, "truncate": False}},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "num_hidden_layers": 4,
            "head_dim": 8,
        },
    ),
    "qwen3-listed": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "head_dim": 8, **LISTED}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen3_5": ("qwen3_5_text", QWEN_HYBRID),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**QWEN_HYBRID, **EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**QWEN_HYBRID, **EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": False},
    ),
    "qwen3_5-listed": (
        "qwen3_5_text",
        QWEN_HYBRID
        | {
            "num_hidden_layers": 5,
            "layer_types": [_FULL, _LINEAR, _LINEAR, _FULL, _LINEAR],
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {**HYBRID, "rope_parameters": NO_ROTATION, "num_key_value_heads": 4}),
    "olmo_hybrid-rotated": ("olmo_hybrid", {**HYBRID, "num_hidden_layers": 4, "linear_allow_neg_eigval": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 7, "head_dim": 12}),
    "mixtral-tied": ("mixtral", {"num_local_experts": 3, "tie_word_embeddings": True, "head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe-windows": (
        "qwen3_moe",
        {**EXPERTS, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "head_dim": 8},
    ),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        {**MIXED, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": 8},
    ),
    "olmo": ("olmo", {"clip_qkv": 0.7}),
    "olmo-biases": ("olmo", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "olmo2": ("olmo2", {}),
    "olmo2-tied": ("olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "olmo2-biases": ("olmo2", {"attention_bias": True}),
    "olmo3": (
        "olmo3",
        {"num_hidden_layers": 6, "sliding_window": 5, "rope_parameters": OLMO3_ROPES},
    ),
    "olmo3-every-other": (
        "olmo3",
        {"num_hidden_layers": 5, "sliding_window": 5, "layer_types": ALTERNATING, "head_dim": 12},
    ),
    "olmo3-biases": ("olmo3", {"attention_bias": True, "num_hidden_layers": 4, "sliding_window": 5}),
    "olmo3-listed": ("olmo3", {"sliding_window": 5, "rope_parameters": OLMO3_ROPES, **LISTED}),
    "granite": ("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "granite-tied": ("granite", {**GRANITE, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "granite-grows": ("granite", {**GRANITE, "rope_parameters": GROWS, "max_position_embeddings": 128}),
    "smollm3": ("smollm3", {"num_hidden_layers": 6, "attention_bias": True}),
    "smollm3-windows": (
        "smollm3",
        {
            "num_hidden_layers": 5,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3-irregular": (
        "smollm3",
        {
            "num_hidden_layers": 5,
            "no_rope_layers": [0, 1, 1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "smollm3-all-rotated": ("smollm3", {"no_rope_layers": [1, 1], "head_dim": 12}),
    "smollm3-listed": ("smollm3", {"use_sliding_window": True, "sliding_window": 5, **LISTED}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen2_moe-shares": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 56, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen2_moe-no-biases": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24, "qkv_bias": False}),
    "qwen2_moe-mixed": (
        "qwen2_moe",
        {
            **MIXED,
            "num_hidden_layers": 5,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": LISTED["layer_types"][:5],
        },
    ),
    "qwen2_moe-dense-first": (
        "qwen2_moe",
        {**MIXED, "num_hidden_layers": 4, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    ),
    "qwen2_moe-all-dense": ("qwen2_moe", {**MIXED, "mlp_only_layers": [0, 1]}),
    "qwen2_moe-windows": (
        "qwen2_moe",
        {
            **EXPERTS,
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "olmoe": ("olmoe", {"clip_qkv": 0.5, "num_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 24}),
    "olmoe-normalized": (
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
    ),
    "granitemoe": ("granitemoe", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "granitemoe-biases": (
        "granitemoe",
        {
            **GRANITE,
            "num_local_experts": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 8, "rotary_dim": 4, "rope_theta": 100.0},
    ),
    "minimax_m2-all-rotated": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 12}),
    "glm4_moe": (
        "glm4_moe",
        {**BALANCED, "n_group": 3, "topk_group": 2, "use_qk_norm": True, "first_k_dense_replace": 1},
    ),
    "glm4_moe-biases": (
        "glm4_moe",
        {
            **BALANCED,
            "attention_bias": True,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 0,
            "intermediate_size": 20,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT, "rope_parameters": SCALED_SCORES}),
    "glm4_moe_lite-biases": (
        "glm4_moe_lite",
        {
            **LATENT,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "num_hidden_layers": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **LATENT,
            **{"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0},
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "mistral4": ("mistral4", MISTRAL4),
    "glm4": ("glm4", {"head_dim": 12}),
    "glm4-all-rotated": (
        "glm4",
        {"head_dim": 16, "attention_bias": False, "rope_parameters": {**LLAMA3, "partial_rotary_factor": 1.0}},
    ),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "gpt_neox-odd": ("gpt_neox", {"rotary_pct": 0.4, "hidden_act": "gelu_fast"}),
    "gpt_neox-one-after-the-other": ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "gpt_neox-no-biases": ("gpt_neox", {"attention_bias": False, "hidden_act": "gelu_accurate"}),
    "mpt": ("mpt", {"n_heads": 6, "d_model": 48}),
    "mpt-clipped": ("mpt", {"attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.9}}),
    "mpt-eps": ("mpt", {"layer_norm_epsilon": 1e-3}),
    "phi3": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "phi3-grows": (
        "phi3",
        {"rope_parameters": GROWS, "original_max_position_embeddings": SEQ_LEN, "max_position_embeddings": 128},
    ),
    "phi4-mini-grows": (
        "phi3",
        {
            "rope_parameters": {
                **GROWS,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [3.0, 5.0, 8.0],
                "attention_factor": 1.3,
            },
            "original_max_position_embeddings": SEQ_LEN,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    ),
    "phi3-window": ("phi3", {"sliding_window": 5, "partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "phi3-short": (
        "phi3",
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": SEQ_LEN}, "tie_word_embeddings": True},
    ),
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    "gemma-biases": ("gemma", {"head_dim": 12, "attention_bias": True, "rope_parameters": LLAMA3}),
    "gemma2": (
        "gemma2",
        {"num_hidden_layers": 3, **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2-listed": ("gemma2", {**GEMMA, **LISTED}),
    "gemma2-uncapped": ("gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-biases": ("gemma2", {**GEMMA, "attention_bias": True}),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 5, **GEMMA, "layer_types": ALTERNATING, "rope_parameters": TWO_ROPES},
    ),
    "gemma3-biases": ("gemma3_text", {**GEMMA, "attention_bias": True, "num_hidden_layers": 6}),
    "gemma3-listed": ("gemma3_text", {**GEMMA, **LISTED, "rope_parameters": TWO_ROPES}),
    "gemma3-all-local": ("gemma3_text", {**GEMMA, "layer_types": ["sliding_attention"] * 2}),
    "gemma3-bidirectional": (
        "gemma3_text",
        {
            **GEMMA,
            "num_hidden_layers": 5,
            "sliding_window": 6,
            "layer_types": ALTERNATING,
            "use_bidirectional_attention": True,
        },
    ),
    "gemma3-deep": ("gemma3_text", {"num_hidden_layers": 8, **GEMMA, "final_logit_softcapping": 3.0}),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-moe": ("gemma4_text", GEMMA4 | GEMMA4_EXPERTS),
    "gemma4-shared": ("gemma4_text", GEMMA4_SHARED),
    "gemma4-separate": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": False, "num_hidden_layers": 4, "layer_types": [_GLOBAL, _LOCAL, _LOCAL, _GLOBAL]},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 12, "attention_out_bias": True}),
    "seed_oss-biases": (
        "seed_oss",
        {"head_dim": 8, "mlp_bias": True, "attention_bias": False, "rope_parameters": YARN},
    ),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 12}),
    "hunyuan-biases": ("hunyuan_v1_dense", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 8}),
    "ernie4_5": ("ernie4_5", {"head_dim": 12, "use_bias": True}),
    "ernie4_5-untied": ("ernie4_5", {"head_dim": 8, "tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "exaone4": ("exaone4", {"num_hidden_layers": 5, "sliding_window": 5}),
    "exaone4-no-window": (
        "exaone4",
        {"sliding_window": None, "layer_types": [_GLOBAL, _GLOBAL], "head_dim": 12, "tie_word_embeddings": True},
    ),
    "exaone4-listed": ("exaone4", {"sliding_window": 5, "rope_parameters": LLAMA3, **LISTED}),
    "arcee": ("arcee", {}),
    "arcee-biases": ("arcee", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "helium": ("helium", {"head_dim": 8, "attention_bias": True}),
    "helium-biases": ("helium", {"head_dim": 8, "mlp_bias": True, "tie_word_embeddings": True}),
    "glm": ("glm", {"head_dim": 12}),
    "glm-all-rotated": (
        "glm",
        {"head_dim": 16, "attention_bias": False, "rope_parameters": {**LLAMA3, "partial_rotary_factor": 1.0}},
    ),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "cohere-biases": ("cohere", {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.8}),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 5}),
    "cohere2-listed": ("cohere2", {"sliding_window": 5, "attention_bias": True, "logit_scale": 0.25, **LISTED}),
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "starcoder2-no-biases": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "stablelm": ("stablelm", {"rope_parameters": PARTIAL, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "rope_parameters": PARTIAL},
    ),
    "ministral": (
        "ministral",
        {
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "layer_types": [_GLOBAL, _LOCAL, _LOCAL, _GLOBAL, _LOCAL],
            "head_dim": 8,
        },
    ),
    "ministral-all-local": ("ministral", {"sliding_window": 5, "head_dim": 12}),
    "ministral3": ("ministral3", {"head_dim": 12, "rope_parameters": GROWING_SCORES}),
    "ministral3-window": (
        "ministral3",
        {"head_dim": 8, "sliding_window": 5, "tie_word_embeddings": True, "rope_parameters": GROWING_SCORES},
    ),
    "cwm": ("cwm", {"num_hidden_layers": 5, "sliding_window": 5, "head_dim": 12}),
    "cwm-listed": ("cwm", {"sliding_window": 5, "head_dim": 8, "mlp_bias": True, **LISTED}),
    "gpt_oss": (
        "gpt_oss",
        {**GPT_OSS, "num_hidden_layers": 3, "swiglu_limit": 0.5, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "gpt_oss-listed": ("gpt_oss", {**GPT_OSS, **LISTED, "attention_bias": False, "swiglu_alpha": 0.7}),
}
FIRST = {kind: name for name, (kind, _) in reversed(CASES.items())}
"""The case of each family that the default tests use."""


def register_mistral4() -> None:
    """Lets transformers find the class of Mistral 4, which 5.23 has, by its `model_type`."""
    from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def config_of(name: str) -> Any:
    """The configuration of a case."""
    import transformers

    kind, options = copy.deepcopy(CASES[name])  # transformers adds keys to what it is given
    if kind == "mistral4":
        register_mistral4()
    base = {"gpt2": GPT2 | NO_DROPOUT, "gpt_neox": NEOX, "mpt": MPT}.get(kind, LLAMA)
    return transformers.AutoConfig.for_model(
        kind, **{**base, "pad_token_id": None, **options}, attn_implementation="eager"
    )


@functools.lru_cache(maxsize=4)
def reference(name: str) -> Any:
    """A transformers model with N(0, 0.2) in every parameter, including norms and biases."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config_of(name)).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in state_of(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    # transformers cuts the filters of its files into equal parts, which it joins again.
    if CASES[name][0] == "olmo_hybrid":
        model.save_pretrained = functools.partial(_save_as_published, model, model.save_pretrained)
    # Its published folders have the experts as transformers has them in memory.
    if CASES[name][0] == "qwen3_5_moe_text":
        model.save_pretrained = functools.partial(model.save_pretrained, save_original_format=False)
    return model.eval()


def _save_as_published(model: Any, save: Callable[[Path], Any], folder: str | Path) -> None:
    from safetensors.numpy import save_file

    save(folder)
    arrays = {name: array.numpy() for name, array in model.state_dict().items()}
    save_file(dict(olmo_hybrid_files(arrays)), Path(folder) / "model.safetensors", {"format": "pt"})


def olmo_hybrid_files(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of a model's parameters in OLMo Hybrid's files, given those of transformers."""
    norms = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    for name, array in arrays.items():
        layer, module = name.rpartition(".layers.")[0], name.split(".")[3:4]
        prefix = ".".join(name.split(".")[:3])
        if name.endswith("conv1d.weight"):
            keys = HYBRID["linear_num_key_heads"] * HYBRID["linear_key_head_dim"]
            for part, filters in zip("qkv", np.split(array, [keys, 2 * keys]), strict=True):
                yield name.replace("conv1d", f"{part}_conv1d"), np.ascontiguousarray(filters)
        elif layer and f"{prefix}.linear_attn.A_log" in arrays and module[0] in norms:
            yield name.replace(module[0], norms[module[0]]), array
        else:
            yield name, array


def state_of(model: Any) -> dict[str, Any]:
    """The parameters of a transformers model by name, with the biases of routers and factors of layers, buffers there."""
    saved = ("correction_bias", "layer_scalar")
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith(saved)}
    return {**dict(model.named_parameters()), **buffers}


def tokens(rows: int = 2, length: int = SEQ_LEN) -> np.ndarray:
    """Random token ids, int [rows, length]."""
    return np.random.default_rng(1).integers(0, VOCAB, size=(rows, length))


def inputs_of(ids: np.ndarray, part: slice = slice(None)) -> Inputs:
    """Rows of token ids, each one document. Args: part: the positions to take."""
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    columns = [np.asarray(a[:, part], np.int32) for a in (ids, positions, np.ones_like(ids))]
    axes = tuple(map(Axis, ("batch", "position"), columns[0].shape))
    return Inputs(*(hax.named(jnp.asarray(column), axes) for column in columns))


@jax.jit
def logits_of(model, inputs):
    """Logits [batch, position, vocab]."""
    return model.logits(model.hidden(inputs).final).array


def abstract_of(config: Any, vocab: int = VOCAB) -> Any:
    """The shapes of a model."""
    return jax.eval_shape(lambda: config.build(vocab_axis(vocab), key=jax.random.key(0)))


def exported(folder: Path, model: Any, config: Any, **options: Any) -> Path:
    """Saves a model in Hugging Face's format."""
    usual = {"dtype": np.float32, "files": {}, "special_ids": {"bos_token_id": 1}}  # CWM's class requires a BOS
    save_folder(folder, model, config, one_device(), **usual | options)
    return folder
