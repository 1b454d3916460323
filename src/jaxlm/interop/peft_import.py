"""A folder of PEFT with one LoRA adapter, read: the inverse of `jaxlm.interop.peft`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.axes import EXPERTS, LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.interop.family import family_of_config
from jaxlm.interop.peft import PREFIX
from jaxlm.interop.safetensors_file import SafetensorsFile
from jaxlm.interop.weights import Sizes, Tensor
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
        rank, alpha, rslora: as `LoraConfig` has them.
        a: path -> [layers, rank, in], without the first dimension where there is one for the whole model.
        b: path -> [layers, out, rank], likewise.
    """

    rank: int
    alpha: float
    rslora: bool
    a: Mapping[str, np.ndarray]
    b: Mapping[str, np.ndarray]


def read_adapters(folder: Path, config: ModelConfig, sizes: Sizes) -> ReadAdapters:
    """The adapters in a folder that PEFT, or `save_adapters`, has written for a model of this configuration.

    Args:
        sizes: of the model's axes.

    Raises:
        ConfigError: there are none, they are of another kind than plain LoRA, or they are not this model's.
    """
    settings = _settings(folder)
    file = SafetensorsFile(folder / _WEIGHTS)
    left = set(file.tensors)
    found: dict[str, dict[str, np.ndarray]] = {"A": {}, "B": {}}
    for tensor in family_of_config(config).tensors(config):
        names = _names_of(tensor, sizes)
        there = [name for name in names if f"{name}.lora_A.weight" in left]
        if not there:
            continue
        if len(there) < len(names):
            raise ConfigError(
                f"{folder}: adapters at {len(there)} of {len(names)} layers ({', '.join(there[:_MOST_SHOWN])}). Layers are"
                " one array here, so all of them or none can have one"
            )
        part, *others = tensor.parts
        if others:
            raise ConfigError(
                f"{folder}: the adapter at {there[0]} stands beside several parameters at once ("
                f"{', '.join(p.path for p in tensor.parts)}), which are apart here. Merge it in PEFT and import the"
                " whole model"
            )
        path = part.path.removesuffix(".weight")
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
        raise ConfigError(f"{folder / _WEIGHTS}: {nothing}. Is it an adapter of a model of this configuration?")
    return ReadAdapters(
        rank=int(settings["r"]),
        alpha=float(settings["lora_alpha"]),
        rslora=bool(settings.get("use_rslora")),
        a=found["A"],
        b=found["B"],
    )


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


def _names_of(tensor: Tensor, sizes: Sizes) -> list[str]:
    """Of the modules that a tensor is the weight of, one for each layer; none where it is not the weight of a linear map
    that takes an adapter: those of experts take none."""
    if not tensor.name.endswith(".weight") or EXPERTS in tensor.stacked:
        return []
    name = PREFIX + tensor.name.removesuffix(".weight")
    return [name.format(layer=layer) for layer in range(sizes[LAYERS])] if tensor.is_stacked else [name]
