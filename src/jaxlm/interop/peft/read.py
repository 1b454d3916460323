"""Reads a PEFT folder with one LoRA adapter. The inverse of `jaxlm.interop.peft.write`."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import EXPERTS, LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.hub import local_folder
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.interop.hf.weights import Sizes, Tensor
from jaxlm.interop.json_object import read_json_object
from jaxlm.interop.peft.fused import FusedMatrix, Pair, module_path
from jaxlm.interop.peft.write import PREFIX
from jaxlm.models.base import LanguageModel, ModelConfig

_SETTINGS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Options that change anything other than adding scale * B A to a linear layer are not supported. They must have the value
# in _MUST_BE, or be unset or false.
_MUST_BE = {"peft_type": "LORA", "bias": "none"}
_MUST_BE_UNSET = (
    *("use_dora", "lora_bias", "alora_invocation_tokens", "use_qalora", "arrow_config", "use_bdlora", "velora_config"),
    *("layers_to_transform", "layer_replication", "modules_to_save"),
    *("target_parameters", "trainable_token_indices", "megatron_config"),
)
# These initializations modify the base weights, and save the adapter relative to the modified weights.
_OTHER_BASES = ("pissa", "corda", "olora", "loftq", "lora_ga")
_MAX_LISTED = 10


@dataclass(frozen=True)
class ReadAdapters:
    """Adapters of a folder, by path of the adapted module.

    Attributes:
        folder: where they were read from.
        keys: keys of the `lora` surgery that adds these adapters.
        a: path -> [layers, rank, in], without `layers` if the module is not in a layer.
        b: path -> [layers, out, rank], without `layers` if the module is not in a layer.
    """

    folder: Path
    keys: Mapping[str, Any]
    a: Mapping[str, np.ndarray]
    b: Mapping[str, np.ndarray]

    def leaves(self, model: LanguageModel) -> dict[str, np.ndarray]:
        """Leaf path -> value, for a concrete or abstract model that has these adapters.

        Raises:
            ConfigError: an array does not have the shape of its leaf.
        """
        leaves, values = dict(tree.leaves(model)), {}
        for side, arrays in (("a", self.a), ("b", self.b)):
            for module, array in arrays.items():
                axes = leaves[f"{module}.{side}"].axes
                shape = tuple(axis.size for axis in axes)
                if array.size != np.prod(shape) or array.shape[-1 if side == "b" else -2] != self.keys["rank"]:
                    raise ConfigError(
                        f"{self.folder}: lora_{side.upper()} of {module}: shape {list(array.shape)} in the file (layers"
                        f" first) does not match {dict(zip([axis.name for axis in axes], shape, strict=True))}"
                    )
                values[f"{module}.{side}"] = array.reshape(shape)
        return values


def peft_folder(name: str) -> Path:
    """Resolves `from_peft`, a path or a Hub name, to a local folder."""
    return local_folder(name, "surgery lora: from_peft", weights=True)


def read_adapters(folder: Path, config: ModelConfig, sizes: Sizes) -> ReadAdapters:
    """Reads the adapters that PEFT or `save_adapters` wrote for a model of this configuration.

    An adapter of a matrix that is several parameters in jaxlm becomes one for each of them.

    Args:
        sizes: axis sizes of the model.

    Raises:
        ConfigError: there are no adapters, they are not plain LoRA, or they do not belong to this model.
    """
    settings = _settings(folder, config)
    num_layers = sizes.get(LAYERS, 0)
    file = SafetensorsFile(folder / _WEIGHTS)
    unread = set(file.tensors)
    pairs: dict[str, Pair] = {}
    for tensor in family_of_config(config).tensors(config):
        names = _names_of(tensor, num_layers)
        adapted = [name for name in names if f"{name}.lora_A.weight" in unread]
        if not adapted:
            continue
        if len(adapted) < len(names):
            raise ConfigError(
                f"{folder}: adapters at {len(adapted)} of {len(names)} layers ({', '.join(adapted[:_MAX_LISTED])})."
                " jaxlm stacks all layers in one array, so either all layers or none must have an adapter"
            )
        keys = {side: [f"{name}.lora_{side}.weight" for name in names] for side in "AB"}
        missing = [key for key in (*keys["A"], *keys["B"]) if key not in unread]
        if missing:
            raise ConfigError(f"{folder / _WEIGHTS}: missing: {', '.join(missing[:_MAX_LISTED])}")
        unread -= {*keys["A"], *keys["B"]}
        a, b = (np.stack([file.view(key) for key in keys[side]]) for side in "AB")
        part, *others = tensor.parts
        if others:
            pairs |= dict(FusedMatrix(tensor, sizes).split(a, b, int(settings["r"])))
        else:
            pairs[module_path(part)] = (a, b) if tensor.is_stacked else (a[0], b[0])
    if unread or not pairs:
        listed = ", ".join(sorted(unread)[:_MAX_LISTED])
        raise _wrong_model(folder, f"{listed} belong to no layer of this model" if unread else "no adapters")
    a, b = ({path: pair[side] for path, pair in pairs.items()} for side in (0, 1))
    return ReadAdapters(folder, _lora_keys(settings, pairs), a=a, b=b)


def lora_keys(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The keys of the `lora` surgery that adds the adapters of a folder. Reads no weights.

    Raises:
        ConfigError: as `read_adapters`, but only the first layer is checked.
    """
    settings, names = _settings(folder, config), SafetensorsFile(folder / _WEIGHTS).tensors
    modules = [
        module_path(part)
        for tensor in family_of_config(config).tensors(config)
        for name in _names_of(tensor, num_layers=1)[:1]
        if f"{name}.lora_A.weight" in names
        for part in tensor.parts
    ]
    if not modules:
        raise _wrong_model(folder, "no adapters at the first layer")
    return _lora_keys(settings, modules)


