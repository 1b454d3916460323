"""Small random multimodal models, as transformers saves them, one per kind of folder."""

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.safe_io import read_json_object
from jaxlm.interop.hf.folder import open_folder
from jaxlm.interop.hf.source_folder import SourceFolder
from tests.interop.cases import GEMMA4_SHARED, GROWING_SCORES, MISTRAL4, SEQ_LEN, register_mistral4

VOCAB = 96  # more than the ids of the images' tokens
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_PATCHES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
_QWEN3_VISION = {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_QWEN_IDS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_INTERLEAVED = {**_SECTIONS, "mrope_section": [2, 1, 1], "mrope_interleaved": True}

_GEMMA4_TEXT = {**_TEXT, **GEMMA4_SHARED, "vocab_size_per_layer_input": VOCAB, "num_hidden_layers": 4}
_GEMMA4_TEXT |= {"num_kv_shared_layers": 2, "layer_types": GEMMA4_SHARED["layer_types"][:4]}
_GEMMA4_TOWER = {**_PATCHES, "patch_size": 4, "position_embedding_size": 16}
_GEMMA4_IDS = {"image_token_id": 90, "video_token_id": 91, "boi_token_id": 92, "eoi_token_id": 93}
_GEMMA4_IDS |= {"audio_token_id": 94, "boa_token_id": 95, "eoa_token_index": 89}

# model_type, maybe with an addition -> keys of its config.
CASES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 7,
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
        },
        "vision_config": {**_PATCHES, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": 90,
        "boi_token_index": 91,
        "eoi_token_index": 92,
    },
    "gemma4": {
        "text_config": _GEMMA4_TEXT,
        "vision_config": {**_GEMMA4_TOWER, "num_key_value_heads": 2, "head_dim": 8},
        "audio_config": None,
        **_GEMMA4_IDS,
    },
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
        "vision_config": {
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
        },
        **_QWEN_IDS,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
        "vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]},
        "tie_word_embeddings": True,
        **_QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "head_dim": 8, "rope_parameters": _INTERLEAVED},
        "vision_config": _QWEN3_VISION,
        **_QWEN_IDS,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_TEXT,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "decoder_sparse_step": 2,
            "rope_parameters": _INTERLEAVED,
        },
        "vision_config": _QWEN3_VISION,
        **_QWEN_IDS,
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT,
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "rope_parameters": {**_INTERLEAVED, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
        },
        "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16},
        **_QWEN_IDS,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
        "vision_config": {**_PATCHES, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 90,
        "tie_word_embeddings": False,
    },
    "mistral3-of-2026": {
        "text_config": {**_TEXT, **MISTRAL4, "model_type": "mistral4"},
        "vision_config": {**_PATCHES, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 90,
        "tie_word_embeddings": False,
    },
    "mistral3-of-2025": {
        "text_config": {**_TEXT, "model_type": "ministral3", "head_dim": 8, "rope_parameters": GROWING_SCORES},
        "vision_config": {**_PATCHES, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 90,
        "tie_word_embeddings": False,
    },
}


@functools.lru_cache(maxsize=8)
def reference(kind: str) -> Any:
    """A model of transformers with N(0, 0.2) in every parameter, including norms and biases."""
    import torch
    import transformers

    register_mistral4()
    options = copy.deepcopy(CASES[kind])
    config = transformers.AutoConfig.for_model(kind.partition("-")[0], **options, attn_implementation="eager")
    name = type(config).__name__.replace("Config", "ForConditionalGeneration")
    model = getattr(transformers, name)(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def saved(kind: str, folder: Path) -> Path:
    """The folder of the model, as transformers saves it, with the file of a processor."""
    reference(kind).save_pretrained(folder)
    if kind in _ADDED:
        _add(_ADDED[kind], folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "x"}')
    return folder


_GIVEN = "model.language_model.layers.{}.self_attn."  # of layers with the keys and values of earlier ones
_ADDED: dict[str, dict[str, tuple[int, ...]]] = {
    "qwen3_5": {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,), "mtp.layers.0.mlp.up_proj.weight": (40, 32)},
    "gemma4": {f"{_GIVEN.format(layer)}k_proj.weight": (32, 32) for layer in (2, 3)}
    | {f"{_GIVEN.format(3)}v_proj.weight": (32, 32), f"{_GIVEN.format(3)}k_norm.weight": (32,)},
}


def _add(added: dict[str, tuple[int, ...]], file: Path) -> None:
    """Adds tensors that published folders have, and transformers neither reads nor writes."""
    from safetensors.numpy import load_file, save_file

    arrays, rng = load_file(file), np.random.default_rng(0)
    arrays |= {name: rng.standard_normal(shape).astype(np.float16) for name, shape in added.items()}
    save_file(arrays, file, {"format": "pt"})


def source_of(folder: Path) -> SourceFolder:
    """The description of a folder, as a run saves it."""
    content = read_json_object(folder / "config.json")
    source = SourceFolder.read(folder, str(folder), content, open_folder(folder).config)
    return SourceFolder.from_json(content, source.to_json())
