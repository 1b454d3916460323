"""Gemma 4, alone or in a multimodal folder: config.json keys and weight names."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import (
    RESPELLED_WINDOWS,
    activation,
    head_dim,
    kv_heads,
    layer_ropes,
    size_keys,
    window_pattern,
)
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import (
    BLOCK,
    Tensor,
    attention,
    embeddings_and_head,
    fused,
    gated_mlp,
    in_stacks,
    qk_norms,
    sandwich_norms,
    single,
)
from jaxlm.models.families.gemma4 import Gemma4Config

_LAYER, _GLOBAL = "model.layers.{layer}.", "full_attention"
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def _rotations() -> KeyGroup:
    """The rotary embeddings of both kinds of layers. There are no older files with other keys."""
    usual = layer_ropes(theta=1e6, local_theta=10000.0)

    def read(theirs: Mapping[str, Any]) -> Json:
        length = theirs.get("max_position_embeddings")
        return {"rope_parameters": _ROPES | (theirs.get(_ROTATIONS) or {}), "max_position_embeddings": length}

    to_ours, notes = (lambda theirs: usual.to_ours(read(theirs))), (lambda theirs: usual.notes(read(theirs)))
    return KeyGroup((_ROTATIONS,), to_ours, usual.to_theirs, notes)


_ROTATIONS = "rope_parameters"


def _global_heads() -> KeyGroup:
    """The heads of global layers. transformers writes them as settings of single layers (`per_layer_config`)."""
    keys = ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config")

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        same = theirs.get("attention_k_eq_v", False)
        size, count = theirs.get("global_head_dim", 512), theirs.get("num_global_key_value_heads") if same else None
        if (by_layer := theirs.get("per_layer_config")) is not None:
            size, count = _of_layers(by_layer, theirs)
        return {"global_head_dim": size, "num_global_kv_heads": count, "keys_are_values": same}

    def to_theirs(config: Gemma4Config) -> Json:
        heads = {"global_head_dim": config.global_head_dim, "num_global_key_value_heads": config.num_global_kv_heads}
        return {**heads, "attention_k_eq_v": config.keys_are_values}

    return KeyGroup(keys, to_ours, to_theirs)


def _of_layers(by_layer: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[int, int | None]:
    """Head size and number of key/value heads of global layers, by the settings of single layers."""
    types = theirs["layer_types"]
    layers = {str(layer) for layer, kind in enumerate(types) if kind == _GLOBAL}
    settings = [by_layer[layer] for layer in sorted(by_layer)]
    if {str(layer) for layer in by_layer} != layers or any(one != settings[0] for one in settings):
        raise ConfigError(f"per_layer_config: {by_layer} given, the same keys for each layer of {_GLOBAL} expected")
    if unknown := sorted({*settings[0]} - {"head_dim", "num_key_value_heads"}):
        raise ConfigError(f"per_layer_config: {', '.join(unknown)} given; head_dim and num_key_value_heads expected")
    return settings[0].get("head_dim", theirs.get("head_dim", 256)), settings[0].get("num_key_value_heads")


def _experts() -> KeyGroup:
    """Experts, if there are any. transformers has no loss that balances them."""
    names = {"num_experts": "num_experts", "top_k_experts": "num_experts_per_token"}
    names |= {"moe_intermediate_size": "expert_dim"}

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        if not theirs.get("enable_moe_block", False):
            return {}
        balance = theirs.get("router_aux_loss_coef", 0.0)
        return {ours: theirs[key] for key, ours in names.items()} | {"router_aux_loss_coef": balance}

    def to_theirs(config: Gemma4Config) -> Json:
        on = config.num_experts is not None
        written = {key: getattr(config, ours) for key, ours in names.items()} | {"enable_moe_block": on}
        return {**written, "router_aux_loss_coef": config.router_aux_loss_coef} if on else written

    return KeyGroup((*names, "enable_moe_block", "router_aux_loss_coef"), to_ours, to_theirs)


def _layer_inputs() -> KeyGroup:
    """What each layer reads of the tokens besides the residual stream."""
    size, rows, vocab = "hidden_size_per_layer_input", "vocab_size_per_layer_input", "vocab_size"

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        features = theirs.get(size, 256) or None
        if features and (given := theirs.get(rows, 262144)) != theirs.get(vocab, given):
            raise ConfigError(f"{rows}: {given} given, {theirs[vocab]} expected, as {vocab}")
        return {"layer_input_dim": features}

    return KeyGroup((size, rows), to_ours, lambda config: {size: config.layer_input_dim or 0})


def _shared_layers() -> KeyGroup:
    """Layers with the keys and values of earlier ones. Without any, it does not say how wide their MLPs are."""
    count, wide = "num_kv_shared_layers", "use_double_wide_mlp"

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        num_shared = theirs.get(count, 0) or 0
        return {"num_kv_shared_layers": num_shared, "double_wide_mlp": bool(num_shared and theirs.get(wide, False))}

    def to_theirs(config: Gemma4Config) -> Json:
        return {count: config.num_kv_shared_layers, wide: config.double_wide_mlp}

    return KeyGroup((count, wide), to_ours, to_theirs)


def _tensors(config: Gemma4Config) -> Iterator[Tensor]:
    kinds = config.kinds

    def rows(layer: int) -> Iterator[Tensor]:
        without = {"v_proj"} if config.keys_are_values and kinds[layer].window is None else set()
        without = _UNUSED if kinds[layer].takes else without
        yield from sandwich_norms()
        yield from (row for row in (*attention(), *qk_norms()) if row.name.split(".")[-2] not in without)
        yield from gated_mlp()
        yield single(f"{_LAYER}layer_scalar", f"{BLOCK}layer_scalar", "")
        if config.num_experts is not None:
            yield from _expert_rows()
        if config.layer_input_dim is not None:
            yield from _layer_input_rows()

    return in_stacks(config, (*embeddings_and_head(config), *_table_rows(config)), rows)


def _table_rows(config: Gemma4Config) -> Iterator[Tensor]:
    if config.layer_input_dim is not None:
        yield single("model.embed_tokens_per_layer.weight", "layer_inputs.table", "vocab | layer_inputs")
        projection = "layer_inputs.projection.weight"
        yield single("model.per_layer_model_projection.weight", projection, "layer_inputs | embed")
        yield single("model.per_layer_projection_norm.weight", "layer_inputs.norm.weight", "layer_input")


def _layer_input_rows() -> Iterator[Tensor]:
    ours = f"{BLOCK}layer_input."
    yield single(f"{_LAYER}per_layer_input_gate.weight", f"{ours}input_gate.weight", "layer_input | embed")
    yield single(f"{_LAYER}per_layer_projection.weight", f"{ours}input_projection.weight", "embed | layer_input")
    yield single(f"{_LAYER}post_per_layer_input_norm.weight", f"{ours}post_norm.weight", "embed")


_UNUSED = {"k_proj", "v_proj", "k_norm"}
"""Of layers with the keys and values of earlier ones. Published files have them, and transformers ignores them."""


def _idle(config: Gemma4Config) -> list[str]:
    layers = "|".join(str(layer) for layer, kind in enumerate(config.kinds) if kind.takes)
    return [rf"(.*\.)?layers\.({layers})\.self_attn\.({'|'.join(sorted(_UNUSED))})\."] if layers else []


def _expert_rows() -> Iterator[Tensor]:
    beside = f"{BLOCK}beside."
    norms = {"mlp_post_norm": "post_feedforward_layernorm_1", "norm": "pre_feedforward_layernorm_2"}
    for ours, theirs in {**norms, "post_norm": "post_feedforward_layernorm_2"}.items():
        yield single(f"{_LAYER}{theirs}.weight", f"{beside}{ours}.weight", "embed")
    yield single(f"{_LAYER}router.scale", f"{beside}router_norm.weight", "embed")
    yield single(f"{_LAYER}router.proj.weight", f"{beside}experts.router.weight", "routes | embed")
    yield single(f"{_LAYER}router.per_expert_scale", f"{beside}experts.routing.expert_scale", "routes")
    gate_up = {f"{beside}experts.{name}_proj.weight": "experts | mlp | embed" for name in ("gate", "up")}
    yield fused(f"{_LAYER}experts.gate_up_proj", gate_up, along=1)
    yield single(f"{_LAYER}experts.down_proj", f"{beside}experts.down_proj.weight", "experts | embed | mlp")


FAMILY = Family(
    model_types=("gemma4_text",),
    architecture="Gemma4ForCausalLM",
    config=Gemma4Config,
    keys=(
        *size_keys(length=131072, tied=True),
        kv_heads(),
        head_dim(256),
        _global_heads(),
        activation("hidden_activation", "gelu_pytorch_tanh", written={"gelu_new": "gelu_pytorch_tanh"}),
        window_pattern(6, window=512),
        _rotations(),
        JsonKey("final_logit_softcapping", "final_soft_cap", None),
        _experts(),
        # Images are seen by their own tokens in both directions, text is not.
        FixedKey("use_bidirectional_attention", None, others=("vision",)),
        FixedKey("attention_bias", False),
        FixedKey("attention_dropout", 0.0),
        _layer_inputs(),
        _shared_layers(),
    ),
    tensors=lambda config: tuple(_tensors(config)),
    respelled=RESPELLED_WINDOWS,
    idle=_idle,
    experts="experts",
    router="",
    vocab_keys=("vocab_size", "vocab_size_per_layer_input"),
    text=(
        TextPart(
            ("gemma4",),
            ("gemma4_text", None),
            kept=(r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\.",),
        ),
    ),
)
