"""MPT: GPT-2's blocks without biases, and ALiBi in place of position embeddings.

Source: MosaicML 2023, "Introducing MPT-7B", and the code released with it (mosaicml/llm-foundry); ALiBi: Press et al.
2021 (arXiv:2108.12409).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup, sort_unread
from jaxlm.interop.hf.weights import BLOCK, HEADS, Tensor, fused, single
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, DecoderConfig, check_sizes, plain_mlp, projections
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.norms import LayerNorm
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice


@choice(ModelConfig, "mpt")
class MptConfig(DecoderConfig):
    """MPT. The defaults are MPT 7B.

    Attributes:
        alibi_bias_max: sets the smallest ALiBi slope, `2 ** -alibi_bias_max`.
        softmax_scale: factor of the attention scores. Null means `1 / sqrt(head_dim)`.
        clip_qkv: queries, keys and values are clipped to [-clip_qkv, clip_qkv]. Null does not clip.
    """

    intermediate_dim: PositiveInt = 16384
    activation_function: str = "gelu"
    tie_word_embeddings: bool = True
    alibi_bias_max: NonNegativeFloat = 8.0
    softmax_scale: PositiveFloat | None = None
    clip_qkv: PositiveFloat | None = None

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return (LayerKind(),) * self.num_layers

    def check(self) -> None:
        check_sizes(self)

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 6)
        maps = projections(self, keys[:4], qkv_bias=False, out_bias=False)
        rule = ScoreRule(alibi_max=self.alibi_bias_max)
        attn = SelfAttention(**maps, clip_qkv=self.clip_qkv, scale=self.softmax_scale, rule=rule)
        return DecoderBlock(self.norm(), attn, self.norm(), plain_mlp(self, keys[4:], use_bias=False))

    def norm(self) -> LayerNorm:
        return LayerNorm.init(self.Embed, self.layer_norm_epsilon, use_bias=False)


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
