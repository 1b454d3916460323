"""config.json files of published models of the small relatives of Llama (`LlamaBlocks`).

Their values were compared with
* the defaults of a class of transformers 5.23 that names the model: ERNIE-4.5-0.3B, helium-1-preview-2b, glm-4-9b-chat-hf,
  c4ai-command-r-v01, stablelm-3b-4e1t, Ministral-3-8B and cwm are these, apart from thetas that it does not have;
* copies of the file in public repositories: Seed-OSS-36B, Hunyuan-7B (but one copy has max_position_embeddings 262,144),
  EXAONE-4.0 of both sizes, StarCoder 2 of both sizes, the sizes of Command R+ and Command R7B and the latter's older keys.
Those of AFM-4.5B, aya-23-8B, Hunyuan-0.5B, StableLM 2 and Ministral-8B-2410 are from memory, and are not confirmed.
"""

from typing import Any

Json = dict[str, Any]


def _file(
    architecture: str, kind: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> Json:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": mlp,
        "model_type": kind,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **more,
    }


_SEED = _file(
    *("SeedOss", "seed_oss", 5120, 27648, 64, 80, 8),
    attention_bias=True,
    attention_dropout=0.1,
    attention_out_bias=False,
    bos_token_id=0,
    eos_token_id=2,
    head_dim=128,
    max_position_embeddings=524288,
    mlp_bias=False,
    pad_token_id=1,
    pretraining_tp=1,
    residual_dropout=0.1,
    rms_norm_eps=1e-06,
    rope_scaling={"rope_type": "default"},
    rope_theta=10000000.0,
    tie_word_embeddings=False,
    transformers_version="4.55.0",
    vocab_size=155136,
)


