"""config.json files of published multimodal folders, with the number of their parameters and the names of their tensors.

The files are from memory. A number of parameters with `is_published` is that of the published weights: that all keys together
give it confirms every size among them. What does not change it (thetas, sections, epsilons, ids) was compared with copies in
public repositories for Qwen3-VL and Mistral Small, and is not confirmed for the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.interop.published import OPENED
from tests.interop.published_gemma4 import UNUSED, gemma4_folder

Json = dict[str, Any]
_QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
_QWEN35_IDS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def _text(name: str, *without: str) -> Json:
    """The keys of the same text model in a folder of its own, without some."""
    return {key: value for key, value in OPENED[name][0].items() if key not in ("architectures", *without)}


def _gemma3(hidden: int, mlp: int, layers: int, **more: Any) -> Json:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "model_type": "gemma3_text",
            "num_hidden_layers": layers,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **more,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


def _older_qwen(kind: str, name: str, vision: Json, **more: Any) -> Json:
    """The keys of the text model are beside the others, without a level of their own."""
    architecture = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[kind]
    text = _text(name, "use_mrope") | {"max_position_embeddings": 128000}
    own = {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": kind,
        "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
        "vision_config": vision,
        "vision_token_id": 151654,
    }
    return {**text, **own, **_QWEN_IDS, **more}


_PATCHES = {
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
}
_QWEN3_ROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}


def _qwen3_vl(name: str, architecture: str, kind: str) -> Json:
    sizes = ("sliding_window", "use_sliding_window", "max_window_layers", "torch_dtype", "transformers_version")
    text = _text(name, *sizes, "output_router_logits", "router_aux_loss_coef", "tie_word_embeddings")
    own = {"max_position_embeddings": 262144, "model_type": f"{kind}_text", "rope_theta": 5000000}
    return {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": {**text, **own, "dtype": "bfloat16", "rope_scaling": _QWEN3_ROPE},
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 4304,
            "model_type": kind,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **_QWEN_IDS,
    }


_PIXTRAL = {
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "image_size": 1540,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "model_type": "pixtral",
    "num_attention_heads": 16,
    "num_channels": 3,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "rope_theta": 10000.0,
}


def _mistral3(text: Json, **more: Any) -> Json:
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": text,
        "transformers_version": "4.57.1",
        "vision_config": _PIXTRAL,
        "vision_feature_layer": -1,
        **more,
    }


_SMALL = {
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 32768,
    "max_position_embeddings": 131072,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000000.0,
    "sliding_window": None,
    "use_cache": True,
    "vocab_size": 131072,
}


def _qwen3_5(name: str, architecture: str, kind: str, depth: int, hidden: int, mlp: int, heads: int) -> Json:
    """Args: depth: of the tower; it follows from the published number of tensors."""
    text = _text(name, "tie_word_embeddings")
    return {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": OPENED[name][0]["tie_word_embeddings"],
        "transformers_version": "4.57.0.dev0",
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": hidden,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": mlp,
            "model_type": kind,
            "num_heads": heads,
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **_QWEN35_IDS,
    }


@dataclass(frozen=True)
class Folder:
    """A published multimodal folder.

    Attributes:
        config: its config.json.
        num_parameters: of all parts, without layers that predict further tokens.
        num_tensors: of the text model and of the other parts in the files, likewise.
        names: beginning of a module's name in transformers -> of its tensors' names in the files. The first fits.
        is_published: whether the number of parameters is that of the published weights. Otherwise, it is transformers' own.
        inputs_first: whether the experts' tensors are [experts, in, out] in the files.
        has_head: whether the files have a head, whatever config.json says. transformers follows them.
        further: names of tensors that no layer reads, such as those of layers that predict further tokens.
        noted: keys that a note names.
    """

    config: Json
    num_parameters: int
    num_tensors: tuple[int, int]
    names: Mapping[str, str] = field(default_factory=dict)
    is_published: bool = True
    inputs_first: bool = False
    has_head: bool = False
    further: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()


_BEFORE = {"model.language_model.": "model.", "model.visual.": "visual."}  # names before transformers 4.52
_WRAPPED = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.": "",
}
_SECTIONS = ("mrope_section",)
_BOTH = ("mrope_interleaved", "mrope_section")
_VISION_2 = {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "num_heads": 16, **_PATCHES}
_VISION_2_5 = {
    **{"depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu", "hidden_size": 1280},
    **{"intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584, "tokens_per_second": 2, "window_size": 112},
    **_PATCHES,
}
_LARGE_TOWER = {"depth": 27, "hidden": 1152, "mlp": 4304, "heads": 16}
_MTP = ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight")

FOLDERS: dict[str, Folder] = {
    "gemma-3-4b": Folder(_gemma3(2560, 10240, 34), 4_300_079_472, (444, 439), _WRAPPED),
    "gemma-3-12b": Folder(
        _gemma3(3840, 15360, 48, num_attention_heads=16, num_key_value_heads=8), 12_187_325_040, (626, 439), _WRAPPED
    ),
    "gemma-3-27b": Folder(
        _gemma3(
            *(5376, 21504, 62), head_dim=128, num_attention_heads=32, num_key_value_heads=16, query_pre_attn_scalar=168
        ),
        *(27_432_406_640, (808, 439), _WRAPPED),
    ),
    "Qwen2-VL-2B": Folder(
        _older_qwen("qwen2_vl", "Qwen2.5-1.5B-Instruct", _VISION_2, max_position_embeddings=32768),
        *(2_208_985_600, (338, 391), _BEFORE),
        noted=_SECTIONS,
    ),
    "Qwen2.5-VL-7B": Folder(
        _older_qwen("qwen2_5_vl", "Qwen2.5-7B", _VISION_2_5),
        *(8_292_166_656, (339, 390), _BEFORE),
        noted=_SECTIONS,
    ),
    "Qwen3-VL-8B": Folder(_qwen3_vl("Qwen3-8B", "Qwen3VL", "qwen3_vl"), 8_767_123_696, (399, 351), noted=_BOTH),
    "Qwen3-VL-30B-A3B": Folder(
        _qwen3_vl("Qwen3-30B-A3B", "Qwen3VLMoe", "qwen3_vl_moe"),
        *(31_070_754_032, (531, 351)),
        inputs_first=True,
        noted=_BOTH,
    ),
    "Mistral-Small-3.1-24B": Folder(_mistral3(_SMALL), 24_011_361_280, (363, 222), _WRAPPED, has_head=True),
    "Ministral-3-8B": Folder(
        _mistral3(_text("Ministral-3-8B"), tie_word_embeddings=False),
        *(8_918_026_240, (309, 222), _WRAPPED),
        is_published=False,
    ),
    "Mistral-Small-4-119B": Folder(
        _mistral3(_text("Mistral-Small-4-119B"), tie_word_embeddings=False),
        119_401_298_944,
        (543, 222),
        _WRAPPED,
        is_published=False,
    ),
    **{
        name: Folder(gemma4_folder(_text(name), audio=True), *counts, is_published=False, further=UNUSED[name])
        for name, counts in {
            "gemma-4-E2B": (5_104_298_467, (540, 1411)),
            "gemma-4-E4B": (7_941_101_802, (665, 1411)),
        }.items()
    },
    "gemma-4-31B": Folder(
        gemma4_folder(_text("gemma-4-31B"), audio=False), 31_273_088_876, (832, 356), is_published=False
    ),
    "gemma-4-26B-A4B": Folder(
        gemma4_folder(_text("gemma-4-26B-A4B"), audio=False), 25_805_936_206, (657, 356), is_published=False
    ),
    "Qwen3.5-0.8B": Folder(
        _qwen3_5("Qwen3.5-0.8B", "Qwen3_5", "qwen3_5", depth=12, hidden=768, mlp=3072, heads=12),
        *(852_985_920, (320, 153)),
        is_published=False,
        further=_MTP,
        noted=_BOTH,
    ),
    "Qwen3.5-27B": Folder(
        _qwen3_5("Qwen3.5-27B", "Qwen3_5", "qwen3_5", **_LARGE_TOWER),
        *(27_356_728_560, (851, 333)),
        is_published=False,
        further=_MTP,
        noted=_BOTH,
    ),
    "Qwen3.5-35B-A3B": Folder(
        _qwen3_5("Qwen3.5-35B-A3B", "Qwen3_5Moe", "qwen3_5_moe", **_LARGE_TOWER),
        *(35_107_181_936, (693, 333)),
        is_published=False,
        further=_MTP,
        noted=_BOTH,
    ),
}
