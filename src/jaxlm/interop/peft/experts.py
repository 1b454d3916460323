"""Adapters of experts in PEFT's files.

transformers has the weights of all experts in a layer as two parameters, [experts, out, in]: gate and up as one, and down.
PEFT (`target_parameters`) has for each of them

    lora_A.weight [experts rank, in]    the ranks of an expert follow one another
    lora_B.weight [out, rank experts]   the experts take turns

Routers are parameters of their own, with adapters like those of linear layers.

If both parameters of a module have adapters, those of gate and up are in its `base_layer`. Older files have a module for
each matrix of each expert (`experts.0.gate_proj`), with adapters like those of other linear layers.

PEFT before 0.19 took the second dimension of a parameter for the inputs, if transformers does not store it so: A has the
outputs, and B the inputs. With A_e [rank, out] and B_e [in, rank] of an expert, the change is A_e^T B_e^T. If the two sizes
are equal, only the version tells the layout.

Source: `ParamWrapper` in PEFT 0.18.1, 0.19.1 and 0.21.2 (peft/tuners/lora/layer.py).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.axes import EMBED, EXPERTS, MLP
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.mtp import without_mtp
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.interop.hf.weights import Tensor
from jaxlm.interop.peft.adapter_folder import AdapterFile, fill, numbers
from jaxlm.interop.peft.names import (
    LINEAR,
    PREFIX,
    Arrays,
    AxisSizes,
    layers_of,
    weight_name,
)
from jaxlm.models.base import ModelConfig, as_family

VERSION = "0.19.0"
"""The first version of PEFT with the layout that is written here."""
_GATE, _UP, _DOWN = (f".{name}_proj.weight" for name in ("gate", "up", "down"))


def expert_tensors(config: ModelConfig, *, single: bool = False) -> list[Tensor]:
    """The parameters of transformers that have the weights of all experts in a layer; none without experts.

    Args:
        single: also the matrices of single experts, as older versions have them.
    """
    family = family_of_config(config)
    rows = [
        row
        for row in without_mtp(family.tensors(as_family(config)))
        if (EXPERTS in row.stacked or is_of_experts(row)) and row.parts[0].path.endswith((_GATE, _UP, _DOWN))
    ]
    by_path, tensors = {row.parts[0].path: row.parts[0] for row in rows}, []
    for row in rows:
        path = row.parts[0].path
        if path.endswith(_UP):
            continue
        name = f"{row.name.partition('{layer}')[0]}{{layer}}.{family.experts}."
        name += "gate_up_proj" if path.endswith(_GATE) else "down_proj"
        parts = row.parts
        if EXPERTS in row.stacked:
            parts += (by_path[path.removesuffix(_GATE) + _UP],) if path.endswith(_GATE) else ()
            parts = tuple(replace(part, dims=((EXPERTS,), *part.dims)) for part in parts)
            row = replace(row, along=1)
        tensors.append(replace(row, name=name, parts=parts))
    return tensors + ([row for row in rows if EXPERTS in row.stacked] if single else [])


def router_tensors(config: ModelConfig) -> list[Tensor]:
    """The weights of routers, as transformers has them: parameters too, unless it has linear layers for them."""
    family = family_of_config(config)
    rows = [row for row in family.tensors(as_family(config)) if row.parts[0].path.endswith(".router.weight")]
    named = ((row, f"{row.name.partition('{layer}')[0]}{{layer}}.{family.router}.weight") for row in rows)
    return [replace(row, name=name) for row, name in named] if family.router else []


def is_of_experts(tensor: Tensor) -> bool:
    """Tells whether a tensor has the weights of all experts in a layer."""
    return any(EXPERTS in dim for part in tensor.parts for dim in part.dims)


def of_one_expert(tensor: Tensor) -> Tensor:
    """The layout of one expert's matrix in a tensor of all."""
    parts = (replace(part, dims=part.dims[1:]) for part in tensor.parts)
    return replace(tensor, parts=tuple(parts), along=max(0, tensor.along - 1))


def packed(experts: Sequence[Arrays]) -> Arrays:
    """A and B of a parameter, from those of its experts."""
    a, b = (np.stack(arrays) for arrays in ([one.a for one in experts], [one.b for one in experts]))
    return Arrays(a.reshape(-1, a.shape[-1]), b.transpose(1, 2, 0).reshape(b.shape[1], -1))


