"""SmolLM3: config.json keys and weight names."""

from collections.abc import Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import check_has_window, layer_types, local_layers, rope, usual_keys
from jaxlm.interop.hf.weights import usual_tensors
from jaxlm.models.families.smollm3 import SmolLm3Config

_EVERY = 4


def _rotated(num_layers: int, every: int) -> list[int]:
    """1 for layers with a rotary embedding, 0 for those without."""
    return [int((i + 1) % every != 0) for i in range(num_layers)]


def _layers_to_ours(theirs: Mapping[str, Any]) -> Json:
    num_layers, every = theirs["num_hidden_layers"], theirs.get("no_rope_layer_interval", _EVERY)
    no_rope_layers = theirs.get("no_rope_layers")
    rotated = _rotated(num_layers, every) if no_rope_layers is None else no_rope_layers
    if len(rotated) != num_layers or not set(rotated) <= {0, 1}:
        raise ConfigError(f"no_rope_layers: {rotated} given; 0 or 1 expected for each of {num_layers} layers")
    local, unrotated = local_layers(theirs), [layer for layer, one in enumerate(rotated) if not one]
    # The mask of listed layers has the window in any case.
    window = theirs.get("sliding_window") if local or theirs.get("use_sliding_window", False) else None
    if window is not None and local == unrotated:
        local = None
    check_has_window(local or [], window)
    every = rotated.index(0) + 1 if 0 in rotated else max(every, num_layers + 1)
    is_regular = list(rotated) == _rotated(num_layers, every)
    return {
        "no_rope_layer_interval": every if is_regular else None,
        "unrotated_layers": None if is_regular else unrotated,
        "sliding_window": window,
        "local_layers": local if window is not None else None,
    }


def _layers_to_theirs(config: SmolLm3Config) -> Json:
    rotated, window = [int(kind.rope is not None) for kind in config.kinds], config.sliding_window
    return {
        "no_rope_layer_interval": config.no_rope_layer_interval or _EVERY,
        "no_rope_layers": rotated,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": layer_types(config),
    }


_LAYERS = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types")

FAMILY = Family(
    model_types=("smollm3",),
    architecture="SmolLM3ForCausalLM",
    config=SmolLm3Config,
    keys=(
        *usual_keys(length=32768, tied=True, rotary=rope(2e6)),
        KeyGroup(_LAYERS, _layers_to_ours, _layers_to_theirs),
        JsonKey("attention_bias", "attention_bias", False),
        JsonKey("mlp_bias", "mlp_bias", False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(usual_tensors(config)),
    respelled=("no_rope_layer_interval", "unrotated_layers", "local_layers"),
)
