"""A folder of PEFT with one LoRA adapter, read: the inverse of `jaxlm.interop.peft.write`."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.axes import EXPERTS
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.interop.hf.weights import Tensor
from jaxlm.interop.peft.write import PREFIX
from jaxlm.models.base import ModelConfig

_SETTINGS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Whatever makes the adapter something else than scale * B A beside a linear layer that is otherwise as it was. What a key
# is without effect: its value, or one that counts as false.
_MUST_BE = {"peft_type": "LORA", "bias": "none"}
_MUST_BE_UNSET = (
    *("use_dora", "lora_bias", "alora_invocation_tokens", "use_qalora", "arrow_config", "use_bdlora", "velora_config"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication", "modules_to_save"),
    *("target_parameters", "trainable_token_indices", "megatron_config"),
)
# These begin from a base that is not the one on disk, and save the adapter relative to their own.
_OTHER_BASES = ("pissa", "corda", "olora", "loftq", "lora_ga")
_MOST_SHOWN = 10


@dataclass(frozen=True)
class ReadAdapters:
    """Adapters of a folder, by the paths of the modules that they stand beside.

    Attributes:
        keys: of the surgery `lora` that makes room for them.
        a: path -> [layers, rank, in], without the first dimension where there is one for the whole model.
        b: path -> [layers, out, rank], likewise.
    """

    keys: Mapping[str, Any]
    a: Mapping[str, np.ndarray]
    b: Mapping[str, np.ndarray]


def read_adapters(folder: Path, config: ModelConfig, num_layers: int) -> ReadAdapters:
    """The adapters in a folder that PEFT, or `save_adapters`, has written for a model of this configuration.

    Raises:
        ConfigError: there are none, they are of another kind than plain LoRA, or they are not this model's.
    """
    settings = _settings(folder)
    file = SafetensorsFile(folder / _WEIGHTS)
    left = set(file.tensors)
    found: dict[str, dict[str, np.ndarray]] = {"A": {}, "B": {}}
    for tensor in family_of_config(config).tensors(config):
        names = _names_of(tensor, num_layers)
        there = [name for name in names if f"{name}.lora_A.weight" in left]
        if not there:
            continue
        if len(there) < len(names):
            raise ConfigError(
                f"{folder}: adapters at {len(there)} of {len(names)} layers ({', '.join(there[:_MOST_SHOWN])}). Layers are"
                " one array here, so all of them or none can have one"
            )
        path = _module(tensor, there[0], folder)
        for side, arrays in found.items():
            keys = [f"{name}.lora_{side}.weight" for name in names]
            missing = [key for key in keys if key not in left]
            if missing:
                raise ConfigError(f"{folder / _WEIGHTS}: missing: {', '.join(missing[:_MOST_SHOWN])}")
            each = [file.view(key) for key in keys]
            arrays[path] = np.stack(each) if tensor.is_stacked else each[0]
            left -= set(keys)
    if left or not found["A"]:
        nothing = f"{', '.join(sorted(left)[:_MOST_SHOWN])} belong to no layer of this model" if left else "no adapters"
        raise _not_this_models(folder, nothing)
    return ReadAdapters(_lora_keys(settings, found["A"]), a=found["A"], b=found["B"])


def lora_keys(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The keys of the surgery `lora` that makes room for the adapters of a folder, which are not read themselves.

    Raises:
        ConfigError: see `read_adapters`, which looks at every layer.
    """
    settings, names = _settings(folder), SafetensorsFile(folder / _WEIGHTS).tensors
    modules = [
        _module(tensor, name, folder)
        for tensor in family_of_config(config).tensors(config)
        for name in _names_of(tensor, num_layers=1)
        if f"{name}.lora_A.weight" in names
    ]
    if not modules:
        raise _not_this_models(folder, "no adapters at the first layer")
    return _lora_keys(settings, modules)


def _lora_keys(settings: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    return {
        "target": f"^({'|'.join(map(re.escape, modules))})$",
        "rank": int(settings["r"]),
        "alpha": float(settings["lora_alpha"]),
        "dropout": float(settings.get("lora_dropout") or 0.0),
        "rslora": bool(settings.get("use_rslora")),
    }


def _module(tensor: Tensor, name: str, folder: Path) -> str:
    """The path of the module here whose weight a tensor is. Args: name: of the module there."""
    part, *others = tensor.parts
    if others:
        raise ConfigError(
            f"{folder}: the adapter at {name} stands beside several parameters at once ("
            f"{', '.join(p.path for p in tensor.parts)}), which are apart here. Merge it in PEFT and import the"
            " whole model"
        )
    return part.path.removesuffix(".weight")


def _not_this_models(folder: Path, found: str) -> ConfigError:
    return ConfigError(f"{folder / _WEIGHTS}: {found}. Is it an adapter of a model of this configuration?")


def _settings(folder: Path) -> dict[str, Any]:
    for name in (_SETTINGS, _WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: no {name} there. Give a folder that PEFT has written, with safetensors")
    try:
        settings = json.loads((folder / _SETTINGS).read_text())
    except ValueError as error:
        raise ConfigError(f"{folder / _SETTINGS} is not JSON: {error}") from error
    problems = [
        f"{key}: {settings.get(key)!r} given, {value!r} expected"
        for key, value in _MUST_BE.items()
        if settings.get(key) != value
    ]
    problems += [f"{key}: {settings[key]!r} given, null expected" for key in _MUST_BE_UNSET if settings.get(key)]
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(_OTHER_BASES):
        problems.append(f"init_lora_weights: '{begun}' changes the base model too")
    for key in ("r", "lora_alpha"):
        value = settings.get(key)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            problems.append(f"{key}: {value!r} given, a positive number expected")
    if problems:
        raise ConfigError(
            f"{folder / _SETTINGS}: only plain LoRA can be read:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nMerge it in PEFT and import the whole model"
        )
    return settings


def _names_of(tensor: Tensor, num_layers: int) -> list[str]:
    """Of the modules that a tensor is the weight of, one for each layer; none where it is not the weight of a linear map, or
    is that of an expert, beside which no adapter can stand."""
    if EXPERTS in tensor.stacked or not tensor.name.endswith(".weight"):
        return []
    name = PREFIX + tensor.name.removesuffix(".weight")
    return [name.format(layer=layer) for layer in range(num_layers)] if tensor.is_stacked else [name]
