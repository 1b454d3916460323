"""Exports LoRA adapters in PEFT format.

Source: PEFT's checkpoint format (github.com/huggingface/peft, docs/source/developer_guides/checkpoint.md):
`adapter_config.json`, and in `adapter_model.safetensors` for every layer `lora_A` {rank, in} and `lora_B` {out, rank}.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from haliax import NamedArray

from jaxlm.core.axes import LAYERS, LORA, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import Location, check_unused, publish_folder
from jaxlm.core.runtime import is_main_process
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.safetensors_file import TensorInfo, write_safetensors
from jaxlm.interop.hf.weights import Sizes, Tensor
from jaxlm.interop.peft.fused import FusedMatrix
from jaxlm.models.base import ModelConfig

PREFIX = "base_model.model."
"""Prefix of all module names in PEFT files."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that adds scale * b a to a linear layer.

    Attributes:
        path: path of the module, in a model with one stack of layers.
        layers: numbers of the layers in `a` and `b`; 0 alone if the matrix is not in a layer.
        a: {layers, lora_rank, *In}.
        b: {layers, *Out, lora_rank}.
        In, Out: input and output axes of the layer.
        scale: multiplier of the adapter's output.
        dropout: dropout probability of the input of `a` in training.
    """

    path: str
    layers: tuple[int, ...]
    a: NamedArray
    b: NamedArray
    In: Any
    Out: Any
    scale: float
    dropout: float = 0.0


def save_adapters(
    folder: Location,
    adapters: Sequence[Adapter],
    config: ModelConfig,
    num_layers: int,
    sizes: Sizes,
    layout: Layout,
    *,
    dtype: Any,
    base: str,
    files: Mapping[str, bytes],
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors. Every process must call this; process 0 writes.

    Args:
        num_layers: number of layers of the model.
        sizes: axis sizes of the model.
        base: name of the base model, for adapter_config.json.
        files: additional files to write, such as the model card.

    Raises:
        ConfigError: the adapters have different ranks, scales or dropouts, or are in different layers.
    """
    check_unused(folder, "adapter_config.json")
    owners = {part.path: tensor for tensor in family_of_config(config).tensors(config) for part in tensor.parts}
    settings, some_layers = _common_settings(adapters), _some_layers(adapters, owners, num_layers)
    groups: dict[tuple[str, tuple[int, ...]], list[Adapter]] = {}
    for adapter in adapters:
        groups.setdefault((owners[f"{adapter.path}.weight"].name, adapter.layers), []).append(adapter)
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for group in groups.values():
        owner = owners[f"{group[0].path}.weight"]
        ranks[owner.name.removesuffix(".weight").rpartition(".")[2]] = settings["r"] * len(group)
        tensors |= dict(_tensors(group, owner, sizes, layout, dtype))
    if not is_main_process():
        return
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **settings,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(ranks),
        **_patterns(ranks, settings),
        **({"layers_to_transform": some_layers} if some_layers else {}),
    }
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in tensors.items()}
    with publish_folder(folder, "adapter_config.json") as unfinished:
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        (unfinished / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
        write_safetensors(unfinished / "adapter_model.safetensors", infos, tensors.values())


def _common_settings(adapters: Sequence[Adapter]) -> dict[str, Any]:
    """The keys of adapter_config.json that all adapters share. Raises `ConfigError` if they differ."""
    ranks = {adapter.a.axis_size(LORA) for adapter in adapters}
    scales = {adapter.scale for adapter in adapters}
    dropouts = {adapter.dropout for adapter in adapters}
    if max(map(len, (ranks, scales, dropouts))) > 1:
        raise ConfigError(
            f"adapters with different ranks ({sorted(ranks)}), scales ({sorted(scales)}) or dropouts ({sorted(dropouts)})"
            " cannot be exported as one PEFT adapter. Export the merged model: --adapters merge"
        )
    (rank,), (scale,), (dropout,) = ranks, scales, dropouts
    return {"r": rank, "lora_alpha": scale * rank, "lora_dropout": dropout}


def _some_layers(adapters: Sequence[Adapter], owners: Mapping[str, Tensor], num_layers: int) -> list[int]:
    """The numbers of the layers that have adapters; none if all do, or all that have the adapted modules.

    Raises:
        ConfigError: they differ between modules.
    """
    adapted: dict[str, set[int]] = {}
    for adapter in adapters:
        owner = owners[f"{adapter.path}.weight"]
        if owner.is_stacked:
            adapted.setdefault(owner.name, set()).update(adapter.layers)
    having: dict[str, set[int]] = {name: set() for name in adapted}
    for owner in owners.values():
        if owner.name in having:
            having[owner.name] |= {*(range(num_layers) if owner.numbers is None else owner.numbers)}
    if adapted == having:
        return []
    layers = set().union(*adapted.values())
    if any(numbers != layers & having[name] for name, numbers in adapted.items()):
        raise ConfigError(
            "the adapters of different modules are in different layers, so that they cannot be exported as one PEFT adapter."
            " Export the merged model: --adapters merge"
        )
    return sorted(layers)


def _patterns(ranks: Mapping[str, int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of adapter_config.json for modules with other ranks than most. All have the same scale."""
    others = {module: rank for module, rank in sorted(ranks.items()) if rank != settings["r"]}
    alphas = {module: settings["lora_alpha"] * rank / settings["r"] for module, rank in others.items()}
    return {"rank_pattern": others, "alpha_pattern": alphas} if others else {}


def _tensors(
    group: Sequence[Adapter], owner: Tensor, sizes: Sizes, layout: Layout, dtype: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of all adapters at one matrix. Args: sizes: axis sizes of the model."""
    stacked = {adapter.path: _stacked(adapter, owner, layout, dtype) for adapter in group}
    name = PREFIX + owner.name.removesuffix(".weight")
    for number, layer in enumerate(group[0].layers):
        pairs = {path: (a[number], b[number]) for path, (a, b) in stacked.items()}
        a, b = FusedMatrix(owner, sizes).fuse(pairs) if len(owner.parts) > 1 else pairs[group[0].path]
        module = name.format(layer=layer)
        yield f"{module}.lora_A.weight", np.ascontiguousarray(a)
        yield f"{module}.lora_B.weight", np.ascontiguousarray(b)


def _stacked(adapter: Adapter, owner: Tensor, layout: Layout, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """a [layers, rank, in] and b [layers, out, rank] on the host; with one layer if the matrix is not in a layer."""
    whole = jax.jit(lambda x: x, out_shardings=layout.replicated())
    inputs, outputs = (tuple(axis.name for axis in axes_of(spec)) for spec in (adapter.In, adapter.Out))
    layers = (LAYERS,) if owner.is_stacked else ()
    a, b = adapter.a.rearrange((*layers, LORA, *inputs)), adapter.b.rearrange((*layers, *outputs, LORA))
    rank, num_layers = a.axis_size(LORA), a.axis_size(LAYERS) if layers else 1
    a_np, b_np = (np.asarray(whole(x.array)).astype(dtype) for x in (a, b))
    return a_np.reshape(num_layers, rank, -1), b_np.reshape(num_layers, -1, rank)
