"""GPT-2: config.json keys and weight names. Its linear weights are stored as {in, out}."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import Family, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import activation
from jaxlm.interop.hf.weights import BLOCK, HEADS, Tensor, fused, single
from jaxlm.models.families.gpt2 import Gpt2Config

_LAYER = "transformer.h.{layer}."
_SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")  # keys of a classification head


def _tensors(config: Gpt2Config) -> Iterator[Tensor]:
    if not config.use_bias:
        raise ConfigError("model.use_bias: false given, but GPT-2 in Hugging Face format always has biases")
    yield single("transformer.wte.weight", "tokens.weight", "vocab | embed")
    yield single("transformer.wpe.weight", "positions.weight", "position | embed")
    if not config.tie_word_embeddings:
        yield single("lm_head.weight", "head.weight", "vocab | embed")
    norms = {f"{_LAYER}ln_1": f"{BLOCK}attn_norm", f"{_LAYER}ln_2": f"{BLOCK}mlp_norm"}
    for theirs, ours in {"transformer.ln_f": "body.final_norm", **norms}.items():
        for part in ("weight", "bias"):
            yield single(f"{theirs}.{part}", f"{ours}.{part}", "embed")
    weights = {f"{BLOCK}attn.{name}.weight": f"embed | {out}" for name, out in HEADS.items()}
    yield fused(f"{_LAYER}attn.c_attn.weight", weights, along=1)
    yield fused(f"{_LAYER}attn.c_attn.bias", {f"{BLOCK}attn.{name}.bias": out for name, out in HEADS.items()})
    maps = {
        "attn.c_proj": ("attn.o_proj", "heads head_size", "embed"),
        "mlp.c_fc": ("mlp.up_proj", "embed", "mlp"),
        "mlp.c_proj": ("mlp.down_proj", "mlp", "embed"),
    }
    for theirs, (ours, inputs, outputs) in maps.items():
        yield single(f"{_LAYER}{theirs}.weight", f"{BLOCK}{ours}.weight", f"{inputs} | {outputs}")
        yield single(f"{_LAYER}{theirs}.bias", f"{BLOCK}{ours}.bias", outputs)


def _inner_to_ours(theirs: Mapping[str, Any]) -> Json:
    width, embed = theirs.get("n_inner"), theirs["n_embd"]
    if width is not None and width % embed:
        return {"intermediate_dim": width}
    return {"mlp_scale": 4 if width is None else width // embed}


def _inner_to_theirs(config: Gpt2Config) -> Json:
    return {"n_inner": None if config.Mlp.size == 4 * config.hidden_dim else config.Mlp.size}


FAMILY = Family(
    model_types=("gpt2",),
    architecture="GPT2LMHeadModel",
    config=Gpt2Config,
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    keys=(
        JsonKey("n_positions", "seq_len", 1024),
        JsonKey("n_embd", "hidden_dim", 768),
        JsonKey("n_layer", "num_layers", 12),
        JsonKey("n_head", "num_heads", 12),
        KeyGroup(("n_inner",), _inner_to_ours, _inner_to_theirs),
        activation("activation_function", "gelu_new"),
        JsonKey("embd_pdrop", "embed_pdrop", 0.1),
        JsonKey("resid_pdrop", "resid_pdrop", 0.1),
        JsonKey("attn_pdrop", "attn_pdrop", 0.1),
        JsonKey("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
        JsonKey("initializer_range", "initializer_range", 0.02),
        JsonKey("scale_attn_by_inverse_layer_idx", "scale_attn_by_inverse_layer_idx", False),
        JsonKey("reorder_and_upcast_attn", "upcast_attn", False),
        JsonKey("scale_attn_weights", "scale_attn_weights", True),
        JsonKey("tie_word_embeddings", "tie_word_embeddings", True),
        KeyGroup(("n_ctx", *(f"summary_{x}" for x in _SUMMARY)), lambda _: {}, lambda _: {}),
    ),
    tensors=lambda config: tuple(_tensors(config)),
    prefix="transformer.",
    unused=(r"attn\.(masked_)?bias$",),
    respelled=("mlp_scale", "intermediate_dim"),
)
