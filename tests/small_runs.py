"""Small runs of each model of the core, as configurations."""

import copy
from typing import Any

Tree = dict[str, Any]

SIZES = {"seq_len": 16, "hidden_dim": 32, "num_layers": 2, "num_heads": 4}
LLAMA = {**SIZES, "intermediate_dim": 48, "num_kv_heads": 4}
STATES = {
    "attention_interval": 2,
    "num_state_heads": 2,
    "num_value_heads": 4,
    "state_key_dim": 8,
    "state_value_dim": 8,
}
LATENTS = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
ROUTED = {
    "num_experts": 6,
    "num_experts_per_token": 2,
    "shared_expert_intermediate_dim": 24,
    "dense_intermediate_dim": 24,
}
MODELS: dict[str, Tree] = {
    "gpt2": {"type": "gpt2", **SIZES},
    "llama": {"type": "llama", **LLAMA},
    "mistral": {"type": "mistral", **LLAMA},
    "qwen2": {"type": "qwen2", **LLAMA, "sliding_window": 4},
    "gemma": {"type": "gemma", **LLAMA, "head_dim": 8},
    "gemma2": {"type": "gemma2", **LLAMA, "head_dim": 8},
    "gemma3": {"type": "gemma3", **LLAMA, "head_dim": 8, "sliding_window_pattern": 2},
    "gemma4": {
        "type": "gemma4",
        **LLAMA,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_kv_heads": 2,
        "sliding_window_pattern": 2,
    },
    "gpt_neox": {"type": "gpt_neox", **LLAMA},
    "mpt": {"type": "mpt", **LLAMA},
    "olmo": {"type": "olmo", **LLAMA},
    "olmo2": {"type": "olmo2", **LLAMA},
    "olmo3": {"type": "olmo3", **LLAMA, "sliding_window_pattern": 2},
    "granite": {"type": "granite", **LLAMA},
    "smollm3": {"type": "smollm3", **LLAMA, "no_rope_layer_interval": 2},
    "glm4": {"type": "glm4", **LLAMA, "head_dim": 8},
    "phi3": {"type": "phi3", **LLAMA},
    **{kind: {"type": kind, **LLAMA} for kind in ("hunyuan_v1_dense", "arcee", "cohere", "starcoder2", "stablelm")},
    **{
        kind: {"type": kind, **LLAMA, "head_dim": 8} for kind in ("seed_oss", "ernie4_5", "helium", "glm", "ministral3")
    },
    **{
        kind: {"type": kind, **LLAMA, "sliding_window_pattern": 2}
        for kind in ("exaone4", "cohere2", "ministral", "cwm")
    },
    "flax": {"type": "flax", "seq_len": 16, "factory": "examples.nnx_model:make", "kwargs": {"width": 32, "depth": 1}},
    "mixtral": {"type": "mixtral", **LLAMA, "num_experts": 4, "num_experts_per_token": 1},
    "qwen3_moe": {"type": "qwen3_moe", **LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_token": 2},
    "qwen2_moe": {
        "type": "qwen2_moe",
        **LLAMA,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "shared_expert_intermediate_dim": 24,
    },
    "qwen3_5": {"type": "qwen3_5", **LLAMA, "head_dim": 8, **STATES},
    **{
        kind: {
            "type": kind,
            **LLAMA,
            **STATES,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "shared_expert_intermediate_dim": 24,
        }
        for kind in ("qwen3_5_moe", "qwen3_next")
    },
    "olmo_hybrid": {"type": "olmo_hybrid", **LLAMA, **STATES},
    "olmoe": {"type": "olmoe", **LLAMA, "num_experts": 4, "num_experts_per_token": 2},
    "granitemoe": {"type": "granitemoe", **LLAMA, "num_experts": 4, "num_experts_per_token": 2},
    "minimax_m2": {"type": "minimax_m2", **LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_token": 2},
    "gpt_oss": {"type": "gpt_oss", **LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_token": 2},
    "glm4_moe": {"type": "glm4_moe", **LLAMA, "head_dim": 8, **ROUTED},
    "glm4_moe_lite": {"type": "glm4_moe_lite", **SIZES, "intermediate_dim": 48, **LATENTS, **ROUTED},
    "deepseek_v3": {
        "type": "deepseek_v3",
        **{**SIZES, "intermediate_dim": 48, **LATENTS, **ROUTED, "mlp_only_layers": [0]},
        **{"num_expert_groups": 3, "num_groups_per_token": 2},
    },
    "mistral4": {
        "type": "mistral4",
        **{**SIZES, "intermediate_dim": 48, **LATENTS, **ROUTED, "mlp_only_layers": [0]},
    },
    "qwen3": {"type": "qwen3", **LLAMA, "head_dim": 8, "sliding_window": 4},
}
TRAINER = {"id": "x", "train_batch_size": 16, "num_train_steps": 100, "fsdp_axis": "embed"}


def run_of(model: Tree, **sections: Any) -> Tree:
    """The configuration of a small run with a section `model`."""
    return {"model": dict(model), "trainer": dict(TRAINER), **copy.deepcopy(sections)}


def tree(model: str = "llama", **sections: Any) -> Tree:
    """The configuration of a small run. Args: model: a key of `MODELS`."""
    return run_of(MODELS[model], **sections)