def _lora_keys(settings: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    return {
        "target": f"^({'|'.join(map(re.escape, modules))})$",
        "rank": int(settings["r"]),
        "alpha": float(settings["lora_alpha"]),
        "dropout": float(settings.get("lora_dropout") or 0.0),
        "rslora": bool(settings.get("use_rslora")),
    }


def _wrong_model(folder: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{folder / _WEIGHTS}: {problem}. Check that the adapter belongs to a model of this configuration"
    )


def _settings(folder: Path, config: ModelConfig) -> dict[str, Any]:
    for name in (_SETTINGS, _WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: {name} not found. Use a folder that PEFT saved in safetensors format")
    settings = read_json_object(folder / _SETTINGS)
    problems = [
        f"{key}: {settings.get(key)!r} given, {value!r} expected"
        for key, value in _MUST_BE.items()
        if settings.get(key) != value
    ]
    problems += [f"{key}: {settings[key]!r} given, null expected" for key in _MUST_BE_UNSET if settings.get(key)]
    initialization = settings.get("init_lora_weights")
    if isinstance(initialization, str) and initialization.startswith(_OTHER_BASES):
        problems.append(f"init_lora_weights: '{initialization}' also changes the base model")
    for key in ("r", "lora_alpha"):
        value = settings.get(key)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            problems.append(f"{key}: {value!r} given, a positive number expected")
    problems += [] if problems else _pattern_problems(settings, config)
    if problems:
        raise ConfigError(
            f"{folder / _SETTINGS}: only plain LoRA is supported:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nMerge the adapter in PEFT and import the merged model"
        )
    return settings


def _pattern_problems(settings: Mapping[str, Any], config: ModelConfig) -> list[str]:
    """Problems of `rank_pattern` and `alpha_pattern`: only matrices of several parameters may have more ranks."""
    ranks, alphas = (settings.get(f"{key}_pattern") or {} for key in ("rank", "alpha"))
    tensors = family_of_config(config).tensors(config)
    fused = {tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in tensors if len(tensor.parts) > 1}
    power = 0.5 if settings.get("use_rslora") else 1.0

    def scale(module: str) -> float:
        return alphas.get(module, settings["lora_alpha"]) / ranks.get(module, settings["r"]) ** power

    usual = settings["lora_alpha"] / settings["r"] ** power
    wrong = [m for m in {**ranks, **alphas} if m not in fused or not math.isclose(scale(m), usual, rel_tol=1e-6)]
    if not wrong:
        return []
    given = f"rank_pattern: {ranks}, alpha_pattern: {alphas} given"
    return [f"{given}, but {', '.join(sorted(wrong))} must have the rank and scale of all"]


def _names_of(tensor: Tensor, num_layers: int) -> list[str]:
    """Names of the modules whose weight is `tensor`, one per layer.

    Empty if it is not the weight of a linear layer, or is the weight of an expert, which cannot have an adapter.
    """
    if EXPERTS in tensor.stacked or not tensor.name.endswith(".weight"):
        return []
    name = PREFIX + tensor.name.removesuffix(".weight")
    layers = range(num_layers) if tensor.numbers is None else tensor.numbers
    return [name.format(layer=layer) for layer in layers] if tensor.is_stacked else [name]
