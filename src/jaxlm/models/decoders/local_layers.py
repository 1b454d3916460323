"""Which layers of a family are local, that is, have a sliding window."""

from collections.abc import Collection, Sequence
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.models.decoder import renumbered
from jaxlm.models.stacks import LayerKind


def local_kinds(
    local_kind: LayerKind, global_kind: LayerKind, local: Collection[int], num_layers: int
) -> tuple[LayerKind, ...]:
    """The kind of each layer. Args: local: numbers of the local layers."""
    return tuple(local_kind if layer in local else global_kind for layer in range(num_layers))


def pattern_kinds(config: Any, local_kind: LayerKind, global_kind: LayerKind) -> tuple[LayerKind, ...]:
    """The kinds of layers by `local_layers`, or by `sliding_window_pattern`: the last of each group is global."""
    every, local, num_layers = config.sliding_window_pattern, config.local_layers, config.num_layers
    if local is None:
        local = [layer for layer in range(num_layers) if (layer + 1) % every]
    return local_kinds(local_kind, global_kind, local, num_layers)


def pattern_keys(config: Any, kept: Sequence[int]) -> dict[str, Any]:
    """The same two keys for a model with only these layers: the pattern if they still follow it, their numbers otherwise."""
    every, num_layers = config.sliding_window_pattern, config.num_layers
    if every is None:
        return {"local_layers": list(renumbered(config.local_layers, kept))}
    local = renumbered([layer for layer in range(num_layers) if (layer + 1) % every], kept)
    if local == tuple(layer for layer in range(len(kept)) if (layer + 1) % every):
        return {}
    return {"sliding_window_pattern": None, "local_layers": list(local)}


def check_pattern(config: Any) -> None:
    """Raises `ConfigError` unless exactly one of `sliding_window_pattern` and a valid `local_layers` is set."""
    every, local = config.sliding_window_pattern, config.local_layers
    if (every is None) == (local is None):
        raise ConfigError(
            f"model.local_layers: {'null' if local is None else list(local)} given, and sliding_window_pattern:"
            f" {'null' if every is None else every}. Set one of the two, and the other to null"
        )
    check_layer_numbers("model.local_layers", local or (), config.num_layers)


def check_local_layers(config: Any) -> None:
    """Raises `ConfigError` for a `local_layers` that is invalid, or that no `sliding_window` applies to."""
    if config.local_layers is None:
        return
    check_layer_numbers("model.local_layers", config.local_layers, config.num_layers)
    if config.sliding_window is None:
        raise ConfigError(
            f"model.local_layers: {list(config.local_layers)} given, but sliding_window is null. Set it, or remove"
            " local_layers"
        )


def check_layer_numbers(key: str, layers: Sequence[int], num_layers: int) -> None:
    """Raises `ConfigError` if these are not numbers of layers, each at most once."""
    if any(layer >= num_layers for layer in layers) or len(set(layers)) < len(layers):
        raise ConfigError(
            f"{key}: {list(layers)} given, different numbers from 0 to {num_layers - 1} expected (num_layers - 1)"
        )
