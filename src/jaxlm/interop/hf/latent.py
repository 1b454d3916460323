"""Keys of config.json and rows of weight tables that families with multi-head latent attention share."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.mtp import mtp_behind_layers
from jaxlm.interop.hf.shared_keys import activation, rope, size_keys
from jaxlm.interop.hf.weights import (
    BLOCK,
    Tensor,
    correction_bias,
    embeddings_and_head,
    expert_rows,
    gated_mlp,
    pre_norms,
    rows_by_stack,
    shared_expert_rows,
    single,
)


def latent_keys(
    *,
    length: int,
    sizes: tuple[int | None, int, int, int, int],
    eps: float = 1e-6,
    rotary: KeyGroup | None = None,
    whole_head: bool = False,
) -> tuple[JsonKey | FixedKey | KeyGroup, ...]:
    """The keys of `LatentConfig`, by the names of DeepSeek-V2, and the usual ones.

    Args:
        length, sizes, eps: defaults for keys that are missing; `sizes` are those of the latents of queries and of keys, of
            keys without and with rotation, and of values.
        rotary: the rotary embedding; None for the usual one.
        whole_head: `head_dim` counts all features of a key, not only those that are rotated.
    """
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return (
        *size_keys(length=length, width=None, eps_default=eps),
        *(JsonKey(name, name, size) for name, size in zip(names, sizes, strict=True)),
        JsonKey("rope_interleave", "rope_interleave", True, bool),
        JsonKey("attention_bias", "attention_bias", False),
        FixedKey("attention_dropout", 0.0),
        _derived_sizes(sizes[2], sizes[3], whole_head=whole_head),
        _with_factor_of_scores(rope() if rotary is None else rotary),
        activation("hidden_act", "silu"),
    )


def _derived_sizes(plain: int, rotated: int, *, whole_head: bool) -> KeyGroup:
    """Sizes that follow from others: transformers computes with no other. Args: as `sizes` of `latent_keys`."""

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        features = theirs.get("qk_rope_head_dim", rotated)
        both = theirs.get("qk_nope_head_dim", plain) + features
        expected = {"num_key_value_heads": theirs["num_attention_heads"], "qk_head_dim": both}
        expected["head_dim"] = both if whole_head else features
        for name, size in expected.items():
            if theirs.get(name) not in (None, size):
                raise ConfigError(f"{name}: {theirs[name]} given, {size} expected")
        return {}

    names = ("num_key_value_heads", "qk_head_dim", "head_dim")
    return KeyGroup(names, to_ours, lambda config: {"num_key_value_heads": config.num_heads})


def _with_factor_of_scores(rotary: KeyGroup) -> KeyGroup:
    """A rotary embedding whose `mscale_all_dim` is a factor of the scores, whatever else there is."""

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        settings = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
        factor = settings.get("mscale_all_dim")
        if factor and not settings.get("mscale") and settings.get("rope_type", settings.get("type")) == "yarn":
            raise ConfigError(f"rope_scaling.mscale_all_dim: {factor} given without mscale, which is not supported")
        return rotary.to_ours(theirs)

    return KeyGroup(rotary.theirs, to_ours, rotary.to_theirs, rotary.notes)


def latent_rows(config: Any) -> Iterator[Tensor]:
    """The projections of attention and the norms of latents."""

    def linear(name: str, layout: str, *, biased: bool = False) -> Iterator[Tensor]:
        theirs, ours = f"model.layers.{{layer}}.self_attn.{name}", f"{BLOCK}attn.{name}"
        yield single(f"{theirs}.weight", f"{ours}.weight", layout)
        if biased and config.attention_bias:
            yield single(f"{theirs}.bias", f"{ours}.bias", layout.partition(" |")[0])

    def norm(name: str, features: str) -> Tensor:
        theirs = f"model.layers.{{layer}}.self_attn.{name}_layernorm.weight"
        return single(theirs, f"{BLOCK}attn.{name}_norm.weight", features)

    if config.q_lora_rank is None:
        yield from linear("q_proj", "heads head_size | embed")
    else:
        yield from linear("q_a_proj", "query_latent | embed", biased=True)
        yield norm("q_a", "query_latent")
        yield from linear("q_b_proj", "heads head_size | query_latent")
    yield from linear("kv_a_proj_with_mqa", "latent_key | embed", biased=True)
    yield norm("kv_a", "latent")
    yield from linear("kv_b_proj", "heads head_size | latent")
    yield from linear("o_proj", "embed | heads head_size", biased=True)


def balanced_expert_rows() -> tuple[Tensor, ...]:
    """A router with a correction bias, and its experts."""
    return (*expert_rows(), correction_bias("mlp.gate"))


def latent_moe_tensors(config: Any, experts: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The table of a family with experts by the names of DeepSeek-V3. Args: experts: rows of the router and its experts."""
    attention = (*pre_norms(), *latent_rows(config))
    experts = (*experts, *shared_expert_rows("shared_experts", gate=False))
    return (
        *rows_by_stack(
            config,
            embeddings_and_head(config),
            experts=(*attention, *experts),
            dense=(*attention, *gated_mlp()),
        ),
        *mtp_behind_layers(config, (*attention, *experts)),
    )
