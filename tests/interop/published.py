"""config.json files of published models: family by family, every key that their authors wrote."""

from typing import Any

from tests.interop.published_gemma4 import TEXTS
from tests.interop.published_moe import MOE
from tests.interop.published_relatives import RELATIVES

Json = dict[str, Any]


def _usual(
    name: str, version: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, length: int, vocab: int
) -> Json:
    """The keys of most families. Args: version: of transformers."""
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": mlp,
        "max_position_embeddings": length,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "transformers_version": version,
        "use_cache": True,
        "vocab_size": vocab,
    }


def _llama(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, length: int, vocab: int, **more: Any) -> Json:
    return {
        **_usual("Llama", "4.40.0", hidden, mlp, layers, heads, kv_heads, length, vocab),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        **more,
    }


def _llama3_rope(factor: float) -> Json:
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def _qwen2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool, **more: Any) -> Json:
    return {
        **_usual("Qwen2", "4.43.1", hidden, mlp, layers, heads, kv_heads, 32768, 151936),
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "max_window_layers": layers,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        **more,
    }


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool, **more: Any) -> Json:
    return {
        **_qwen2(hidden, mlp, layers, heads, kv_heads, tied=tied),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_scaling": None,
        "sliding_window": None,
        "transformers_version": "4.51.0",
        **more,
    }


def _mistral(**more: Any) -> Json:
    return {
        **_usual("Mistral", "4.34.0.dev0", 4096, 14336, 32, 32, 8, 32768, 32000),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        **more,
    }


def _mixtral(**more: Any) -> Json:
    return {
        **_mistral(sliding_window=None, rope_theta=1000000.0, transformers_version="4.36.0.dev0"),
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        **more,
    }