def module_of(parameter: str, targeted: Collection[str]) -> str:
    """The name of PEFT's module for a parameter. Args: targeted: all parameters that have adapters."""
    module, _, name = parameter.rpartition(".")
    return f"{module}.base_layer" if name != "down_proj" and f"{module}.down_proj" in targeted else module


@dataclass(frozen=True)
class ExpertAdapters:
    """The adapters of a matrix that each expert has, in the layers that have them.

    Attributes:
        tensor: its layout.
        names: layer -> the names of PEFT's modules, one for each expert (None if it has no adapter), or one for all.
        ranks, scales: by layer.
        num_experts: of a layer.
        inputs_first: transformers stores the parameter as [experts, in, out].
    """

    tensor: Tensor
    names: Mapping[int | None, Sequence[str | None]]
    ranks: Mapping[int | None, int]
    scales: Mapping[int | None, float]
    num_experts: int
    inputs_first: bool
    kind: tuple[str, str] = LINEAR

    @property
    def is_packed(self) -> bool:
        """Tells whether the experts of a layer share one module."""
        return any(len(names) == 1 for names in self.names.values()) and self.num_experts > 1

    def stacked(self, file: SafetensorsFile, num_layers: int, unread: set[str], *, outputs_first: bool) -> Arrays:
        """Those of all experts of all layers [layers * experts, ...], filled up with zeros.

        Args:
            outputs_first: A has the outputs, and B the inputs (`has_outputs_first`).
        """
        layers, rank = layers_of(self.tensor, num_layers), max(self.ranks.values())
        whole: list[np.ndarray] = []
        for at, layer in enumerate(layers):
            for number, name in enumerate(self.names.get(layer, ())):
                if name is None:
                    continue
                keys = [f"{PREFIX}{name}.{side}" for side in LINEAR]
                unread.difference_update(keys)
                a, b = (numbers(file, key) for key in keys)
                a, b = self._unpacked(a, b, outputs_first) if self.is_packed else (a[None], b[None])
                if not whole:
                    shape = (len(layers), self.num_experts)
                    whole = [
                        np.zeros((*shape, rank, a.shape[2]), a.dtype),
                        np.zeros((*shape, b.shape[1], rank), b.dtype),
                    ]
                experts = slice(None) if self.is_packed else slice(number, number + 1)
                fill(whole[0][at, experts, : a.shape[1]], a, file.where(keys[0]))
                fill(whole[1][at, experts, :, : b.shape[2]], b, file.where(keys[1]))
        a, b = (array.reshape(-1, *array.shape[2:]) for array in whole)
        return Arrays(a, b)

    def _unpacked(self, a: np.ndarray, b: np.ndarray, outputs_first: bool) -> tuple[np.ndarray, np.ndarray]:
        """A [experts, rank, in] and B [experts, out, rank] from those of the file."""
        a, b = a.reshape(self.num_experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, self.num_experts)
        if outputs_first and not self.inputs_first:
            return b.transpose(2, 1, 0), a.transpose(0, 2, 1)
        return a, b.transpose(2, 0, 1)


def adapters_of_experts(
    config: ModelConfig,
    table: Sequence[Tensor],
    file: AdapterFile,
) -> list[ExpertAdapters]:
    """The adapters of experts in a file. Args: table: of `expert_tensors`, with the file's names."""
    num_layers: int = getattr(config, "num_layers")  # noqa: B009, all configs of families have it
    read = _Header(file, getattr(config, "num_experts", None) or 0)
    parameters = {tensor: read.parameters(tensor, num_layers) for tensor in table if is_of_experts(tensor)}
    targeted = {name for by_layer in parameters.values() for name in by_layer.values()}
    found = [read.of_parameter(tensor, by_layer, targeted) for tensor, by_layer in parameters.items()]
    found += [read.of_matrices(tensor, layers_of(tensor, num_layers)) for tensor in table if not is_of_experts(tensor)]
    if file.settings.get("use_dora") and any(adapters.names for adapters in found):
        raise ConfigError(
            f"{file.path}: use_dora: true given, which jaxlm does not compute for experts. Merge the adapter in PEFT and"
            " import the merged model"
        )
    return [adapters for adapters in found if adapters.names]


