"""Translates Levanter's `lora` and `adapter` sections to a phase with a surgery of type `lora`."""

import re
from collections.abc import Mapping
from typing import Any

from jaxlm.interop.levanter.evals import Refuse

# Key in Levanter -> key of the surgery and Levanter's default.
_KEYS = {"r": ("rank", 8), "alpha": ("alpha", 8.0), "dropout": ("dropout", 0.0)}
_TARGETS = "target_modules"
# Key in Levanter -> the values that match what jaxlm does: B is zero at the start.
_SUPPORTED: dict[str, tuple[Any, ...]] = {"zero_init_b": (None, True), "type": ("lora",), "exclude_modules": (None, [])}
_ATTENTION = "q_proj|k_proj|v_proj"
# Module in the original model -> jaxlm's layers, which are not fused and have one name in all families.
_MODULES = {
    "Wqkv": _ATTENTION,
    "c_attn": _ATTENTION,
    "query_key_value": _ATTENTION,
    "qkv_proj": _ATTENTION,
    "out_proj": "o_proj",
    "c_proj": "o_proj|down_proj",
    "c_fc": "up_proj",
}


def lora_phases(section: Any, path: str, refuse: Refuse) -> list[dict[str, Any]]:
    """The only phase of a run that trains adapters, as a list of sections.

    Raises:
        ConfigError: the section has a key that surgeries of type `lora` do not support.
    """
    if not isinstance(section, Mapping):
        raise refuse(path, f"{section!r} given; a section expected, such as {{r: 8, alpha: 8.0}}")
    for key, value in section.items():
        if key not in (*_KEYS, _TARGETS) and value not in _SUPPORTED.get(key, (None,)):
            raise refuse(f"{path}.{key}", f"{value!r} given; surgeries of type lora do not support this Levanter key")
    keys = {new: section.get(old, default) for old, (new, default) in _KEYS.items()}
    surgery = {"type": "lora", "target": _target(section.get(_TARGETS), path, refuse), **keys}
    return [{"name": "lora", "surgery": [surgery], "trainable": [r"\.[ab]$"]}]


def _target(modules: Any, path: str, refuse: Refuse) -> str:
    """The regular expression for `target_modules`: a list of names, an expression, or null for all linear layers."""
    if modules is None:
        return "."
    if isinstance(modules, str):
        return modules
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise refuse(f"{path}.{_TARGETS}", f"{modules!r} given; names of layers or a regular expression expected")
    names: dict[str, None] = dict.fromkeys(_MODULES.get(str(name), re.escape(str(name))) for name in modules)
    return f"({'|'.join(names)})$"