def _phi3(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Json:
    return {
        **_usual("Phi3", "4.40.2", hidden, mlp, layers, heads, kv_heads, 4096, vocab),
        "_name_or_path": "Phi-3-mini-4k-instruct",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        **more,
    }


def _gemma(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Json:
    return {
        **_usual("Gemma", "4.38.0.dev0", hidden, mlp, layers, heads, kv_heads, 8192, 256000),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_act": "gelu",
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        **more,
    }


def _olmo(hidden: int, mlp: int, layers: int, heads: int, **more: Any) -> Json:
    return {
        **_usual("Olmo", "4.40.0.dev0", hidden, mlp, layers, heads, heads, 2048, 50304),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "pad_token_id": 1,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **more,
    }


def _gemma2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, scalar: int, **more: Any) -> Json:
    return {
        **_usual("Gemma2", "4.42.4", hidden, mlp, layers, heads, kv_heads, 8192, 256000),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "query_pre_attn_scalar": scalar,
        "rms_norm_eps": 1e-06,
        "sliding_window": 4096,
        "torch_dtype": "float32",
        **more,
    }


def _gemma3(hidden: int, mlp: int, layers: int, heads: int, **more: Any) -> Json:
    return {
        **_usual("Gemma3", "4.50.0.dev0", hidden, mlp, layers, heads, 1, 32768, 262144),
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        **more,
    }


def _qwen3_5(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, value_heads: int, **more: Any) -> Json:
    """The text part of Qwen3.5's folders, as they describe it."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": mlp,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 248320,
        **more,
    }


_OLMO_HYBRID = {
    "architectures": ["OlmoHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 3840,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 96,
    "linear_num_key_heads": 30,
    "linear_num_value_heads": 30,
    "linear_value_head_dim": 192,
    "max_position_embeddings": 65536,
    "model_type": "olmo_hybrid",
    "num_attention_heads": 30,
    "num_hidden_layers": 32,
    "num_key_value_heads": 30,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 100352,
}


def _olmo2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Json:
    return {
        **_usual("Olmo2", "4.47.0", hidden, mlp, layers, heads, kv_heads, 4096, 100352),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **more,
    }


def _gpt2(width: int, layers: int, heads: int, **more: Any) -> Json:
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": width,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
        **more,
    }


def _neox(hidden: int, mlp: int, layers: int, heads: int, vocab: int, **more: Any) -> Json:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": mlp,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": vocab,
        **more,
    }


def _mpt(attention: Json, **more: Any) -> Json:
    return {
        "architectures": ["MPTForCausalLM"],
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": None,
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
            **attention,
        },
        "auto_map": {
            "AutoConfig": "configuration_mpt.MPTConfig",
            "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
        },
        "d_model": 4096,
        "emb_pdrop": 0,
        "embedding_fraction": 1.0,
        "expansion_ratio": 4,
        "init_config": {
            "emb_init_std": None,
            "emb_init_uniform_lim": None,
            "fan_mode": "fan_in",
            "init_div_is_residual": True,
            "init_gain": 0,
            "init_nonlinearity": "relu",
            "init_std": 0.02,
            "name": "kaiming_normal_",
            "verbose": 0,
        },
        "init_device": "cpu",
        "learned_pos_emb": True,
        "logit_scale": None,
        "max_seq_len": 2048,
        "model_type": "mpt",
        "n_heads": 32,
        "n_layers": 32,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0,
        "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.28.1",
        "use_cache": False,
        "verbose": 0,
        "vocab_size": 50432,
        **more,
    }


def _granite(hidden: int, mlp: int, attention: float, logits: float, **more: Any) -> Json:
    return {
        **_usual("Granite", "4.46.0.dev0", hidden, mlp, 40, 32, 8, 4096, 49155),
        "attention_bias": False,
        "attention_dropout": 0.1,
        "attention_multiplier": attention,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "logits_scaling": logits,
        "mlp_bias": False,
        "pad_token_id": 0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        **more,
    }


def _smollm3(**more: Any) -> Json:
    return {
        **_usual("SmolLM3", "4.54.0.dev0", 2048, 11008, 36, 16, 4, 65536, 128256),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 128012,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 36,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "pad_token_id": 128004,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_cache": False,
        "use_sliding_window": False,
        **more,
    }


def _qwen2_moe(**more: Any) -> Json:
    return {
        **_qwen2(2048, 5632, 24, 16, 16, tied=False),
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        **more,
    }


_QWEN2_57B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480,
    "sliding_window": 131072,
}
_OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
    "transformers_version": "4.57.1",
    "vocab_size": 100278,
}
_GLM4 = {
    **_usual("Glm4", "4.52.0.dev0", 4096, 13696, 40, 32, 2, 32768, 151552),
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
_LONG_FACTORS = [1.0 + 0.5 * i for i in range(48)]  # as many as published, one per pair of features; other values
_PHI4_MINI = {
    "_name_or_path": "Phi-4-mini-instruct",
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": _LONG_FACTORS, "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_LLAMA31 = {"mlp_bias": False, "bos_token_id": 128000, "rope_theta": 500000.0}
_SMOLLM2 = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_llama_config": True,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}
_R1 = {"eos_token_id": 151643, "max_position_embeddings": 131072, "use_mrope": False}

# name -> (config.json, number of parameters, *keys that a note names)
OPENED: dict[str, tuple[Any, ...]] = {
    "Llama-2-7b": (_llama(4096, 11008, 32, 32, 32, 4096, 32000, torch_dtype="float16"), 6_738_415_616),
    "Llama-2-70b": (_llama(8192, 28672, 80, 64, 8, 4096, 32000), 68_976_648_192),
    "Llama-3-8B": (
        _llama(4096, 14336, 32, 32, 8, 8192, 128256, bos_token_id=128000, eos_token_id=128001, rope_theta=500000.0),
        8_030_261_248,
    ),
    "Llama-3.1-8B-Instruct": (
        _llama(
            *(4096, 14336, 32, 32, 8, 131072, 128256),
            **_LLAMA31,
            eos_token_id=[128001, 128008, 128009],
            rope_scaling=_llama3_rope(8.0),
        ),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        _llama(
            *(2048, 8192, 16, 32, 8, 131072, 128256),
            **_LLAMA31,
            head_dim=64,
            rope_scaling=_llama3_rope(32.0),
            tie_word_embeddings=True,
        ),
        1_235_814_400,
    ),
    "Llama-3.2-3B-unsloth": (
        _llama(
            *(3072, 8192, 28, 24, 8, 131072, 128256),
            **_LLAMA31,
            head_dim=128,
            rope_scaling=_llama3_rope(32.0),
            tie_word_embeddings=True,
            unsloth_fixed=True,
            unsloth_version="2025.1.5",
        ),
        3_212_749_824,
        "unsloth_fixed",
    ),
    "TinyLlama-1.1B": (_llama(2048, 5632, 22, 32, 4, 2048, 32000), 1_100_048_384),
    "SmolLM2-135M": (
        _llama(576, 1536, 30, 9, 3, 8192, 49152, rope_theta=100000, **_SMOLLM2),
        134_515_008,
        "is_llama_config",
        "rope_interleaved",
    ),
    "SmolLM2-1.7B": (
        _llama(2048, 8192, 24, 32, 32, 8192, 49152, rope_theta=130000, **_SMOLLM2),
        1_711_376_384,
        "is_llama_config",
    ),
    "deepseek-coder-1.3b": (
        _llama(2048, 5504, 24, 16, 16, 16384, 32256, rope_theta=100000, rope_scaling={"factor": 4.0, "type": "linear"}),
        1_346_471_936,
    ),
    "Yi-6B": (_llama(4096, 11008, 32, 32, 4, 4096, 64000, pad_token_id=0, rope_theta=5000000.0), 6_061_035_520),
    "vicuna-dynamic": (
        _llama(4096, 11008, 32, 32, 32, 4096, 32000, rope_scaling={"type": "dynamic", "factor": 2.0}),
        6_738_415_616,
    ),
    "R1-Distill-Llama-8B": (
        _llama(4096, 14336, 32, 32, 8, 131072, 128256, **_LLAMA31, eos_token_id=128001, rope_scaling=_llama3_rope(8.0)),
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (_mistral(), 7_241_732_096),
    "Mistral-7B-v0.3": (
        _mistral(rope_theta=1000000.0, sliding_window=None, vocab_size=32768, attention_dropout=0.0),
        7_248_023_552,
    ),
    "Mistral-Nemo-2407": (
        _mistral(
            attention_dropout=0.0,
            head_dim=128,
            hidden_size=5120,
            max_position_embeddings=131072,
            num_hidden_layers=40,
            rope_theta=1000000.0,
            sliding_window=None,
            vocab_size=131072,
        ),
        12_247_782_400,
    ),
    "zephyr-7b": (_mistral(_name_or_path="dpo", pad_token_id=2, use_cache=True), 7_241_732_096),
    "Mixtral-8x7B": (_mixtral(), 46_702_792_704),
    "Mixtral-8x22B": (
        _mixtral(
            hidden_size=6144,
            intermediate_size=16384,
            max_position_embeddings=65536,
            num_attention_heads=48,
            num_hidden_layers=56,
            router_jitter_noise=0.0,
            vocab_size=32000,
        ),
        140_620_634_112,
    ),
    "Qwen2-0.5B": (_qwen2(896, 4864, 24, 14, 2, tied=True, max_position_embeddings=131072), 494_032_768),
    "Qwen2.5-0.5B": (_qwen2(896, 4864, 24, 14, 2, tied=True, use_mrope=False), 494_032_768, "use_mrope"),
    "Qwen2.5-1.5B-Instruct": (_qwen2(1536, 8960, 28, 12, 2, tied=True), 1_543_714_304),
    "Qwen2.5-7B": (
        _qwen2(3584, 18944, 28, 28, 4, tied=False, use_mrope=False, vocab_size=152064),
        7_615_616_512,
        "use_mrope",
    ),
    "Qwen2.5-7B-1M": (
        _qwen2(
            *(3584, 18944, 28, 28, 4),
            tied=False,
            dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192},
            max_position_embeddings=1010000,
            rope_theta=10000000.0,
            vocab_size=152064,
        ),
        7_615_616_512,
        "dual_chunk_attention_config",
    ),
    "Qwen2.5-7B-yarn": (
        _qwen2(
            *(3584, 18944, 28, 28, 4),
            tied=False,
            rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
            vocab_size=152064,
        ),
        7_615_616_512,
    ),
    "Qwen2.5-7B-half-of-mscale": (
        _qwen2(
            *(3584, 18944, 28, 28, 4),
            tied=False,
            rope_scaling={"factor": 4.0, "mscale": 0.7, "original_max_position_embeddings": 32768, "type": "yarn"},
            vocab_size=152064,
        ),
        7_615_616_512,
        "mscale",
    ),
    "R1-Distill-Qwen-1.5B": (
        _qwen2(1536, 8960, 28, 12, 2, tied=False, **_R1, max_window_layers=21, sliding_window=4096, rope_theta=10000),
        1_777_088_000,
        "use_mrope",
    ),
    "Qwen3-0.6B": (_qwen3(1024, 3072, 28, 16, 8, tied=True), 596_049_920),
    "Qwen3-8B": (_qwen3(4096, 12288, 36, 32, 8, tied=False), 8_190_735_360),
    "Qwen3-30B-A3B": (_qwen3(2048, 6144, 48, 32, 4, tied=False, **_QWEN3_MOE), 30_532_122_624),
    "Phi-3-mini-4k": (_phi3(3072, 8192, 32, 32, 32, 32064), 3_821_079_552),
    "Phi-3-mini-128k": (
        _phi3(
            *(3072, 8192, 32, 32, 32, 32064),
            max_position_embeddings=131072,
            rope_scaling={"long_factor": _LONG_FACTORS, "short_factor": [1.0] * 48, "type": "longrope"},
            sliding_window=262144,
        ),
        3_821_079_552,
    ),
    "Phi-3-mini-128k-older": (
        _phi3(
            *(3072, 8192, 32, 32, 32, 32064),
            max_position_embeddings=131072,
            rope_scaling={"long_factor": _LONG_FACTORS, "short_factor": [1.0] * 48, "type": "su"},
            sliding_window=262144,
        ),
        3_821_079_552,
    ),
    "phi-4": (
        _phi3(
            *(5120, 17920, 40, 40, 10, 100352),
            bos_token_id=100257,
            eos_token_id=100265,
            max_position_embeddings=16384,
            original_max_position_embeddings=16384,
            pad_token_id=100349,
            rope_theta=250000,
            sliding_window=None,
        ),
        14_659_507_200,
    ),
    "Phi-4-mini": (
        _phi3(3072, 8192, 32, 24, 8, 200064, **_PHI4_MINI),
        3_836_021_760,
        "full_attn_mod",
        "interpolate_factor",
        "lm_head_bias",
        "mlp_bias",
    ),
    "gemma-2b": (_gemma(2048, 16384, 18, 8, 1), 2_506_172_416),
    "gemma-7b": (_gemma(3072, 24576, 28, 16, 16), 8_537_680_896),
    "gemma-1.1-7b-it": (
        _gemma(3072, 24576, 28, 16, 16, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh"),
        8_537_680_896,
        "hidden_activation",
    ),
    "gemma-2-2b": (_gemma2(2304, 9216, 26, 8, 4, 256), 2_614_341_888),
    "gemma-2-27b": (_gemma2(4608, 36864, 46, 32, 16, 144, head_dim=128), 27_227_128_320),
    "gemma-3-1b": (_gemma3(1152, 6912, 26, 4), 999_885_952),
    "gemma-3-270m": (
        _gemma3(
            *(640, 2048, 18, 4),
            _sliding_window_pattern=6,
            eos_token_id=1,
            layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
            use_bidirectional_attention=False,
        ),
        268_098_176,
    ),
    "embeddinggemma-300m": (
        _gemma3(
            *(768, 1152, 24, 3),
            _sliding_window_pattern=6,
            architectures=["Gemma3TextModel"],
            eos_token_id=1,
            layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 4,
            max_position_embeddings=2048,
            use_bidirectional_attention=True,
        ),
        302_863_104,
    ),
    "OLMo-1B": (_olmo(2048, 8192, 16, 16, tie_word_embeddings=True), 1_176_764_416),
    "OLMo-7B": (_olmo(4096, 11008, 32, 32), 6_888_095_744),
    "OLMo-1.7-7B": (_olmo(4096, 11008, 32, 32, clip_qkv=8.0, max_position_embeddings=4096), 6_888_095_744),
    "OLMo-2-1B": (_olmo2(2048, 8192, 16, 16, 16), 1_484_916_736),
    "OLMo-2-7B": (_olmo2(4096, 11008, 32, 32, 32), 7_298_617_344),
    "OLMo-3-7B": (_olmo2(4096, 11008, 32, 32, 32, **_OLMO3), 7_298_011_136),
    "granite-3.0-8b": (_granite(4096, 12800, 0.0078125, 16.0), 8_170_848_256),
    "granite-3.0-2b": (_granite(2048, 8192, 0.015625, 8.0), 2_533_531_648),
    # The numbers of parameters are those of transformers' text models with these configurations.
    "Qwen3.5-0.8B": (_qwen3_5(1024, 3584, 24, 8, 2, 16), 752_393_024, "mrope_interleaved", "mrope_section"),
    "Qwen3.5-27B": (
        _qwen3_5(5120, 17408, 64, 24, 4, 48, tie_word_embeddings=False),
        26_895_998_464,
        "mrope_interleaved",
        "mrope_section",
    ),
    "Qwen3.8-27B": (
        _qwen3_5(5120, 17408, 64, 24, 4, 48, tie_word_embeddings=False, output_gate_type="swish"),
        26_895_998_464,
        "mrope_interleaved",
        "mrope_section",
    ),
    "Olmo-Hybrid-7B": (_OLMO_HYBRID, 7_430_870_688),
    "SmolLM3-3B": (_smollm3(), 3_075_098_624, "max_window_layers"),
    "Qwen1.5-MoE-A2.7B": (_qwen2_moe(), 14_315_784_192),
    "Qwen2-57B-A14B": (_qwen2_moe(**_QWEN2_57B), 57_408_658_944),
    "GLM-4-9B-0414": (_GLM4, 9_400_279_040),
    "gpt2": (_gpt2(768, 12, 12), 124_439_808),
    "distilgpt2": (
        _gpt2(768, 6, 12, _num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}),
        81_912_576,
        "_num_labels",
    ),
    "gpt2-medium": (
        _gpt2(1024, 24, 16, n_special=0, predict_special_tokens=True),
        354_823_168,
        "n_special",
        "predict_special_tokens",
    ),
    "gpt2-xl": (_gpt2(1600, 48, 25, output_past=True), 1_557_611_200, "output_past"),
    "pythia-160m": (_neox(768, 3072, 12, 12, 50304), 162_322_944),
    "pythia-160m-tuned": (
        _neox(768, 3072, 12, 12, 50304, partial_rotary_factor=0.25, rope_scaling=None, rope_theta=10000),
        162_322_944,
    ),
    "pythia-6.9b": (_neox(4096, 16384, 32, 32, 50432), 6_857_302_016),
    "gpt-neox-20b": (
        _neox(
            6144, 24576, 44, 64, 50432, attention_probs_dropout_prob=0, hidden_act="gelu_fast", hidden_dropout_prob=0
        ),
        20_554_567_680,
        "attention_probs_dropout_prob",
        "hidden_dropout_prob",
    ),
    "RedPajama-3B": (_neox(2560, 10240, 32, 32, 50432, rotary_pct=1.0, use_parallel_residual=False), 2_775_864_320),
    "mpt-7b-chat": (_mpt({"qk_gn": False, "rope": False}), 6_649_286_656, "attn_config.qk_gn", "attn_config.rope"),
    "mpt-7b": (_mpt({}), 6_649_286_656, "init_config", "tokenizer_name"),
    "mpt-7b-clipped": (_mpt({"clip_qkv": 6.0, "softmax_scale": 0.1}), 6_649_286_656, "init_config", "tokenizer_name"),
    "own-pipeline": (
        _gpt2(768, 12, 12, custom_pipelines={"text-generation": {"impl": "pipeline.Mine"}}, _num_labels=5),
        124_439_808,
        "_num_labels",
        "custom_pipelines",
    ),
}
OPENED |= {**RELATIVES, **MOE, **TEXTS}

_AN_EXPERT = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "vocab_size": 152064,
}

# name -> (config.json, message)
REFUSED: dict[str, tuple[Json, str]] = {
    "mpt-7b-storywriter": (
        _mpt({"alibi_bias_max": 16, "clip_qkv": 6}, max_seq_len=65536),
        "attn_config.alibi_bias_max: 16 given, which is not supported",
    ),
    "Llama-2-7b-gptq": (
        _llama(4096, 11008, 32, 32, 32, 4096, 32000, quantization_config={"bits": 4, "quant_method": "gptq"}),
        "quantization_config: .*it stores or computes the weights in another form",
    ),
    "SmolLM2-interleaved": (
        _llama(576, 1536, 30, 9, 3, 8192, 49152, **_SMOLLM2 | {"rope_interleaved": True}),
        "rope_interleaved: True given, .*it changes the positions",
    ),
    "a-llama-with-experts": (
        _llama(4096, 11008, 32, 32, 32, 4096, 32000, num_local_experts=8, logits_scaling=8.0),
        "logits_scaling: 8.0 given, .*it scales activations or logits.*\n  num_local_experts: 8 given, .*changes the layers",
    ),
    "an-encoder": (_mistral(is_causal=False), "is_causal: False given, .*these models always have it on"),
    "LFM2-1.2B": (
        {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "conv_L_cache": 3},
        r"unknown model_type 'lfm2'. It has short convolutions \(conv_L_cache\).*does not have. Known: .*llama",
    ),
    "Llama-4-Scout": (
        {"model_type": "llama4", "text_config": {"attention_chunk_size": 8192, "model_type": "llama4_text"}},
        r"text_config.model_type 'llama4_text' in .*'llama4'. It has attention in chunks \(attention_chunk_size\), which",
    ),
    "gemma-3n-E2B": (
        {"model_type": "gemma3n", "text_config": {"altup_num_inputs": 4, "hidden_size_per_layer_input": 256}},
        r"text_config.model_type 'None' in .*'gemma3n'. It has .*\(AltUp\) .*which jaxlm does not have",
    ),
    "Phi-3.5-MoE": (
        {
            **_AN_EXPERT,
            "model_type": "phimoe",
            "input_jitter_noise": 0.0,
            "router_jitter_noise": 0.01,
            "num_local_experts": 16,
        },
        r"'mixtral', which does not read input_jitter_noise, and says: router_jitter_noise: 0.01 given, .*; 0.0 expected.",
    ),
    "gpt-j-6b": (
        {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64},
        r"'gptj'. The family with the most of its keys is 'gpt2', which does not read rotary_dim. Known: ",
    ),
    "gpt2-of-another-name": (
        {"model_type": "gpt2x", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
        r"'gpt2x'. Its keys are those of 'gpt2'. If it computes the same .*, set model_type: gpt2 in a copy",
    ),
    "Qwen3-VL-MoE-not-normalized": (
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {**_AN_EXPERT, "model_type": "qwen3_vl_moe_text", "norm_topk_prob": False},
        },
        "norm_topk_prob: False given, but transformers does not read it in a folder of this kind, and computes with True",
    ),
    "Qwen3-VL-without-text": (
        {"model_type": "qwen3_vl", "text_config": None, "vision_config": {"hidden_size": 1152}, "vocab_size": 151936},
        "text_config: None given, an object with the keys of the text model expected",
    ),
    "SmolLM3-short": (
        _smollm3(no_rope_layers=[1, 0, 0] * 11),
        r"no_rope_layers: .* given; 0 or 1 expected for each of 36 layers",
    ),
    "Qwen2-other-layers": (
        _qwen2(1536, 8960, 2, 12, 2, tied=True, layer_types=["linear_attention", "full_attention"]),
        "layer_types: .* given; sliding_attention or full_attention expected for each of 2 layers",
    ),
    "Qwen1.5-MoE-beyond": (
        _qwen2_moe(mlp_only_layers=[24]),
        r"model.mlp_only_layers: \[24\] given, different numbers from 0 to 23 expected",
    ),
}
