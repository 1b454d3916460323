"""Keys of config.json and rows of weight tables that hybrid families share."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.mtp import qwen_mtp
from jaxlm.interop.hf.shared_keys import rope, router, usual_keys
from jaxlm.interop.hf.weights import (
    BLOCK,
    Tensor,
    attention,
    embeddings_and_head,
    fused,
    in_stacks,
    pre_norms,
    qk_norms,
    single,
)

_LINEAR, _GLOBAL = "linear_attention", "full_attention"


def hybrid_layers(default: int = 4) -> KeyGroup:
    """Returns the keys for which layers have attention. Args: default: the interval if there are none."""

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        num_layers, every = theirs["num_hidden_layers"], theirs.get("full_attention_interval", default)
        types = theirs.get("layer_types")
        if types is None:
            return {"attention_interval": every}
        if len(types) != num_layers or not {*types} <= {_LINEAR, _GLOBAL}:
            raise ConfigError(
                f"layer_types: {types} given; {_LINEAR} or {_GLOBAL} expected for each of {num_layers} layers"
            )
        listed = [layer for layer, kind in enumerate(types) if kind == _GLOBAL]
        first = listed[0] + 1 if listed else num_layers + 1
        if listed == list(range(first - 1, num_layers, first)):
            return {"attention_interval": first}
        return {"attention_interval": None, "attention_layers": listed}

    def to_theirs(config: Any) -> Json:
        types = [_GLOBAL if layer in config.with_attention else _LINEAR for layer in range(config.num_layers)]
        every = config.attention_interval
        return {"layer_types": types} | ({} if every is None else {"full_attention_interval": every})

    return KeyGroup(("layer_types", "full_attention_interval"), to_ours, to_theirs)


GDN = "model.layers.{layer}.linear_attn."
"""Path prefix of the recurrent layers' tensors."""
_HEADS = "state_heads state_group"
_KEYS, _VALUES = "state_heads state_key", f"{_HEADS} head_size"
OUTPUTS = {"q": _KEYS, "k": _KEYS, "v": _VALUES}
"""Output axes of their projections to queries, keys and values."""


def attention_tensors() -> Iterator[Tensor]:
    """Projections, of which that of the queries has the gate beside each head, and norms."""
    per_head = {f"{BLOCK}attn.{name}.weight": "heads | head_size | embed" for name in ("q_proj", "gate_proj")}
    yield fused("model.layers.{layer}.self_attn.q_proj.weight", per_head, along=1, merged=2)
    _, *others = attention()
    yield from others
    yield from qk_norms()


def separate_projections() -> Iterator[Tensor]:
    """The projections of recurrent layers: queries, keys and values as one matrix, the others alone."""
    parts = {f"{BLOCK}attn.{name}_proj.weight": f"{out} | embed" for name, out in OUTPUTS.items()}
    yield fused(f"{GDN}in_proj_qkv.weight", parts)
    for theirs, ours, out in (("z", "gate", _VALUES), ("b", "beta", _HEADS), ("a", "decay", _HEADS)):
        yield single(f"{GDN}in_proj_{theirs}.weight", f"{BLOCK}attn.{ours}_proj.weight", f"{out} | embed")


def state_tensors(norm: str, out: str) -> Iterator[Tensor]:
    """What recurrent layers of all families have. Args: norm, out: names of the norm and of the last projection."""
    yield single(f"{GDN}A_log", f"{BLOCK}attn.A_log", _HEADS)
    yield single(f"{GDN}dt_bias", f"{BLOCK}attn.dt_bias", _HEADS)
    yield single(f"{GDN}{norm}.weight", f"{BLOCK}attn.norm.weight", "head_size")
    yield single(f"{GDN}{out}.weight", f"{BLOCK}attn.o_proj.weight", f"embed | {_VALUES}")


def qwen_hybrid_keys() -> tuple[JsonKey | FixedKey | KeyGroup, ...]:
    """The keys of mixers in Qwen's hybrid families."""
    return (
        hybrid_layers(),
        JsonKey("linear_num_key_heads", "num_state_heads", 16),
        JsonKey("linear_num_value_heads", "num_value_heads", 32),
        JsonKey("linear_key_head_dim", "state_key_dim", 128),
        JsonKey("linear_value_head_dim", "state_value_dim", 128),
        JsonKey("linear_conv_kernel_dim", "conv_size", 4),
        FixedKey("attention_bias", False),
        FixedKey("attention_dropout", 0.0),
    )


def qwen3_5_keys() -> tuple[FixedKey | KeyGroup, ...]:
    """The keys of Qwen3.5 that others do not have."""
    return (
        FixedKey("attn_output_gate", True),
        # Of the norm's gate in recurrent layers, in 3.6 and 3.8. That of attention is a sigmoid all the same.
        FixedKey("output_gate_type", "swish", others=("silu",)),
        FixedKey("mamba_ssm_dtype", "float32"),
        # Layers of a source that the model does not have stay in its exports, and so do these keys.
        KeyGroup(
            ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
            lambda _: {},
            lambda config: {"mtp_num_hidden_layers": 1} if config.mtp else {},
        ),
    )


def qwen_hybrid_moe_keys(*, num_experts: int, chosen: int) -> tuple[JsonKey | FixedKey | KeyGroup, ...]:
    """The usual keys and those of experts. No layer has an MLP. Args: defaults for keys that are missing."""
    return (
        *usual_keys(length=32768, head=256, width=None, rotary=rope(partial=0.25, rotates_part=True)),
        JsonKey("moe_intermediate_size", "intermediate_dim", 512),
        JsonKey("shared_expert_intermediate_size", "shared_expert_intermediate_dim", 512),
        *router("num_experts", num_experts=num_experts, chosen=chosen),
        KeyGroup(("intermediate_size",), lambda _: {}, lambda config: {"intermediate_size": config.intermediate_dim}),
    )


def qwen_hybrid_tensors(
    config: Any,
    mlp: Iterable[Tensor],
    projections: Callable[[], Iterable[Tensor]] = separate_projections,
    mlp_of_mtp: Iterable[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """The table of Qwen's hybrid families.

    Args:
        mlp: rows of what follows each mixer.
        projections: rows of those of recurrent layers.
        mlp_of_mtp: rows of what follows the mixer of the MTP layer; None for `mlp`.
    """
    others = (*pre_norms(), *mlp)
    last = others if mlp_of_mtp is None else (*pre_norms(), *mlp_of_mtp)

    def recurrent() -> Iterator[Tensor]:
        yield from projections()
        filters = {f"{BLOCK}attn.{name}_conv": f"{out} | | conv_taps" for name, out in OUTPUTS.items()}
        yield fused(f"{GDN}conv1d.weight", filters)
        yield from state_tensors("norm", "out_proj")

    def rows(layer: int) -> tuple[Tensor, ...]:
        return (*others, *(attention_tensors() if layer in config.with_attention else recurrent()))

    stacks = in_stacks(config, embeddings_and_head(config), rows)
    return (*stacks, *qwen_mtp(config, (*last, *attention_tensors())))
