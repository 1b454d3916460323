"""Published config.json files of mixtures of experts with their own file in `interop/hf/families`.

The numbers of parameters are those of the layers that transformers computes: GLM's and MiniMax's own have further ones for
multi-token prediction. Qwen3.5-35B-A3B, Qwen3-Next, OLMoE and GLM-4.5-Air have the sizes that transformers' classes have by
default; the file of gpt-oss-120b is a copy of the published one, that of gpt-oss-20b has its layers and experts; the sizes of
the others are from memory.
"""

from typing import Any

Json = dict[str, Any]


def _usual(architecture: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int) -> Json:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab,
    }


def _glm(hidden: int, mlp: int, layers: int, **more: Any) -> Json:
    return {
        **_usual("Glm4Moe", hidden, mlp, layers, 96, 8, 151552),
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "transformers_version": "4.54.0",
        **more,
    }


_AIR = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
}
_LARGE = {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}


def _granite(hidden: int, layers: int, heads: int, experts: int, attention: float, logits: float, **more: Any) -> Json:
    return {
        **_usual("GraniteMoe", hidden, 512, layers, heads, 8, 49155),
        "attention_bias": False,
        "attention_multiplier": attention,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "logits_scaling": logits,
        "max_position_embeddings": 4096,
        "model_type": "granitemoe",
        "num_experts_per_tok": 8,
        "num_local_experts": experts,
        "output_router_logits": False,
        "pad_token_id": 0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "transformers_version": "4.46.0.dev0",
        **more,
    }


def _gpt_oss(layers: int, experts: int) -> Json:
    return {
        **_usual("GptOss", 2880, 2880, layers, 64, 8, 201088),
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_experts_per_tok": 4,
        "num_local_experts": experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
    }


_OLMOE = {
    **_usual("Olmoe", 2048, 1024, 16, 16, 16, 50304),
    "attention_bias": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "transformers_version": "4.43.0.dev0",
}
# As in vLLM's test of this configuration; keys that this leaves out are from memory.
_GLM_FLASH = {
    **_usual("Glm4MoeLite", 2048, 10240, 47, 20, 20, 154880),
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.0rc0",
    "v_head_dim": 256,
}
# Values of DeepSeek-V3 are checked against verl's and transformers' configurations of it, those of Kimi K2 against that of
# a draft model for Kimi K2 Thinking; other keys are from memory.
_DEEPSEEK = {
    **_usual("DeepseekV3", 7168, 18432, 61, 128, 128, 129280),
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "transformers_version": "4.33.1",
    "v_head_dim": 128,
}
_KIMI = {
    **{key: value for key, value in _DEEPSEEK.items() if key != "ep_size"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**_DEEPSEEK["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "transformers_version": "4.48.3",
    "vocab_size": 163840,
}
_MINIMAX = {
    **_usual("MiniMaxM2", 3072, 1536, 62, 48, 8, 200064),
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.46.1",
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
}


def _qwen_hybrid(hidden: int, layers: int, heads: int, value_heads: int, width: int, **more: Any) -> Json:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": width,
        "tie_word_embeddings": False,
        "use_cache": True,
        **more,
    }


_QWEN_3_5 = {
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "mamba_ssm_dtype": "float32",
    "model_type": "qwen3_5_moe_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "vocab_size": 151936,
}
_OF_OPENAI = ("experts_per_token", "initial_context_length")
_M_ROPE = ("mrope_interleaved", "mrope_section")

# As `OPENED` in tests/interop/published.py.
MOE: dict[str, tuple[Any, ...]] = {
    "GLM-4.5-Air": (_glm(4096, 10944, 46, **_AIR), 106_852_251_264),
    "GLM-4.5": (_glm(5120, 12288, 92, **_LARGE), 352_797_829_024),
    "GLM-4.6": (
        _glm(5120, 12288, 92, **_LARGE, max_position_embeddings=202752),
        352_797_829_024,
    ),
    "GLM-4.7-Flash": (_GLM_FLASH, 29_943_393_920, "num_nextn_predict_layers"),
    "DeepSeek-V3": (_DEEPSEEK, 671_026_419_200, "ep_size"),
    "Kimi-K2": (_KIMI, 1_026_408_232_448, "aux_loss_alpha", "seq_aux"),
    "MiniMax-M2-bf16": (_MINIMAX, 228_689_764_864, "num_mtp_modules", "use_mtp"),
    "gpt-oss-20b": (_gpt_oss(24, 32), 20_914_757_184, *_OF_OPENAI),
    "gpt-oss-120b": (_gpt_oss(36, 128), 116_829_156_672, *_OF_OPENAI),
    "OLMoE-1B-7B-0924": (_OLMOE, 6_919_161_856),
    "granite-3.0-1b-a400m": (_granite(1024, 24, 16, 32, 0.015625, 6.0), 1_334_628_352),
    "granite-3.0-3b-a800m": (_granite(1536, 32, 24, 40, 0.015625, 6.0), 3_298_793_472),
    "Qwen3-Next-80B-A3B": (_qwen_hybrid(2048, 48, 16, 32, 512, **_NEXT), 79_674_391_296),
    # The text parts of their folders.
    "Qwen3.5-35B-A3B": (
        _qwen_hybrid(2048, 40, 16, 32, 512, **_QWEN_3_5, num_experts=256, num_experts_per_tok=8),
        34_660_610_688,
        *_M_ROPE,
    ),
    "Qwen3.5-397B-A17B": (
        _qwen_hybrid(4096, 60, 32, 64, 1024, **_QWEN_3_5, num_experts=512, num_experts_per_tok=10),
        396_346_350_336,
        *_M_ROPE,
    ),
}
