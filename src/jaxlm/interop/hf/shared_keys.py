"""Keys of config.json that several model families share."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import REQUIRED, FixedKey, Json, JsonKey, KeyGroup, unfollowed
from jaxlm.interop.hf.text_part import IN_SECTIONS, SECTIONS
from jaxlm.models.activations import ACTIVATIONS
from jaxlm.models.decoders.pre_norm import local_in_groups
from jaxlm.models.rope import (
    DefaultRotary,
    DynamicRotary,
    LinearRotary,
    Llama3Rotary,
    LongRotary,
    ProportionalRotary,
    RotaryConfig,
    YarnRotary,
    longrope_attention_factor,
)

# Hugging Face names of activation functions -> names in jaxlm, if they differ or several mean the same.
_SYNONYMS = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
_TYPES: dict[str, type[RotaryConfig]] = {
    "default": DefaultRotary,
    "proportional": ProportionalRotary,
    "linear": LinearRotary,
    "dynamic": DynamicRotary,
    "llama3": Llama3Rotary,
    "yarn": YarnRotary,
    "longrope": LongRotary,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}

_MSCALES = ("mscale", "mscale_all_dim")
_NOT_OF_TEXT = ("attention_scaling",)  # a key of frameworks that no text model uses
_ORIGINAL = "original_max_position_embeddings"
_STRETCHED = ("llama3", "yarn", "longrope")  # the types that read it
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Fields that transformers takes from the model's own keys.
_NOT_WRITTEN = {"dynamic": ("original_max_position_embeddings",)}


def activation(theirs: str, default: Any = REQUIRED, *, written: Mapping[str, str] | None = None) -> JsonKey:
    """The activation function.

    Args:
        written: names in jaxlm -> Hugging Face names to write, if the family uses another name.
    """

    def to_ours(name: str) -> str:
        ours = _SYNONYMS.get(name, name)
        if ours not in ACTIVATIONS:
            raise ConfigError(f"{theirs}: '{name}' given. Known: {', '.join((*ACTIVATIONS, *_SYNONYMS))}")
        return ours

    return JsonKey(theirs, "activation_function", default, to_ours, lambda ours: (written or {}).get(ours, ours))


def size_keys(
    *,
    length: int,
    width: str | None = "intermediate_size",
    eps: str | None = "rms_norm_eps",
    eps_default: float = 1e-6,
    tied: bool = False,
) -> tuple[JsonKey, ...]:
    """Model dimensions, by the names that most families use.

    Args:
        length, eps_default, tied: defaults for keys that are missing.
        width: name of the hidden width of MLPs; None if other keys say it.
        eps: name of the epsilon of norms; None if the files do not have it.
    """
    return (
        JsonKey("max_position_embeddings", "seq_len", length),
        JsonKey("hidden_size", "hidden_dim"),
        *(() if width is None else (JsonKey(width, "intermediate_dim"),)),
        JsonKey("num_hidden_layers", "num_layers"),
        JsonKey("num_attention_heads", "num_heads"),
        JsonKey("initializer_range", "initializer_range", 0.02),
        *(() if eps is None else (JsonKey(eps, "layer_norm_epsilon", eps_default),)),
        JsonKey("tie_word_embeddings", "tie_word_embeddings", tied),
    )


def kv_heads() -> KeyGroup:
    """The number of KV heads; by default the number of query heads."""

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        num_kv_heads = theirs.get("num_key_value_heads")
        return {"num_kv_heads": theirs.get("num_attention_heads") if num_kv_heads is None else num_kv_heads}

    return KeyGroup(("num_key_value_heads",), to_ours, lambda config: {"num_key_value_heads": config.KVHeads.size})


def router(
    theirs: str, *, num_experts: int, chosen: int, aux_loss_coef: float = 0.001
) -> tuple[JsonKey | FixedKey, ...]:
    """Experts and routing.

    Args:
        theirs: name of the number of experts.
        num_experts, chosen, aux_loss_coef: defaults for keys that are missing.
    """
    return (
        JsonKey(theirs, "num_experts", num_experts),
        JsonKey("num_experts_per_tok", "num_experts_per_token", chosen),
        JsonKey("router_aux_loss_coef", "router_aux_loss_coef", aux_loss_coef),
        FixedKey("output_router_logits", False, others=(True,)),  # affects the returned values, not the computation
    )


def head_dim(default: int | None = None) -> KeyGroup:
    """The head size.

    Args:
        default: value if the key is missing; None means hidden_size / num_attention_heads.
    """

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        head_size = theirs.get("head_dim", default)
        is_split = head_size is None or head_size * theirs["num_attention_heads"] == theirs["hidden_size"]
        return {"head_dim": None if is_split else head_size}

    return KeyGroup(("head_dim",), to_ours, lambda config: {"head_dim": config.HeadSize.size})


def rope(
    theta: float = 10000.0,
    *,
    partial: float = 1.0,
    theta_key: str = "rope_theta",
    partial_key: str = "partial_rotary_factor",
    rotates_part: bool = False,
    renamed: Mapping[str, str] | None = None,
    original: int | None = None,
    unset: Mapping[str, Any] | None = None,
    inside: Mapping[str, str | None] | None = None,
) -> KeyGroup:
    """Rotary position embedding. Reads `rope_parameters` (newer files), or `rope_theta` and `rope_scaling` (older files).
    Writes the older form.

    Args:
        theta, partial: defaults for keys that are missing.
        theta_key, partial_key: the family's names of these keys.
        rotates_part: whether transformers follows the partial factor without scaling. For other families it ignores it.
        renamed: type in the file -> the type that the family means by it.
        unset: the embedding's own keys in a file that has none of them; None means that nothing is scaled.
        inside: key among the embedding's own -> the field of the model config that it is; None for one that means nothing.
        original: default of `original_max_position_embeddings`, for a family that has it outside the rotary embedding's own
            keys. There it counts more than among them.
    """
    keys = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", theta_key, partial_key, _ORIGINAL)

    def parameters(theirs: Mapping[str, Any]) -> Json:
        settings = dict(theirs.get("rope_scaling") or theirs.get("rope_parameters") or unset or {})
        kind = _rope_type(settings)
        for key, name in (("rope_type", kind), ("type", settings.get("type"))):
            settings[key] = (renamed or {}).get(name or "", name)
        settings.setdefault("rope_theta", theirs.get(theta_key, theta))
        factor = theirs.get(partial_key)
        settings.setdefault("partial_rotary_factor", partial if factor is None else factor)
        return settings

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        lengths = theirs if original is None else {_ORIGINAL: original, **theirs}
        given = parameters(theirs)
        others = {ours: given.get(key, 0.0) for key, ours in (inside or {}).items() if ours is not None}
        settings, _ = _followed({k: v for k, v in given.items() if k not in (inside or {})}, rotates_part=rotates_part)
        return {"rope": rope_from_json(settings, lengths), **others}

    def notes(theirs: Mapping[str, Any]) -> list[str]:
        given, scaling = parameters(theirs), theirs.get("rope_scaling")
        _, unread = _followed(given, rotates_part=rotates_part)
        if scaling and theirs.get("rope_parameters"):
            unread += unfollowed(theirs, ["rope_parameters"], scaling, "transformers follows rope_scaling instead")
        if original is None and (kind := given["rope_type"]) not in _STRETCHED:
            unread += unfollowed(theirs, [_ORIGINAL], None, f"the type '{kind}' has no such key")
        for name, own_name in (("rope_theta", theta_key), ("partial_rotary_factor", partial_key)):
            why = f"transformers follows another key, which is {given[name]}"
            unread += unfollowed(theirs, sorted({name, own_name}), given[name], why)
        return unread

    def to_theirs(config: Any) -> Json:
        written = rope_to_json(config.rope)
        written |= {key: getattr(config, ours) for key, ours in (inside or {}).items() if ours is not None}
        plain = {theta_key: written.pop("rope_theta"), "rope_scaling": written if len(written) > 1 else None}
        if written.get("rope_type") == "dynamic":  # transformers scales from here
            plain["max_position_embeddings"] = config.rope.original_max_position_embeddings or config.seq_len
        factor = config.rope.partial_rotary_factor
        return plain if factor == partial and partial_key == "partial_rotary_factor" else {**plain, partial_key: factor}

    return KeyGroup(keys, to_ours, to_theirs, notes)


def usual_keys(
    *, length: int, head: int | None = None, rotary: KeyGroup | None = None, act: str = "silu", **sizes: Any
) -> tuple[JsonKey | KeyGroup, ...]:
    """The keys that most families have: dimensions, heads, the rotary embedding and the activation.

    Args:
        length, sizes: as in `size_keys`.
        head: as in `head_dim`.
        rotary: the rotary embedding; None for the usual one.
        act: default of the activation.
    """
    return (
        *size_keys(length=length, **sizes),
        kv_heads(),
        head_dim(head),
        rope() if rotary is None else rotary,
        activation("hidden_act", act, written={"gelu_new": act} if act in _SYNONYMS else None),
    )


def same_keys(**defaults: Any) -> tuple[JsonKey, ...]:
    """Keys that are called alike in config.json and here, with their values if they are missing."""
    return tuple(JsonKey(name, name, default) for name, default in defaults.items())


def use_bias(default: bool) -> KeyGroup:
    """One key for the biases of attention and MLP. Args: default: its value if it is missing."""

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        given = theirs.get("use_bias", default)
        return {"attention_bias": given, "mlp_bias": given}

    return KeyGroup(("use_bias",), to_ours, lambda config: {"use_bias": config.attention_bias})


def causality() -> KeyGroup:
    """Returns the key for causal attention. Only false is written, which transformers reads from version 5 on."""

    def to_theirs(config: Any) -> Json:
        return {} if config.is_causal else {_IS_CAUSAL: False}

    return KeyGroup(
        (_IS_CAUSAL,), lambda theirs: {"use_bidirectional_attention": theirs.get(_IS_CAUSAL) is False}, to_theirs
    )


_IS_CAUSAL = "is_causal"


def layer_ropes(*, theta: float, local_theta: float, local_key: str | None = None) -> KeyGroup:
    """Rotary position embeddings of global and local layers. Reads and writes `rope_parameters` by kind of layer; in older
    files, `rope_scaling` is that of global layers alone. If a file has both, transformers merges them.

    Args:
        theta, local_theta: defaults for keys that are missing.
        local_key: name of the theta of local layers in older files; None if the family had none.
    """

    def parameters(theirs: Mapping[str, Any]) -> dict[str, tuple[Json, list[str]]]:
        given = theirs.get("rope_parameters") or {}
        full: Json = dict(given.get(_GLOBAL) or {"rope_type": "default"}) | (theirs.get("rope_scaling") or {})
        sliding: Json = dict(given.get(_LOCAL) or {"rope_type": "default"})
        full.setdefault("rope_theta", theirs.get("rope_theta", theta))
        sliding.setdefault("rope_theta", theirs.get(local_key, local_theta) if local_key else local_theta)
        for rope in (full, sliding):
            rope.setdefault("partial_rotary_factor", theirs.get("partial_rotary_factor") or 1.0)
        return {kind: _followed(rope, given) for kind, rope in ((_GLOBAL, full), (_LOCAL, sliding))}

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        ropes, lengths = parameters(theirs), {**theirs, _ORIGINAL: None}  # each kind has its own
        return {
            "rope": rope_from_json(ropes[_GLOBAL][0], lengths),
            "local_rope": rope_from_json(ropes[_LOCAL][0], lengths),
        }

    def notes(theirs: Mapping[str, Any]) -> list[str]:
        ropes, given = parameters(theirs), theirs.get("rope_parameters") or {}
        unread = [f"{kind}: {note}" for kind, (_, notes) in ropes.items() for note in notes]
        unread += [
            f"rope_parameters.{key}: {given[key]}: transformers reads those of {_GLOBAL} and {_LOCAL}"
            for key in sorted(set(given) - {_GLOBAL, _LOCAL, "truncate"})
        ]
        unread += unfollowed(theirs, [_ORIGINAL], None, "transformers reads it only in rope_parameters")
        full, sliding = (ropes[kind][0]["rope_theta"] for kind in (_GLOBAL, _LOCAL))
        unread += unfollowed(theirs, ["rope_theta"], full, f"transformers follows the {full} of {_GLOBAL}")
        if local_key is None:
            return unread + unfollowed(theirs, ["rope_theta"], sliding, f"transformers follows it in {_GLOBAL} only")
        return unread + unfollowed(theirs, [local_key], sliding, f"transformers follows the {sliding} of {_LOCAL}")

    def to_theirs(config: Any) -> Json:
        ropes = {_GLOBAL: rope_to_json(config.rope), _LOCAL: rope_to_json(config.local_rope)}
        return {"rope_parameters": {**ropes, **{k: v for k, v in ropes[_GLOBAL].items() if k == "truncate" and not v}}}

    keys = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", _ORIGINAL)
    return KeyGroup((*keys, local_key) if local_key else keys, to_ours, to_theirs, notes)


def _followed(
    settings: Mapping[str, Any], outer: Mapping[str, Any] | None = None, *, rotates_part: bool = False
) -> tuple[Json, list[str]]:
    """Returns what transformers follows of one rotary embedding's parameters, and notes about the others.

    Args:
        outer: the object that has these parameters by kind of layer, where transformers looks for `truncate`.
        rotates_part: whether transformers follows the partial factor without scaling.
    """
    followed, unread = dict(settings), {}
    if (kind := _rope_type(settings)) == "default":
        read = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_NOT_OF_TEXT}
        unread = dict.fromkeys(sorted(set(settings) - read), f"the type '{kind}' has no such key")
        if not rotates_part and settings["partial_rotary_factor"] != 1.0:
            unread["partial_rotary_factor"] = "transformers rotates all features of this family's heads"
    if settings.get("type") not in (None, kind, IN_SECTIONS):
        unread["type"] = f"transformers follows rope_type, which is {kind}"
    if outer is not None and kind == "yarn":
        followed["truncate"] = outer.get("truncate", True)
        if settings.get("truncate", followed["truncate"]) != followed["truncate"]:
            unread["truncate"] = "transformers reads it beside the kinds of layers"
    if not all(map(settings.get, _MSCALES)):
        alone = [key for key in _MSCALES if settings.get(key) is not None]
        unread |= dict.fromkeys(alone, f"transformers reads it only with the other of {_MSCALES}")
    unread |= dict.fromkeys(SECTIONS & settings.keys(), "all sections have the same position in text")
    for key in unread:
        followed.pop(key) if key != "truncate" or kind == "default" else None
    followed.setdefault("partial_rotary_factor", 1.0)
    return followed, [f"{key}: {settings[key]}: {why}" for key, why in unread.items()]


def _rope_type(settings: Mapping[str, Any]) -> str:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    return "default" if kind == IN_SECTIONS else kind


def rope_from_json(settings: Mapping[str, Any], config: Mapping[str, Any]) -> RotaryConfig:
    """Converts `rope_parameters` to a rotary embedding config."""
    name = _rope_type(settings)
    rest = {key: value for key, value in settings.items() if key not in ("rope_type", "type")}
    if name not in _TYPES:
        raise ConfigError(f"rope_scaling: unknown type '{name}'. Known: {', '.join(_TYPES)}")
    fields: Json = {"theta": rest.pop("rope_theta"), "partial_rotary_factor": rest.pop("partial_rotary_factor")}
    original = rest.pop("original_max_position_embeddings", None)
    outside = config.get("original_max_position_embeddings")
    original = original if outside is None else outside
    if name == "yarn" and "factor" in rest and rest["factor"] is None and original is not None:
        rest["factor"] = config["max_position_embeddings"] / original
    for key in _REQUIRED.get(name, ()):
        if rest.get(key) is None:
            raise ConfigError(f"rope_scaling.{key}: missing; type '{name}' requires it")
    if name == "longrope":
        factor, max_length = rest.pop("factor", None), config["max_position_embeddings"]
        base = max_length if original is None else original
        stretched = max_length if factor is None else factor * base
        fields["max_position_embeddings"] = round(stretched)
        if not math.isclose(stretched, round(stretched), rel_tol=1e-12) and rest.get("attention_factor") is None:
            rest["attention_factor"] = longrope_attention_factor(stretched / base, base)
    if name == "dynamic":  # transformers scales from here, whatever else the file says
        fields["original_max_position_embeddings"] = config["max_position_embeddings"]
    if name in _STRETCHED:
        fields["original_max_position_embeddings"] = config["max_position_embeddings"] if original is None else original
    allowed = {f.name for f in dataclasses.fields(_TYPES[name])} - {*fields}
    for key in _NOT_OF_TEXT:
        if key in rest:
            raise ConfigError(
                f"rope_scaling.{key}: {rest[key]} given; only rotary embeddings with a single position can be imported"
            )
    unknown = sorted(set(rest) - allowed - {"finetuned"})
    if unknown:
        raise ConfigError(f"rope_scaling: unknown keys {', '.join(unknown)} for type '{name}'")
    return _TYPES[name](**fields, **{k: v for k, v in rest.items() if k in allowed and v is not None})


def rope_to_json(rope: RotaryConfig) -> Json:
    """Converts a rotary embedding config to `rope_parameters`, the inverse of `rope_from_json`."""
    fields: Json = {f.name: getattr(rope, f.name) for f in dataclasses.fields(rope)}
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items() if v is not None}
    name = _NAMES[type(rope)]
    if name == "longrope":  # the model's own length may be another one
        fields["factor"] = fields["max_position_embeddings"] / fields["original_max_position_embeddings"]
    beside = () if name == "proportional" else ("partial_rotary_factor",)
    for key in (*beside, "max_position_embeddings", *_NOT_WRITTEN.get(name, ())):
        fields.pop(key, None)
    return {"rope_type": name, "rope_theta": fields.pop("theta"), **fields}


def expert_layers(*, width: int, dense_width: int) -> KeyGroup:
    """Returns the keys for which layers have experts, and for the widths of these and of the MLPs of the others.

    Args:
        width, dense_width: defaults for keys that are missing.
    """
    keys = ("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "intermediate_size")

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        step, only = theirs.get("decoder_sparse_step", 1), theirs.get("mlp_only_layers") or []
        is_mixed = any(layer in only or (layer + 1) % step for layer in range(theirs["num_hidden_layers"]))
        return {
            "decoder_sparse_step": step,
            "mlp_only_layers": only,
            "intermediate_dim": theirs.get("moe_intermediate_size", width),
            "dense_intermediate_dim": theirs.get("intermediate_size", dense_width) if is_mixed else None,
        }

    def to_theirs(config: Any) -> Json:
        return {
            "decoder_sparse_step": config.decoder_sparse_step,
            "mlp_only_layers": list(config.mlp_only_layers),
            "moe_intermediate_size": config.intermediate_dim,
            "intermediate_size": config.dense_intermediate_dim or config.intermediate_dim,  # if there are none: unused
        }

    return KeyGroup(keys, to_ours, to_theirs)


def local_layers(theirs: Mapping[str, Any]) -> list[int] | None:
    """The numbers of the layers with a sliding window that `layer_types` lists; None if the file does not have it."""
    kinds, num_layers = theirs.get("layer_types"), theirs["num_hidden_layers"]
    if kinds is None:
        return None
    if len(kinds) != num_layers or not {*kinds} <= {_LOCAL, _GLOBAL}:
        raise ConfigError(f"layer_types: {kinds} given; {_LOCAL} or {_GLOBAL} expected for each of {num_layers} layers")
    return [layer for layer, kind in enumerate(kinds) if kind == _LOCAL]


def check_has_window(local: Sequence[int], window: int | None) -> None:
    """Raises `ConfigError` for local layers without a window."""
    if local and not window:
        raise ConfigError(f"layer_types: {_LOCAL} given, but no sliding window (use_sliding_window, sliding_window)")


def layer_types(config: Any) -> list[str]:
    """The value of `layer_types` for a model."""
    return [_GLOBAL if kind.window is None else _LOCAL for kind in config.kinds]


RESPELLED_WINDOWS = ("local_layers", "sliding_window_pattern", "max_window_layers")
"""Fields of the model config that say which layers are local. config.json lists the layers."""


def late_window(default_layers: int) -> KeyGroup:
    """Qwen's sliding window: in the layers that `layer_types` lists, or in those after the first `max_window_layers`; only
    if `use_sliding_window` is true."""
    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        window = theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window", False) else None
        first = theirs.get("max_window_layers", default_layers) if window is not None else 0
        num_layers, local = theirs["num_hidden_layers"], local_layers(theirs)
        if window is None or local is None or local == list(range(first, num_layers)):
            return {"sliding_window": window, "max_window_layers": first}
        if local == list(range(num_layers - len(local), num_layers)):
            return {"sliding_window": window, "max_window_layers": num_layers - len(local)}
        return {"sliding_window": window, "local_layers": local}

    def to_theirs(config: Any) -> Json:
        on = config.sliding_window is not None
        window = {"use_sliding_window": on, "sliding_window": config.sliding_window}
        if config.local_layers is not None:
            return {**window, "layer_types": layer_types(config)}
        return {**window, "max_window_layers": config.max_window_layers if on else config.num_layers}

    return KeyGroup(keys, to_ours, to_theirs, unused_window_notes)


def unused_window_notes(theirs: Mapping[str, Any]) -> list[str]:
    """Notes what a family ignores in `layer_types` because `use_sliding_window` decides for all layers."""
    off = not theirs.get("use_sliding_window", False) or theirs.get("sliding_window", 4096) is None
    return [f"layer_types: {_LOCAL}: use_sliding_window is not true"] if off and local_layers(theirs) else []


def window_pattern(
    default: int | None, *, window: int, key: str | None = None, first_is_global: bool = False
) -> KeyGroup:
    """Gemma's sliding windows: in the layers that `layer_types` lists, or in all but one of `default` layers.

    Args:
        default, window: defaults for the pattern and the window size if the keys are missing. Without a default pattern, all
            layers are local if there is a window.
        key: the key of the pattern, if transformers reads one for this family.
        first_is_global: which layer of each group has no window: the first one instead of the last one.
    """
    patterns = ("sliding_window_pattern", "_sliding_window_pattern")

    def every(theirs: Mapping[str, Any], pattern: int | str) -> list[int]:
        num_layers = theirs["num_hidden_layers"]
        if isinstance(pattern, str):  # L for local, G for global, repeated
            return [layer for layer in range(num_layers) if "GL".index(pattern[layer % len(pattern)])]
        return local_in_groups(num_layers, pattern, first_is_global=first_is_global)

    def local_of(theirs: Mapping[str, Any]) -> list[int]:
        local = local_layers(theirs)  # newer files list the layers, and may keep the old key
        if local is not None or theirs.get("sliding_window", window) is None:
            return local or []
        pattern = theirs.get(key or "") or default
        return list(range(theirs["num_hidden_layers"])) if pattern is None else every(theirs, pattern)

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        local, listed = local_of(theirs), theirs.get("layer_types") is not None
        globals_ = [layer for layer in range(theirs["num_hidden_layers"]) if layer not in local]
        pattern = default if listed else theirs.get(key or "") or default
        if globals_:
            pattern = (globals_[1:] or [pattern])[0] if first_is_global else globals_[0] + 1
        is_regular = isinstance(pattern, int) and local == every(theirs, pattern)
        return {
            "sliding_window": theirs.get("sliding_window", window),
            "sliding_window_pattern": pattern if is_regular else None,
            "local_layers": None if is_regular else local,
        }

    def notes(theirs: Mapping[str, Any]) -> list[str]:
        local = local_of(theirs)
        others = [name for name in patterns if theirs.get(name) and every(theirs, theirs[name]) != local]
        return [f"{name}: {theirs[name]}: transformers follows other layers: {local} are local" for name in others]

    def to_theirs(config: Any) -> Json:
        return {"sliding_window": config.sliding_window, "layer_types": layer_types(config)}

    return KeyGroup(("sliding_window", *patterns, "layer_types"), to_ours, to_theirs, notes)
