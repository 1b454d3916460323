"""Keys of config.json of families whose experts form groups, by the names of DeepSeek-V3."""

from collections.abc import Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import FixedKey, Json, JsonKey, KeyGroup, unfollowed


def correction_bias() -> KeyGroup:
    """The bias of a router stays as it is read: its step is not in the files, and is 0 for a model that has been trained."""
    return KeyGroup((), lambda theirs: {"router_bias_step": 0.0}, lambda config: {})


def further_layers() -> KeyGroup:
    """The number of layers that predict more tokens. Those of a source that the model does not have stay in its exports, and
    so does this key."""
    return KeyGroup(("num_mtp_layers",), lambda theirs: {}, lambda config: {"num_mtp_layers": int(config.mtp)})


def balanced_experts(**defaults: Any) -> tuple[JsonKey | FixedKey | KeyGroup, ...]:
    """The keys of `BalancedMoeConfig`. Args: defaults: as of `grouped_experts`."""
    return (
        *grouped_experts(**defaults),
        correction_bias(),
        FixedKey("scoring_func", "sigmoid"),
        FixedKey("topk_method", "noaux_tc"),
    )


def grouped_experts(
    *,
    width: int,
    dense_width: int,
    num_experts: int,
    chosen: int,
    num_dense: int,
    groups: int = 1,
    groups_chosen: int = 1,
    scale: float = 1.0,
    lists_layers: bool = False,
) -> tuple[JsonKey | FixedKey | KeyGroup, ...]:
    """The keys of `GroupedMoeConfig`.

    Args:
        width, dense_width, num_experts, chosen, num_dense, groups, groups_chosen, scale: defaults for keys that are missing.
        lists_layers: whether transformers reads `mlp_layer_types` instead of `first_k_dense_replace`.
    """
    first_dense, listed = "first_k_dense_replace", "mlp_layer_types"

    def dense_layers(theirs: Mapping[str, Any]) -> list[int]:
        num_layers = theirs["num_hidden_layers"]
        first = num_dense if lists_layers else theirs.get(first_dense, num_dense)
        types = theirs.get(listed) if lists_layers else None
        if types is None:
            return list(range(min(first, num_layers)))
        if len(types) != num_layers or not {*types} <= {"dense", "sparse"}:
            raise ConfigError(f"{listed}: {types} given; dense or sparse expected for each of {num_layers} layers")
        return [layer for layer, kind in enumerate(types) if kind == "dense"]

    def sizes_to_ours(theirs: Mapping[str, Any]) -> Json:
        dense, expert_width = dense_layers(theirs), theirs.get("moe_intermediate_size", width)
        return {
            "mlp_only_layers": dense,
            "intermediate_dim": expert_width,
            "shared_expert_intermediate_dim": theirs.get("n_shared_experts", 1) * expert_width,
            "dense_intermediate_dim": theirs.get("intermediate_size", dense_width) if dense else None,
        }

    def notes(theirs: Mapping[str, Any]) -> list[str]:
        dense = dense_layers(theirs)
        why = f"transformers follows {listed}: layers {dense} are dense"
        return unfollowed(theirs, [first_dense], len(dense), why) if lists_layers else []

    def sizes_to_theirs(config: Any) -> Json:
        num_shared, rest = divmod(config.shared_expert_intermediate_dim, config.intermediate_dim)
        if rest:
            raise ConfigError(
                f"model.shared_expert_intermediate_dim: {config.shared_expert_intermediate_dim} given, a multiple of"
                f" model.intermediate_dim ({config.intermediate_dim}) expected: config.json has the number of shared experts"
            )
        dense = config.dense_layers
        types = ["dense" if layer in dense else "sparse" for layer in range(config.num_layers)]
        return {
            first_dense: len(dense),
            **({listed: types} if lists_layers else {}),
            "moe_intermediate_size": config.intermediate_dim,
            "n_shared_experts": num_shared,
            "intermediate_size": config.dense_intermediate_dim or config.intermediate_dim,
        }

    sizes = (first_dense, listed, "moe_intermediate_size", "n_shared_experts", "intermediate_size")
    return (
        KeyGroup(sizes, sizes_to_ours, sizes_to_theirs, notes),
        JsonKey("n_routed_experts", "num_experts", num_experts),
        JsonKey("num_experts_per_tok", "num_experts_per_token", chosen),
        JsonKey("norm_topk_prob", "norm_topk_prob", True),
        JsonKey("routed_scaling_factor", "routed_scaling_factor", scale),
        JsonKey("n_group", "num_expert_groups", groups),
        JsonKey("topk_group", "num_groups_per_token", groups_chosen),
        JsonKey("router_aux_loss_coef", "router_aux_loss_coef", 0.0),
        FixedKey("output_router_logits", False, others=(True,)),
    )
