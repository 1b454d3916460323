"""Exports LoRA adapters in PEFT format.

Source: PEFT's checkpoint format (github.com/huggingface/peft, docs/source/developer_guides/checkpoint.md):
`adapter_config.json`, and in `adapter_model.safetensors` for every layer `lora_A` {rank, in} and `lora_B` {out, rank}, of
embeddings `lora_embedding_A` and `lora_embedding_B`, and with DoRA `lora_magnitude_vector` {out}. Those of experts are in
`jaxlm.interop.peft.experts`.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from haliax import NamedArray

from jaxlm.core.axes import EXPERTS, LAYERS, LORA, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import Location, check_unused, publish_folder
from jaxlm.core.runtime import is_main_process, main_only
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.safetensors_file import TensorInfo, write_safetensors
from jaxlm.interop.hf.text_part import TEXT_ALONE, Modules
from jaxlm.interop.hf.weights import Sizes, Tensor
from jaxlm.interop.peft.experts import (
    VERSION,
    expert_tensors,
    is_of_experts,
    module_of,
    of_one_expert,
    packed,
    router_tensors,
)
from jaxlm.interop.peft.names import (
    EMBEDDING,
    LINEAR,
    MAGNITUDE,
    PREFIX,
    Arrays,
    AxisSizes,
    BaseRows,
    FusedMatrix,
    is_tied,
    layers_of,
    module_name,
    peft_tensors,
    shortest_suffix,
    weight_name,
)
from jaxlm.models.base import ModelConfig


@dataclass(frozen=True)
class Adapter:
    """An adapter that adds scale * b a to a linear layer or an embedding table.

    Attributes:
        path: path of the module, in a model with one stack of layers; `head` also if the head is tied to a table.
        layers: numbers of the layers in `a` and `b`; 0 alone if the module is not in a layer.
        a: {layers, experts, lora_rank, *In}; only those of experts have that axis.
        b: {layers, experts, *Out, lora_rank}, likewise.
        magnitude: DoRA's, {layers, *Out}; None without.
        In, Out: input and output axes of the layer.
        sizes: (rank, scale) of each layer, or one for all. Ranks beyond it are left out, and layers of rank 0.
        dropout: dropout probability of the input of `a` in training; None if there is no such layer.
    """

    path: str
    layers: tuple[int, ...]
    a: NamedArray
    b: NamedArray
    magnitude: NamedArray | None
    In: Any
    Out: Any
    sizes: Sequence[tuple[int, float]]
    dropout: float | None


@dataclass(frozen=True)
class Adapted:
    """Holds what the files have of a model with adapters.

    Attributes:
        adapters: the adapters of all its modules.
        saved: path in a model without adapters -> another parameter to write.
        tables: paths of the adapted embedding tables.
        shared: the head has the adapter of the embedding that it is tied to.
        num_layers: number of layers of the model.
        sizes: axis sizes of the model.
    """

    adapters: Sequence[Adapter]
    saved: Mapping[str, NamedArray]
    tables: Collection[str]
    shared: bool
    num_layers: int
    sizes: AxisSizes


@dataclass(frozen=True)
class _Module:
    """The adapter of one module in the files.

    Attributes:
        tensor, layer: its weight in the table of weights.
        rank, scale: of the adapter, or of that of each expert.
        is_parameter: PEFT adapts a parameter (`target_parameters`), not a linear layer or an embedding.
    """

    tensor: Tensor
    layer: int | None
    arrays: Arrays
    rank: int
    scale: float
    is_parameter: bool

    @property
    def name(self) -> str:
        """The name by which PEFT finds it: of the module, or of the parameter."""
        return (weight_name if self.is_parameter else module_name)(self.tensor, self.layer)


def save_adapters(
    folder: Location,
    model: Adapted,
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: Any,
    base: str,
    files: Mapping[str, bytes],
    rows: BaseRows | None = None,
    base_modules: Modules = TEXT_ALONE,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors. Every process must call this; process 0 writes.

    Args:
        base: name of the base model, for adapter_config.json.
        files: additional files to write, such as the model card.
        rows: the vocabulary of the base; None if it has the model's.
        base_modules: modules of the base.

    Raises:
        ConfigError: PEFT has no such adapters, or the base cannot be read. On all processes.
    """
    check_unused(folder, "adapter_config.json")
    table = base_modules.names.of_table(peft_tensors(config))
    parameters = base_modules.names.of_table([*expert_tensors(config), *router_tensors(config)])
    modules = _modules(model, table, parameters, layout, dtype)
    linear = [module for module in modules if not module.is_parameter]
    adapted = {module.name for module in linear}
    others = _saved_tensors(model, table, layout, dtype)
    is_shared = model.shared
    if is_tied(config):
        others, is_table = _tied_tensors(others, adapted, table)
        is_shared = is_shared or is_table
    tensors = _adapter_tensors(modules, model.tables)
    tensors |= {_saved_name(name, adapted): array for name, array in others.items()}
    if rows is not None:
        tensors = main_only(lambda: rows.added_to(tensors, table, model.sizes.vocab)) or tensors
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "fan_in_fan_out": family_of_config(config).model_types[0] == "gpt2",  # `Conv1D`, with weights {in, out}
        **_settings(modules, model.adapters),
        **_targets(
            linear,
            [tensor for tensor in table if len(tensor.parts[0].dims) >= 2],
            model.num_layers,
            base_modules.others,
        ),
        **_target_parameters([module for module in modules if module.is_parameter], parameters, model.num_layers),
        "bias": _bias(others, adapted),
        **_modules_to_save(others, adapted, table, model.num_layers, base_modules.others),
        **({"ensure_weight_tying": True} if is_shared else {}),
    }
    if not is_main_process():
        return
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in tensors.items()}
    with publish_folder(folder, "adapter_config.json") as unfinished:
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        (unfinished / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
        write_safetensors(unfinished / "adapter_model.safetensors", infos, tensors.values())


def _adapter_tensors(modules: Sequence[_Module], tables: Collection[str]) -> dict[str, np.ndarray]:
    """Name in the file -> array."""
    tensors, names = {}, {module.name for module in modules}
    for module in modules:
        where = module_of(module.name, names) if module.is_parameter else module.name
        kind = EMBEDDING if module.tensor.parts[0].path.removesuffix(".weight") in tables else LINEAR
        named = {kind[0]: module.arrays.a, kind[1]: module.arrays.b, MAGNITUDE: module.arrays.magnitude}
        tensors |= {f"{PREFIX}{where}.{side}": array for side, array in named.items() if array is not None}
    return tensors


def _modules(
    model: Adapted, table: Sequence[Tensor], parameters: Sequence[Tensor], layout: Layout, dtype: Any
) -> list[_Module]:
    """The adapters of all modules in the files. Those of the parameters of one matrix become one."""
    owners = {part.path: tensor for tensor in (*table, *parameters) for part in tensor.parts}
    groups: dict[tuple[Tensor, int | None], dict[str, tuple[Arrays, float]]] = {}
    for adapter in model.adapters:
        owner = owners.get(f"{adapter.path}.weight")
        if owner is None:
            raise ConfigError(
                f"{adapter.path} has an adapter, but no counterpart in transformers. Export the merged model: --adapters"
                " merge"
            )
        for layer, arrays, scale in _by_layer(adapter, owner, layout):
            groups.setdefault((owner, layer), {})[adapter.path] = (arrays, scale)
    modules = []
    for (tensor, layer), group in groups.items():
        arrays, rank, scale = _joined(tensor, group, model.sizes.of(tensor))
        cast = (None if array is None else np.ascontiguousarray(array.astype(dtype)) for array in arrays)
        modules.append(_Module(tensor, layer, Arrays(*cast), rank, scale, tensor in parameters))  # pyright: ignore[reportArgumentType]
    return modules


def _joined(tensor: Tensor, group: Mapping[str, tuple[Arrays, float]], sizes: Sizes) -> tuple[Arrays, int, float]:
    """The adapter of a matrix, its rank and its scale, from those of its parameters."""
    if is_of_experts(tensor):
        joined = []
        for n in range(sizes[EXPERTS]):
            own = {path: (Arrays(arrays.a[n], arrays.b[n]), scale) for path, (arrays, scale) in group.items()}
            joined.append(_joined(of_one_expert(tensor), own, sizes))
        return packed([arrays for arrays, _, _ in joined]), *joined[0][1:]
    scale = next(iter(group.values()))[1]
    if len(tensor.parts) == 1:
        arrays = next(iter(group.values()))[0]
    else:
        # One scale for all. If the scales are equal, this multiplies by 1.
        pairs = {
            path: arrays._replace(b=arrays.b * arrays.b.dtype.type(part_scale / scale))
            if part_scale != scale
            else arrays
            for path, (arrays, part_scale) in group.items()
        }
        arrays = FusedMatrix(tensor, sizes).fuse(pairs)
    return arrays, len(arrays.a), scale


def _by_layer(adapter: Adapter, owner: Tensor, layout: Layout) -> list[tuple[int | None, Arrays, float]]:
    """(number, arrays, scale) of each layer that has an adapter, on the host."""
    whole = jax.jit(lambda x: x, out_shardings=layout.replicated())
    inputs, outputs = (tuple(axis.name for axis in axes_of(spec)) for spec in (adapter.In, adapter.Out))
    layers, experts = (LAYERS,) if owner.is_stacked else (), (EXPERTS,) if is_of_experts(owner) else ()
    orders = (
        (adapter.a, (*experts, LORA, *inputs)),
        (adapter.b, (*experts, *outputs, LORA)),
        (adapter.magnitude, outputs),
    )
    a, b, magnitude = (
        None if x is None else np.asarray(whole(x.rearrange((*layers, *order)).array)) for x, order in orders
    )
    assert a is not None
    assert b is not None
    num_layers, rank = adapter.a.axis_size(LAYERS) if layers else 1, adapter.a.axis_size(LORA)
    each = [adapter.a.axis_size(axis) for axis in experts]
    a, b = a.reshape(num_layers, *each, rank, -1), b.reshape(num_layers, *each, -1, rank)
    magnitude = None if magnitude is None else magnitude.reshape(num_layers, -1)
    sizes = adapter.sizes if len(adapter.sizes) == num_layers else list(adapter.sizes) * num_layers
    return [
        (
            adapter.layers[n] if layers else None,
            Arrays(a[n, ..., :layer_rank, :], b[n, ..., :layer_rank], None if magnitude is None else magnitude[n]),
            scale,
        )
        for n, (layer_rank, scale) in enumerate(sizes)
        if layer_rank
    ]


def _settings(modules: Sequence[_Module], adapters: Sequence[Adapter]) -> dict[str, Any]:
    """The keys of adapter_config.json for ranks, scales, dropout and DoRA."""
    dropouts = {adapter.dropout for adapter in adapters if adapter.dropout is not None}
    if len(dropouts) > 1:
        raise ConfigError(
            f"adapters with different dropouts ({sorted(dropouts)}) cannot be exported as one PEFT adapter. Export the merged"
            " model: --adapters merge"
        )
    usual = Counter((rank, scale) for adapter in adapters for rank, scale in adapter.sizes if rank)
    (rank, scale), _ = usual.most_common(1)[0]
    alpha = scale * rank
    alphas = {module.name: module.scale * module.rank for module in modules}
    ranks = _patterns(modules, {module.name: module.rank for module in modules}, rank)
    other = {name: value for name, value in alphas.items() if not math.isclose(value, alpha, rel_tol=1e-9)}
    alpha_patterns = _patterns(modules, {name: other.get(name, alpha) for name in alphas}, alpha)
    use_dora = any(module.arrays.magnitude is not None for module in modules)
    # PEFT opens no adapters of parameters with dropout.
    dropout = 0.0 if any(module.is_parameter for module in modules) else max(dropouts, default=0.0)
    settings = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "use_dora": use_dora}
    return {
        **settings,
        **({"rank_pattern": ranks} if ranks else {}),
        **({"alpha_pattern": alpha_patterns} if alpha_patterns else {}),
    }


