"""The keys of config.json that say which layers have attention, and which keep a state of fixed size instead."""

from collections.abc import Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import Json, KeyGroup

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
