"""MPT: config.json keys and weight names. Queries, keys and values are one matrix."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup, sort_unread
from jaxlm.interop.hf.weights import BLOCK, HEADS, Tensor, fused, single
from jaxlm.models.families.mpt import MptConfig

_RATIO = 4
_LAYER = "transformer.blocks.{layer}."
# Supported values of attn_config. transformers always uses this alibi_bias_max.
_SUPPORTED = {
    "attn_type": ("multihead_attention",),
    "attn_pdrop": (0, 0.0),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
    "alibi_bias_max": (8,),
}
# Keys of attn_config that are fields of the model config.
_READ = ("softmax_scale", "clip_qkv")
_SILENT = ("attn_impl", "base_config_key")


def _tensors(config: MptConfig) -> Iterator[Tensor]:
    yield single("transformer.wte.weight", "tokens.weight", "vocab | embed")
    if not config.tie_word_embeddings:
        yield single("lm_head.weight", "head.weight", "vocab | embed")
    yield single("transformer.norm_f.weight", "body.final_norm.weight", "embed")
    for theirs, ours in {"norm_1": "attn_norm", "norm_2": "mlp_norm"}.items():
        yield single(f"{_LAYER}{theirs}.weight", f"{BLOCK}{ours}.weight", "embed")
    qkv = {f"{BLOCK}attn.{name}.weight": f"{out} | embed" for name, out in HEADS.items()}
    yield fused(f"{_LAYER}attn.Wqkv.weight", qkv)
    yield single(f"{_LAYER}attn.out_proj.weight", f"{BLOCK}attn.o_proj.weight", "embed | heads head_size")
    yield single(f"{_LAYER}ffn.up_proj.weight", f"{BLOCK}mlp.up_proj.weight", "mlp | embed")
    yield single(f"{_LAYER}ffn.down_proj.weight", f"{BLOCK}mlp.down_proj.weight", "embed | mlp")


def _attention_to_ours(theirs: Mapping[str, Any]) -> Json:
    attn = theirs.get("attn_config") or {}
    for key, allowed in _SUPPORTED.items():
        if attn.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"attn_config.{key}: {attn[key]} given, which is not supported; {allowed[0]} expected")
    changing, _ = sort_unread(attn, set(attn).difference(_SUPPORTED, _READ))
    if changing:
        raise ConfigError(f"attn_config.{changing[0]}")
    scale, clip = attn.get("softmax_scale"), attn.get("clip_qkv") or None  # transformers clips nothing with 0
    # As numbers of the type that transformers requires: published files have whole numbers.
    read = {"softmax_scale": scale, "clip_qkv": clip}
    return {"alibi_bias_max": 8.0, **{key: None if value is None else float(value) for key, value in read.items()}}


def _attention_to_theirs(config: MptConfig) -> Json:
    fixed = {key: allowed[0] for key, allowed in _SUPPORTED.items()}
    return {"attn_config": fixed | {key: getattr(config, key) for key in _READ}}


def _attention_notes(theirs: Mapping[str, Any]) -> list[str]:
    attn = theirs.get("attn_config") or {}
    _, harmless = sort_unread(attn, set(attn).difference(_SUPPORTED, _READ, _SILENT))
    return [f"attn_config.{text}" for text in harmless]


def _width_notes(theirs: Mapping[str, Any]) -> list[str]:
    ratio = theirs.get("expansion_ratio", _RATIO)
    return [] if ratio == _RATIO else [f"expansion_ratio: {ratio}: transformers always uses {_RATIO} for this family"]


FAMILY = Family(
    model_types=("mpt",),
    architecture="MptForCausalLM",
    config=MptConfig,
    aliases={"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"},
    keys=(
        JsonKey("max_seq_len", "seq_len", 2048),
        JsonKey("d_model", "hidden_dim"),
        JsonKey("n_layers", "num_layers"),
        JsonKey("n_heads", "num_heads"),
        KeyGroup(
            ("expansion_ratio",),
            lambda theirs: {"intermediate_dim": _RATIO * theirs["d_model"]},
            lambda _: {"expansion_ratio": _RATIO},
            _width_notes,
        ),
        JsonKey("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
        JsonKey("initializer_range", "initializer_range", 0.02),
        JsonKey("tie_word_embeddings", "tie_word_embeddings", True),
        KeyGroup(("attn_config",), _attention_to_ours, _attention_to_theirs, _attention_notes),
        FixedKey("no_bias", True),
        FixedKey("logit_scale", None),
        FixedKey("resid_pdrop", 0.0, others=(0,)),
        FixedKey("emb_pdrop", 0.0, others=(0,)),
        FixedKey("norm_type", "low_precision_layernorm"),
        # With ALiBi there are no position embeddings in either case.
        FixedKey("learned_pos_emb", True, others=(False,)),
        FixedKey("embedding_fraction", 1.0),
        FixedKey("init_device", "cpu", others=("meta",)),
        FixedKey("verbose", 0),
    ),
    tensors=lambda config: tuple(_tensors(config)),
    prefix="transformer.",
)