def _patterns(modules: Sequence[_Module], values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """Name of a module -> its value, if that is not the usual one; shortened if all modules with that name share it."""
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(module.name.rpartition(".")[2], []).append(module.name)
    patterns = {}
    for last, names in sorted(groups.items()):
        if len({values[name] for name in names}) == 1:
            patterns[last] = values[names[0]]
        else:
            patterns |= {name: values[name] for name in names}
    return {name: value for name, value in patterns.items() if value != usual}


def _targets(
    modules: Sequence[_Module], table: Sequence[Tensor], num_layers: int, beside: Collection[str]
) -> dict[str, Any]:
    """The keys of adapter_config.json for which modules have adapters. Args: beside: tensors of the base's other parts.

    A name in `target_modules` is the end of a module's name, in the layers of `layers_to_transform`, or a whole name.
    """
    layers: dict[str, list[int]] = {}
    for module in modules:
        layers.setdefault(module.tensor.name, []).extend([] if module.layer is None else [module.layer])
    everywhere = list(range(num_layers))
    having = _layers_by_name(table, num_layers)
    # All layers that have such a module count as all layers.
    layers = {
        name: everywhere if numbers and sorted(numbers) == having[name] else numbers for name, numbers in layers.items()
    }
    stacked = {name: sorted(numbers) for name, numbers in layers.items() if numbers}
    common = next(iter(stacked.values()), everywhere)
    common = common if all(numbers == common for numbers in stacked.values()) else everywhere
    names = {name.rpartition(".")[0] for name in (*(tensor.name for tensor in table), *beside)}
    mine = {name.rpartition(".")[0] for name in layers if layers[name] in ([], common)}
    targets = set()
    for name, numbers in layers.items():
        module_path = name.rpartition(".")[0]
        # PEFT searches ends of names only in the layers of `layers_to_transform`, if there are any.
        searched_layers = common if numbers else everywhere
        end = (
            shortest_suffix(module_path, list(mine), list(names), whole=True)
            if searched_layers == common and module_path in mine
            else None
        )
        targets |= {end} if end is not None else {m.name for m in modules if m.tensor.name == name}
    return {
        "target_modules": sorted(targets),
        **({} if common == everywhere else {"layers_to_transform": common}),
    }


def _target_parameters(modules: Sequence[_Module], table: Sequence[Tensor], num_layers: int) -> dict[str, Any]:
    """The keys of adapter_config.json for which parameters have adapters: the ends of their names."""
    if not modules:
        return {}
    mine = {module.name for module in modules}
    others = {t.name for t in table if not mine.issuperset(weight_name(t, n) for n in layers_of(t, num_layers))}
    ends = {one.name if one.tensor.name in others else one.tensor.name.partition("{layer}.")[2] for one in modules}
    return {"target_parameters": sorted(ends), "peft_version": VERSION}


def _layers_by_name(table: Sequence[Tensor], num_layers: int) -> dict[str, list[int]]:
    """Name of a weight -> the numbers of the layers that have it, of which layers of several kinds have some each."""
    layers: dict[str, list[int]] = {}
    for tensor in table:
        numbers = [layer for layer in layers_of(tensor, num_layers) if layer is not None]
        layers[tensor.name] = sorted([*layers.get(tensor.name, []), *numbers])
    return layers


def _saved_tensors(model: Adapted, table: Sequence[Tensor], layout: Layout, dtype: Any) -> dict[str, np.ndarray]:
    """Name of a parameter in the files of transformers -> its value, for those outside the adapters."""
    whole = jax.jit(lambda x: x, out_shardings=layout.replicated())
    saved = model.saved
    tensors, unwritten = {}, set(saved)
    for tensor in table:
        paths = [part.path for part in tensor.parts]
        saved_paths = [path for path in paths if path in saved]
        if not saved_paths or (len(saved_paths) < len(paths)):
            continue
        unwritten -= set(saved_paths)
        leaves = [saved[path] for path in paths]
        hosted = [np.asarray(whole(leaf.array)).astype(dtype) for leaf in leaves]
        for number, layer in enumerate(layers_of(tensor, model.num_layers)):
            layer_arrays = [array if layer is None else array[number] for array in hosted]
            tensors[weight_name(tensor, layer)] = np.ascontiguousarray(
                tensor.write(layer_arrays, [tensor.own_axes(leaf) for leaf in leaves], model.sizes.of(tensor))
            )
    if unwritten:
        raise ConfigError(
            f"modules_to_save: {', '.join(sorted(unwritten))} cannot be written: the model in transformers has no such"
            " tensor, or one with other parameters too. Add those, or export the merged model: --adapters merge"
        )
    return tensors


def _tied_tensors(
    others: Mapping[str, np.ndarray], adapted: Collection[str], table: Sequence[Tensor]
) -> tuple[dict[str, np.ndarray], bool]:
    """The tensors of a model whose head is its token embedding, as PEFT has them, and whether the two are a saved module.

    PEFT sees two modules. If one of them has an adapter, its base layer has the weight of both. Otherwise both are saved.
    """
    names = {tensor.parts[0].path: tensor.name for tensor in table}
    tokens, head = names["tokens.weight"], names["head.weight"]
    if tokens not in others or tokens.rpartition(".")[0] in adapted:
        return dict(others), False
    if head.rpartition(".")[0] in adapted:
        return {head if name == tokens else name: array for name, array in others.items()}, False
    return {**others, head: others[tokens].copy()}, True


def _saved_name(name: str, adapted: Collection[str]) -> str:
    """The name in the file. PEFT keeps the parameters of an adapted module in its `base_layer`."""
    module, _, parameter = name.rpartition(".")
    return f"{PREFIX}{module}.base_layer.{parameter}" if module in adapted else f"{PREFIX}{name}"


def _bias(others: Collection[str], adapted: Collection[str]) -> str:
    """The key `bias`: which biases the file has, besides those of whole modules."""
    whole = {name.rpartition(".")[0] for name in others if not name.endswith(".bias")}
    modules = {name.rpartition(".")[0] for name in others} - (whole - set(adapted))
    biased = {name.rpartition(".")[0] for name in others if name.endswith(".bias")} & modules
    if not biased:
        return "none"
    return "lora_only" if biased <= set(adapted) else "all"


def _modules_to_save(
    others: Collection[str], adapted: Collection[str], table: Sequence[Tensor], num_layers: int, beside: Collection[str]
) -> dict[str, list[str]]:
    """The key `modules_to_save`: PEFT compares its entries with the ends of names, which may begin anywhere."""
    mine = {name.rpartition(".")[0] for name in others if not name.endswith(".bias")} - set(adapted)
    everything = {module_name(tensor, layer) for tensor in table for layer in layers_of(tensor, num_layers)}
    everything |= {name.rpartition(".")[0] for name in beside}
    ends = set()
    for name in sorted(mine):
        ends.add(shortest_suffix(name, list(mine), list(everything), whole=False) or name)
    return {"modules_to_save": sorted(ends)} if ends else {}
