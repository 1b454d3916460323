"""Small random models of transformers, several of every family: what the tests of families go through."""

import functools
from typing import Any

import numpy as np

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
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCHED}

# name -> (model_type, options over the family's); the first of each family is the default one, the others are slow.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 64}),
    "gpt2-gelu": ("gpt2", {"activation_function": "gelu"}),
    "gpt2-relu": ("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 1e-3}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-own-heads": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 16}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "num_hidden_layers": 3},
    ),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", **STRETCHED}, "max_position_embeddings": 64}),
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
}
FIRST = {kind: name for name, (kind, _) in reversed(CASES.items())}
"""Of each family the case that tests by default go through."""


def config_of(name: str) -> Any:
    """The configuration of a case."""
    import transformers

    kind, options = CASES[name]
    base = {"gpt2": GPT2 | NO_DROPOUT}.get(kind, LLAMA)
    return transformers.AutoConfig.for_model(kind, **{**base, **options}, attn_implementation="eager")


@functools.lru_cache(maxsize=4)
def reference(name: str) -> Any:
    """A model of transformers with N(0, 0.2) in every parameter, norms and biases too."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config_of(name)).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def tokens(rows: int = 2, length: int = SEQ_LEN) -> np.ndarray:
    """Random ones, int [rows, length]."""
    return np.random.default_rng(1).integers(0, VOCAB, size=(rows, length))