def _hunyuan(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Json:
    return _file(
        *("HunYuanDenseV1", "hunyuan_v1_dense", hidden, mlp, layers, heads, kv_heads),
        attention_bias=False,
        bos_token_id=1,
        eod_token_id=127967,
        eos_token_id=127960,
        head_dim=128,
        max_position_embeddings=32768,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling={
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        rope_theta=10000.0,
        vocab_size=128167,
        **more,
    )


_ERNIE = _file(
    *("Ernie4_5", "ernie4_5", 1024, 3072, 18, 16, 2),
    bos_token_id=1,
    eos_token_id=2,
    head_dim=128,
    max_position_embeddings=131072,
    pad_token_id=0,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    rope_theta=500000.0,
    tie_word_embeddings=True,
    transformers_version="4.54.0.dev0",
    use_bias=False,
    vocab_size=103424,
)
_ERNIE.pop("attention_dropout")
_LLAMA3 = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _exaone4(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Json:
    return _file(
        *("Exaone4", "exaone4", hidden, mlp, layers, heads, kv_heads),
        bos_token_id=1,
        eos_token_id=361,
        pad_token_id=0,
        rms_norm_eps=1e-05,
        rope_scaling=_LLAMA3,
        rope_theta=1000000,
        transformers_version="4.54.0.dev0",
        vocab_size=102400,
        **{"max_position_embeddings": 131072, **more},
    )


def _arcee(**more: Any) -> Json:
    return _file(
        *("Arcee", "arcee", 2560, 18432, 36, 20, 4),
        attention_bias=False,
        bos_token_id=128000,
        eos_token_id=128001,
        head_dim=128,
        mlp_bias=False,
        rms_norm_eps=1e-05,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        vocab_size=128004,
        **more,
    ) | {"hidden_act": "relu2"}


def _helium(**more: Any) -> Json:
    return {
        **_file("Helium", "helium", 2560, 7040, 24, 20, 20),
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "pad_token_id": 3,
        "rms_norm_eps": 1e-08,
        "rope_theta": 100000.0,
        "tie_word_embeddings": False,
        "vocab_size": 48000,
        **more,
    }


_GLM = _file(
    *("Glm", "glm", 4096, 13696, 40, 32, 2),
    attention_bias=True,
    eos_token_id=[151329, 151336, 151338],
    head_dim=128,
    max_position_embeddings=131072,
    pad_token_id=151329,
    partial_rotary_factor=0.5,
    rms_norm_eps=1.5625e-07,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    transformers_version="4.46.0.dev0",
    vocab_size=151552,
)


def _cohere(kind: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Json:
    return _file(
        *(kind.capitalize(), kind, hidden, mlp, layers, heads, kv_heads),
        attention_bias=False,
        bos_token_id=5,
        eos_token_id=255001,
        layer_norm_eps=1e-05,
        max_position_embeddings=8192,
        pad_token_id=0,
        vocab_size=256000,
        **more,
    )


_COHERE2 = {
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}


def _starcoder2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Json:
    return {
        **_file("Starcoder2", "starcoder2", hidden, mlp, layers, heads, kv_heads),
        "activation_function": "gelu",
        "attention_dropout": 0.1,
        "attention_softmax_in_fp32": True,
        "bos_token_id": 0,
        "embedding_dropout": 0.1,
        "eos_token_id": 0,
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.018042,
        "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 16384,
        "mlp_type": "default",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "residual_dropout": 0.1,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "sliding_window": 4096,
        "use_bias": True,
        "vocab_size": 49152,
        **more,
    }


def _stablelm(hidden: int, mlp: int, layers: int, kv_heads: int, vocab: int, **more: Any) -> Json:
    return _file(
        *("StableLm", "stablelm", hidden, mlp, layers, 32, kv_heads),
        bos_token_id=0,
        eos_token_id=0,
        layer_norm_eps=1e-05,
        max_position_embeddings=4096,
        partial_rotary_factor=0.25,
        rope_theta=10000,
        tie_word_embeddings=False,
        vocab_size=vocab,
        **more,
    )


_MINISTRAL = _file(
    *("Ministral", "ministral", 4096, 12288, 36, 32, 8),
    bos_token_id=1,
    eos_token_id=2,
    head_dim=128,
    layer_types=["full_attention", *["sliding_attention"] * 3] * 9,
    max_position_embeddings=32768,
    rms_norm_eps=1e-05,
    rope_theta=100000000.0,
    sliding_window=32768,
    tie_word_embeddings=False,
    vocab_size=131072,
)
_MINISTRAL3 = _file(
    *("Ministral3", "ministral3", 4096, 14336, 34, 32, 8),
    bos_token_id=1,
    eos_token_id=2,
    head_dim=128,
    max_position_embeddings=262144,
    pad_token_id=11,
    rms_norm_eps=1e-05,
    rope_parameters={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "max_position_embeddings": 262144,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
    sliding_window=None,
    tie_word_embeddings=False,
    vocab_size=131072,
)
_CWM = _file(
    *("Cwm", "cwm", 6144, 21504, 64, 48, 8),
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    head_dim=128,
    layer_types=["full_attention", *["sliding_attention"] * 3] * 16,
    max_position_embeddings=131072,
    mlp_bias=False,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=_LLAMA3,
    rope_theta=1000000.0,
    sliding_window=8192,
    tie_word_embeddings=False,
    vocab_size=128256,
)

# name -> (config.json, number of parameters (published, or that of transformers' model), keys that a note names)
RELATIVES: dict[str, tuple] = {
    "Seed-OSS-36B": (_SEED, 36_151_104_512),
    "Hunyuan-7B": (_hunyuan(4096, 14336, 32, 32, 8, tie_word_embeddings=True), 7_504_568_320),
    "Hunyuan-0.5B": (_hunyuan(1024, 3584, 24, 16, 8, tie_word_embeddings=True), 546_535_424),
    "ERNIE-4.5-0.3B": (_ERNIE, 360_748_032),
    "EXAONE-4.0-32B": (
        _exaone4(
            *(5120, 27392, 64, 40, 8),
            head_dim=128,
            layer_types=[*["sliding_attention"] * 3, "full_attention"] * 16,
            sliding_window=4096,
            sliding_window_pattern="LLLG",
            tie_word_embeddings=False,
        ),
        32_003_216_384,
    ),
    "EXAONE-4.0-1.2B": (
        _exaone4(
            *(2048, 4096, 30, 32, 8),
            head_dim=64,
            layer_types=["full_attention"] * 30,
            max_position_embeddings=65536,
            sliding_window=None,
            sliding_window_pattern=None,
            tie_word_embeddings=True,
        ),
        1_279_391_488,
    ),
    "AFM-4.5B": (
        _arcee(
            max_position_embeddings=65536,
            rope_scaling={
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 20.0,
                "mscale": 1.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "type": "yarn",
            },
        ),
        4_619_184_640,
        "mscale",
    ),
    "helium-1-preview-2b": (_helium(), 2_172_643_840),
    "glm-4-9b-chat-hf": (_GLM, 9_399_951_360),
    "c4ai-command-r-v01": (
        _cohere("cohere", 8192, 22528, 40, 64, 64, logit_scale=0.0625, rope_theta=8000000.0, use_qk_norm=False),
        34_980_831_232,
    ),
    "c4ai-command-r-plus": (
        _cohere(
            "cohere", 12288, 33792, 64, 96, 8, logit_scale=0.8333333333333334, rope_theta=75000000.0, use_qk_norm=True
        ),
        103_810_674_688,
    ),
    "aya-23-8B": (
        _cohere("cohere", 4096, 14336, 32, 32, 8, logit_scale=0.0625, rope_theta=10000, use_qk_norm=False),
        8_028_033_024,
    ),
    "c4ai-command-r7b-12-2024": (
        _cohere("cohere2", 4096, 14336, 32, 32, 8, logit_scale=0.25, rope_theta=50000, **_COHERE2),
        8_028_033_024,
        "layer_switch",
        "order_of_interleaved_layers",
    ),
    "starcoder2-3b": (
        _starcoder2(3072, 12288, 30, 24, 2, rope_theta=999999.4420358813),
        3_030_371_328,
        "activation_function",
        "mlp_type",
    ),
    "starcoder2-7b": (_starcoder2(4608, 18432, 32, 36, 4, rope_theta=1000000), 7_173_923_840, "layer_norm_epsilon"),
    "stablelm-3b-4e1t": (_stablelm(2560, 6912, 32, 32, 50304, use_qkv_bias=False), 2_795_443_200),
    "stablelm-2-1_6b": (_stablelm(2048, 5632, 24, 32, 100352, use_qkv_bias=True), 1_644_515_328),
    "stablelm-2-12b": (
        _stablelm(5120, 13824, 40, 8, 100352, qk_layernorm=True, use_parallel_residual=True, use_qkv_bias=False),
        12_143_185_920,
    ),
    "Ministral-8B-2410": (_MINISTRAL, 8_019_808_256),
    "Ministral-3-8B": (_MINISTRAL3, 8_489_553_920),
    "cwm": (_CWM, 32_581_097_472),
}