@dataclass(frozen=True)
class _Header:
    """What a folder says of its adapters without their values."""

    file: AdapterFile
    num_experts: int

    def parameters(self, tensor: Tensor, num_layers: int) -> dict[int | None, str]:
        """Layer -> the name of this parameter, for those that have adapters. Their names end like a target."""
        targets = tuple(f".{end}" for end in self.file.settings.get("target_parameters") or ())
        by_layer = {layer: weight_name(tensor, layer) for layer in layers_of(tensor, num_layers)}
        return {layer: name for layer, name in by_layer.items() if f".{name}".endswith(targets)}

    def of_parameter(
        self, tensor: Tensor, by_layer: Mapping[int | None, str], targeted: Collection[str]
    ) -> ExpertAdapters:
        modules = {layer: module_of(name, targeted) for layer, name in by_layer.items()}
        sizes = {
            layer: self.file.size(by_layer[layer], module, num_shared=self.num_experts)
            for layer, module in modules.items()
        }
        inputs = (MLP,) if tensor.parts[0].path.endswith(_DOWN) else (EMBED,)
        return self._adapters(
            of_one_expert(tensor),
            {layer: (module,) for layer, module in modules.items()},
            sizes,
            tensor.parts[0].dims[1] == inputs,
        )

    def of_matrices(self, tensor: Tensor, layers: Sequence[int | None]) -> ExpertAdapters:
        modules, sizes = {}, {}
        for layer in layers:
            every = [tensor.name.format(layer=layer, expert=expert) for expert in range(self.num_experts)]
            every = [name.removesuffix(".weight") for name in every]
            present = [name if f"{PREFIX}{name}.{LINEAR[0]}" in self.file.tensors else None for name in every]
            found = {self.file.size(name, name) for name in present if name is not None}
            if len(found) > 1:
                raise ConfigError(
                    f"{self.file.path}: the experts of {every[0]} have different ranks or alphas, but jaxlm has one size"
                    " for all experts of a layer. Merge the adapter in PEFT and import the merged model"
                )
            if found:
                modules[layer], (sizes[layer],) = present, found
        return self._adapters(tensor, modules, sizes)

    def _adapters(self, tensor: Tensor, modules: Any, sizes: Any, inputs_first: bool = False) -> ExpertAdapters:
        ranks, scales = ({layer: size[index] for layer, size in sizes.items()} for index in range(2))
        return ExpertAdapters(tensor, modules, ranks, scales, self.num_experts, inputs_first)


def has_outputs_first(
    experts: Sequence[ExpertAdapters],
    file: SafetensorsFile,
    sizes: AxisSizes,
    settings: Mapping[str, Any],
    folder: Path,
) -> bool:
    """Tells whether the adapters of experts are as PEFT before 0.19 wrote them: A has the outputs, and B the inputs.

    Raises:
        ConfigError: neither the shapes nor the version of PEFT tell it.
    """
    known, undecided = set(), []
    for adapters in experts:
        if not adapters.is_packed or adapters.inputs_first:
            continue
        own, parts = sizes.of(adapters.tensor), adapters.tensor.parts
        inputs, outputs = parts[0].shape(own)[1], sum(part.shape(own)[0] for part in parts)
        for (name,) in adapters.names.values():
            key_a, key_b = (f"{PREFIX}{name}.{side}" for side in LINEAR)
            found = file.tensors[key_a].shape[1], file.tensors[key_b].shape[0]
            if sorted(found) != sorted((inputs, outputs)):
                raise ConfigError(
                    f"{folder}: {name} maps {found[0]} features to {found[1]}, but {inputs} to {outputs} expected. Check"
                    " that the adapter belongs to a model of this configuration"
                )
            if inputs == outputs:
                undecided.append(name)
            else:
                known.add(found == (outputs, inputs))
    if len(known) == 1 or not undecided:
        return True in known
    version = settings.get("peft_version")
    if not isinstance(version, str) or not re.match(r"\d+\.\d+", version):
        raise ConfigError(
            f"{folder}: {undecided[0]} has as many inputs as outputs, and PEFT before {VERSION} wrote them in the other"
            " order. Set peft_version in adapter_config.json to the version of PEFT that wrote the file"
        )
    return tuple(map(int, version.split(".")[:2])) < tuple(map(int, VERSION.split(".")[:2]))
