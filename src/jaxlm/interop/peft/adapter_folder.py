"""A PEFT folder: what adapter_config.json says, and the tensors of the adapters."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import read_json_object
from jaxlm.interop.hf.load import is_finite, is_floating
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo
from jaxlm.interop.peft.names import LINEAR, PREFIX, by_pattern

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MUST_BE = {"peft_type": ("LORA",), "bias": ("none", "all", "lora_only", None)}
# The options that are read here, or that say nothing about what the saved adapters compute. Any other one may.
_KNOWN = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_dropout", "modules_to_save"),
    *("ensure_weight_tying", "init_lora_weights", "fan_in_fan_out", "target_modules", "exclude_modules"),
    *(
        "target_parameters",
        "layers_to_transform",
        "layers_pattern",
        "task_type",
        "auto_mapping",
        "peft_version",
        "revision",
    ),
    *("base_model_name_or_path", "inference_mode", "runtime_config", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


# Of what is read here: whether a value is valid, and what is.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda value: type(value) is int and value > 0, "a positive integer"),
    "lora_alpha": (lambda value: _is_number(value) and value > 0, "a positive number"),
    "lora_dropout": (lambda value: value is None or (_is_number(value) and 0 <= value < 1), "a number in [0, 1)"),
    **dict.fromkeys(("modules_to_save", "target_parameters"), (_are_names, "a list of names or null")),
    **dict.fromkeys(
        ("use_rslora", "use_dora", "ensure_weight_tying"), (lambda v: v is None or type(v) is bool, "true or false")
    ),
}
# These initializations modify the base weights, and save the adapter relative to the modified weights.
_OTHER_BASES = ("pissa", "corda", "olora", "loftq", "lora_ga")


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads adapter_config.json. Raises `ConfigError` if it says that the adapters are not LoRA or DoRA of weights."""
    for name in (SETTINGS, WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: {name} not found. Use a folder that PEFT saved in safetensors format")
    settings = read_json_object(folder / SETTINGS)
    problems = [
        f"{key}: {settings.get(key)!r} given, {values[0]!r} expected"
        for key, values in _MUST_BE.items()
        if settings.get(key) not in values
    ]
    problems += [
        f"{key}: {value!r} given, null expected: jaxlm does not compute it"
        for key, value in settings.items()
        if value and key not in _KNOWN and key not in _MUST_BE
    ]
    initialization = settings.get("init_lora_weights")
    if isinstance(initialization, str) and initialization.startswith(_OTHER_BASES):
        problems.append(f"init_lora_weights: '{initialization}' also changes the base model")
    problems += [
        f"{key}: {settings.get(key)!r} given, {expected} expected"
        for key, (is_valid, expected) in _VALUES.items()
        if not is_valid(settings.get(key))
    ]
    for key, of_pattern in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        problems += _pattern_problems(key, settings.get(key) or {}, *_VALUES[of_pattern])
    if problems:
        raise ConfigError(
            f"{folder / SETTINGS}: only LoRA and DoRA of weights are supported:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nMerge the adapter in PEFT and import the merged model, or remove keys that change nothing"
        )
    return settings


def _pattern_problems(key: str, patterns: Any, is_valid: Callable[[Any], bool], expected: str) -> list[str]:
    if not isinstance(patterns, dict):
        return [f"{key}: {patterns!r} given, an object expected"]
    problems = []
    for pattern, value in patterns.items():
        if not is_valid(value):
            problems.append(f"{key}.{pattern}: {value!r} given, {expected} expected")
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(f"{key}: '{pattern}' is not a valid regular expression: {error}")
    return problems


@dataclass(frozen=True)
class AdapterFile:
    """What a folder says of its adapters.

    Attributes:
        path: of the file with the weights.
        tensors: in the file.
        settings: adapter_config.json.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    settings: Mapping[str, Any]

    def size(self, name: str, module: str, kind: tuple[str, str] = LINEAR, num_shared: int = 1) -> tuple[int, float]:
        """Rank and scale of an adapter.

        Args:
            name: by which patterns find it.
            module: the name of PEFT's module.
            num_shared: number of experts that share it.

        Raises:
            ConfigError: A or B is missing, has no numbers, or has another rank than adapter_config.json says.
        """
        a, b = (f"{PREFIX}{module}.{side}" for side in kind)
        if missing := [key for key in (a, b) if key not in self.tensors]:
            raise ConfigError(f"{self.path}: missing: {', '.join(missing)}")
        rank: int = by_pattern(self.settings.get("rank_pattern") or {}, name, self.settings["r"])
        alpha = by_pattern(self.settings.get("alpha_pattern") or {}, name, self.settings["lora_alpha"])
        for key, dim in ((a, 0), (b, 1)):
            info = self.tensors[key]
            if len(info.shape) != 2 or info.shape[dim] != rank * num_shared or not is_floating(info.dtype):
                of_experts = f" of {num_shared} experts" if num_shared > 1 else ""
                form = ["[rank, in]", "[out, rank]"][dim]
                raise ConfigError(
                    f"{self.path}: {key}: {info.dtype} {list(info.shape)} in the file, but numbers {form} with rank"
                    f" {rank}{of_experts} expected (r, rank_pattern in adapter_config.json). Check that the two files belong"
                    " together"
                )
        return rank, float(alpha) / rank ** (0.5 if self.settings.get("use_rslora") else 1)


def numbers(file: SafetensorsFile, name: str) -> np.ndarray:
    """A tensor of an adapter. Raises `ConfigError` if it has NaN or infinity."""
    array = file.view(name)
    if not is_finite(array):
        raise ConfigError(f"{file.where(name)} has NaN or infinity. Save the adapter again")
    return array


def fill(target: np.ndarray, array: np.ndarray, where: str) -> None:
    """Copies one layer's part of an adapter into that of all layers, which numpy would also broadcast.

    Raises:
        ConfigError: the shapes differ.
    """
    if target.shape != array.shape:
        raise ConfigError(
            f"{where}: shape {list(array.shape)}, but {list(target.shape)} expected, as other layers or experts have it."
            " Check that the adapter belongs to a model of this configuration"
        )
    target[...] = array
