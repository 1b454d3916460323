"""Reads a PEFT folder with one LoRA adapter. The inverse of `jaxlm.interop.peft.write`."""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import VOCAB
from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import note_file
from jaxlm.core.safe_io import read_json_object
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.hub import local_folder
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.interop.hf.text_part import Names
from jaxlm.interop.hf.weights import Part, Tensor
from jaxlm.interop.peft.adapter_folder import SETTINGS, WEIGHTS, AdapterFile, fill, numbers, read_settings
from jaxlm.interop.peft.experts import (
    ExpertAdapters,
    adapters_of_experts,
    expert_tensors,
    has_outputs_first,
    router_tensors,
)
from jaxlm.interop.peft.names import (
    EMBEDDING,
    HEAD,
    LINEAR,
    MAGNITUDE,
    PREFIX,
    Arrays,
    AxisSizes,
    FusedMatrix,
    is_tied,
    layers_of,
    module_name,
    module_path,
    peft_tensors,
)
from jaxlm.models.base import LanguageModel, ModelConfig, vocab_axis

_MAX_LISTED = 10
_TOKENS = "tokens"  # path in jaxlm of the token embedding


@dataclass(frozen=True)
class Saved:
    """A parameter outside the adapters, as the file has it.

    Attributes:
        tensor, number: its entry in the table of weights, and which part of it.
        arrays: one for each layer.
    """

    tensor: Tensor
    number: int
    arrays: Sequence[np.ndarray]

    def read(self, leaf: Any, sizes: AxisSizes) -> np.ndarray:
        """The value for a leaf."""
        axes = self.tensor.own_axes(leaf)
        layers = [self.tensor.read(array, self.number, sizes.of(self.tensor), axes) for array in self.arrays]
        return np.stack(layers) if self.tensor.stacked else layers[0]


@dataclass(frozen=True)
class ReadAdapters:
    """Adapters of a folder, by path of the adapted module. A tied head has the path `head`.

    Attributes:
        folder: where they were read from.
        keys: keys of the `lora` surgery that adds these adapters.
        adapters: path -> a [layers, rank, in], b [layers, out, rank] and magnitude [layers, out], without `layers` if the
            module is not in a layer. Layers with a smaller rank, or without an adapter, are filled up with zeros.
        saved: path -> a parameter outside the adapters.
        sizes: axis sizes of the model.
    """

    folder: Path
    keys: Mapping[str, Any]
    adapters: Mapping[str, Arrays]
    saved: Mapping[str, Saved]
    sizes: AxisSizes

    def leaves(self, model: LanguageModel) -> dict[str, np.ndarray]:
        """Leaf path -> value, for a concrete or abstract model that has these adapters.

        Raises:
            ConfigError: an array does not have the shape of its leaf.
        """
        leaves, values = dict(tree.leaves(model)), {}
        for module, arrays in self.adapters.items():
            for name, array in arrays.present().items():
                path = f"{_place(module, leaves)}.{name}"
                axes = leaves[path].axes
                shape = tuple(axis.size for axis in axes)
                rank = {"a": -2, "b": -1}.get(name)
                if array.size != np.prod(shape) or (rank and array.shape[rank] != leaves[path].axis_size("lora_rank")):
                    raise ConfigError(
                        f"{self.folder}: {name} of {module}: shape {list(array.shape)} in the file (layers"
                        f" first) does not match {dict(zip([axis.name for axis in axes], shape, strict=True))}"
                    )
                values[path] = array.reshape(shape)
            if (layer := f"{_place(module, leaves)}.layer") in leaves:
                values[layer] = np.arange(leaves[layer].axes[0].size, dtype=np.int32)
        for path, saved in self.saved.items():
            module, _, name = path.rpartition(".")
            path = path if path in leaves else f"{module}.base.{name}"
            values[path] = saved.read(leaves[path], self.sizes)
        return values


def _place(module: str, leaves: Mapping[str, Any]) -> str:
    if f"{module}.a" in leaves:
        return module
    return f"{module}.lookup" if module != HEAD else f"{_TOKENS}.{HEAD}"


def peft_folder(name: str) -> Path:
    """Resolves `from_peft`, a path or a Hub name, to a local folder."""
    return local_folder(name, "surgery lora: from_peft", weights=True)


@dataclass(frozen=True)
class _Adapters:
    """The adapters of one matrix or table, in the layers that have one.

    Attributes:
        names: layer (None outside of layers) -> name of the module.
        ranks, scales: likewise.
        kind: names of A and B.
    """

    tensor: Tensor
    names: Mapping[int | None, str]
    ranks: Mapping[int | None, int]
    scales: Mapping[int | None, float]
    kind: tuple[str, str]

    def stacked(self, file: SafetensorsFile, num_layers: int, unread: set[str], *, dora: bool) -> Arrays:
        """Those of all layers, filled up with zeros, as in `ReadAdapters`."""
        layers, rank = layers_of(self.tensor, num_layers), max(self.ranks.values())
        a, b, magnitude = None, None, None
        for at, layer in enumerate(layers):
            if layer not in self.names:
                continue
            key_a, key_b = (f"{PREFIX}{self.names[layer]}.{side}" for side in self.kind)
            one_a, one_b = numbers(file, key_a), numbers(file, key_b)
            unread -= {key_a, key_b}
            if a is None or b is None:
                a = np.zeros((len(layers), rank, one_a.shape[1]), one_a.dtype)
                b = np.zeros((len(layers), one_b.shape[0], rank), one_b.dtype)
            fill(a[at, : len(one_a)], one_a, file.where(key_a))
            fill(b[at, :, : one_b.shape[1]], one_b, file.where(key_b))
            if dora:
                key = self._magnitude(layer, unread)
                unread.discard(key)
                magnitude = np.zeros(b.shape[:2], file.tensors[key].dtype) if magnitude is None else magnitude
                fill(magnitude[at], numbers(file, key).reshape(-1), file.where(key))
        assert a is not None
        assert b is not None
        return Arrays(a, b, magnitude)

    def _magnitude(self, layer: int | None, unread: Iterable[str]) -> str:
        key = f"{PREFIX}{self.names[layer]}.{MAGNITUDE}"
        return f"{key}.weight" if f"{key}.weight" in unread else key

    def missing_magnitudes(self, names: Iterable[str]) -> list[str]:
        """The tensors of DoRA that should be in the file."""
        return [name for layer in self.names if (name := self._magnitude(layer, names)) not in names]


@dataclass(frozen=True)
class _Folder:
    """The header of a folder's file, sorted by modules.

    Attributes:
        settings: adapter_config.json.
        num_layers: of the model.
        adapters: of every adapted matrix or table.
        experts: of every adapted matrix of experts.
        saved: (tensor of the table, names in the file by layer) of every other parameter in the file.
        tied: whether the head of the model is its token embedding.
    """

    path: Path
    settings: Mapping[str, Any]
    num_layers: int
    adapters: Sequence[_Adapters]
    experts: Sequence[ExpertAdapters]
    saved: Sequence[tuple[Tensor, Sequence[str]]]
    tied: bool

    @property
    def all_adapters(self) -> Sequence[_Adapters | ExpertAdapters]:
        return [*self.adapters, *self.experts]

    @property
    def dora(self) -> bool:
        return bool(self.settings.get("use_dora"))


def _named(config: ModelConfig, names: Iterable[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rows of a table of weights with the names of the base's modules. Args: names: in the file."""
    without = [name.removeprefix(PREFIX) for name in names]
    return Names.of(without, family_of_config(config).prefix).of_table(tensors)


def _open(folder: Path, config: ModelConfig) -> _Folder:
    settings = read_settings(folder)
    file = folder / WEIGHTS
    names = SafetensorsFile(file).tensors
    opened = AdapterFile(file, names, settings)
    note_file(folder / SETTINGS)
    num_layers: int = getattr(config, "num_layers")  # noqa: B009, all configs of families have it
    all_adapters, saved = [], []
    for tensor in dict.fromkeys(_named(config, names, [*peft_tensors(config), *router_tensors(config)])):
        if tensor.name.endswith(".weight"):
            adapters = _adapters_of(tensor, opened, num_layers)
            all_adapters += [adapters] if adapters is not None else []
        saved += _saved(tensor, names, num_layers, file)
    if settings.get("ensure_weight_tying") and is_tied(config) and any(one.kind == EMBEDDING for one in all_adapters):
        # Those of the head are the same as the table's.
        all_adapters = [adapters for adapters in all_adapters if module_path(adapters.tensor.parts[0]) != HEAD]
    table = _named(config, names, expert_tensors(config, single=True))
    experts = adapters_of_experts(config, table, opened)
    if not all_adapters and not experts:
        raise _wrong_model(folder, "no adapters")
    paths = collections.Counter(module_path(p) for one in [*all_adapters, *experts] for p in one.tensor.parts)
    if twice := [path for path, count in paths.items() if count > 1]:
        raise _wrong_model(folder, f"{', '.join(twice[:_MAX_LISTED])} has adapters in two forms")
    tied = is_tied(config)
    saved = _tied_as_one(saved, settings, file) if tied else saved
    return _Folder(folder, settings, num_layers, all_adapters, experts, saved, tied)


def _adapters_of(tensor: Tensor, file: AdapterFile, num_layers: int) -> _Adapters | None:
    modules = {layer: module_name(tensor, layer) for layer in layers_of(tensor, num_layers)}
    targets = tuple(f".{end}" for end in file.settings.get("target_parameters") or ())
    for kind in (LINEAR, EMBEDDING):
        adapted = {layer: name for layer, name in modules.items() if f"{PREFIX}{name}.{kind[0]}" in file.tensors}
        if not adapted:
            continue
        # PEFT finds the weight of a router by its own name.
        found_by = lambda name: f"{name}.weight" if f".{name}.weight".endswith(targets) else name  # noqa: E731
        sizes = {layer: file.size(found_by(name), name, kind) for layer, name in adapted.items()}
        ranks = {layer: rank for layer, (rank, _) in sizes.items()}
        scales = {layer: scale for layer, (_, scale) in sizes.items()}
        adapters = _Adapters(tensor, adapted, ranks, scales, kind)
        if file.settings.get("use_dora") and (missing := adapters.missing_magnitudes(file.tensors)):
            raise ConfigError(f"{file.path}: missing: {', '.join(missing[:_MAX_LISTED])}")
        return adapters
    return None


def _saved(tensor: Tensor, names: Mapping[str, Any], num_layers: int, file: Path) -> list[tuple[Tensor, list[str]]]:
    """The names of a parameter that the file has, which PEFT also finds inside of adapted modules."""
    layer_names = []
    for layer in layers_of(tensor, num_layers):
        module, parameter = module_name(tensor, layer), tensor.name.rpartition(".")[2]
        options = (f"{PREFIX}{module}.{parameter}", f"{PREFIX}{module}.base_layer.{parameter}")
        layer_names.append(next((name for name in options if name in names), None))
    present = [name for name in layer_names if name is not None]
    if present and len(present) < len(layer_names):
        raise ConfigError(
            f"{file}: {', '.join(present[:_MAX_LISTED])}: {len(present)} of {len(layer_names)} layers. jaxlm reads a"
            " saved module or bias (modules_to_save, bias) only if the file has it for all layers. Merge the adapter in PEFT"
            " and import the merged model"
        )
    return [(tensor, present)] if present else []


def _tied_as_one(
    saved: list[tuple[Tensor, list[str]]], settings: Mapping[str, Any], file: Path
) -> list[tuple[Tensor, list[str]]]:
    """Returns what the file has of a token embedding and of the head that is tied to it, as the embedding.

    Raises:
        ConfigError: it has copies of them with other values.
    """
    by_path = {module_path(tensor.parts[0]): (tensor, names[0]) for tensor, names in saved}
    both = {path: by_path[path][1] for path in (_TOKENS, HEAD) if path in by_path}
    modules = settings.get("modules_to_save") or ()
    copies = [name for name in both.values() if any(name.rpartition(".")[0].endswith(end) for end in modules)]
    if copies and not settings.get("ensure_weight_tying"):
        source = SafetensorsFile(file)
        first, *rest = (source.view(name) for name in copies)
        if not rest or not np.array_equal(first, rest[0]):
            raise ConfigError(
                f"{file}: {', '.join(copies)}: the head of this model is tied to its token embedding, but with this adapter"
                " the two have other values (modules_to_save without ensure_weight_tying). Merge the adapter in PEFT, save"
                " the merged model with tie_word_embeddings: false, and import that"
            )
    others = [copy for copy in saved if module_path(copy[0].parts[0]) not in both]
    if not both:
        return others
    name = both.get(_TOKENS, both.get(HEAD, ""))
    tensor = by_path[_TOKENS][0] if _TOKENS in both else _as_tokens(by_path[HEAD][0])
    return [*others, (tensor, [name])]


def _as_tokens(head: Tensor) -> Tensor:
    """The entry in the table of weights of a head, as that of the token embedding."""
    return replace(head, parts=tuple(replace(part, path=f"{_TOKENS}.weight") for part in head.parts))


def read_adapters(folder: Path, config: ModelConfig, sizes: AxisSizes) -> ReadAdapters:
    """Reads the adapters that PEFT or `save_adapters` wrote for a model of this configuration.

    An adapter of a matrix that is several parameters in jaxlm becomes one for each of them.

    Args:
        sizes: axis sizes of the model.

    Raises:
        ConfigError: there are no adapters, they compute something other than LoRA or DoRA, or they belong to another model.
    """
    opened, file = _open(folder, config), SafetensorsFile(folder / WEIGHTS)
    unread = set(file.tensors)
    modules, arrays = {}, {}
    for adapters in opened.all_adapters:
        for path, one, whole in _by_module(opened, adapters, file, sizes, unread):
            modules[path], arrays[path] = one, _rows_of_tokens(adapters, whole, sizes, folder)
    saved = {}
    for tensor, names in opened.saved:
        unread -= set(names)
        for name in names:
            shape = file.tensors[name].shape
            _check_shape(tensor, shape, sizes, f"{folder / WEIGHTS}: {name}")
            if shape and tensor.parts[0].dims[0] == (VOCAB,) and shape[0] > sizes.vocab:
                _check_own_tokenizer(folder, sizes)
        saved |= {
            part.path: Saved(tensor, n, [numbers(file, name) for name in names]) for n, part in enumerate(tensor.parts)
        }
    if opened.tied:  # a head repeats the weight of the table and, if it shares them, the adapters
        (head,) = (t for t in _named(config, file.tensors, peft_tensors(config)) if module_path(t.parts[0]) == HEAD)
        start = f"{PREFIX}{module_name(head, None)}."
        shared = opened.settings.get("ensure_weight_tying")
        unread -= {name for name in unread if name.startswith(start) and (shared or name.endswith(".weight"))}
    if unread:
        raise _wrong_model(folder, f"{', '.join(sorted(unread)[:_MAX_LISTED])} belong to no layer of this model")
    return ReadAdapters(folder, _lora_keys(opened, modules), arrays, saved, sizes)


def lora_keys(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The keys of the `lora` surgery that adds the adapters of a folder. Reads no weights, if it can.

    Raises:
        ConfigError: as `read_adapters`, but only for what the names and shapes in the file tell.
    """
    opened, file = _open(folder, config), SafetensorsFile(folder / WEIGHTS)
    modules = {}
    for adapters in opened.all_adapters:
        if len(adapters.tensor.parts) == 1 or set(adapters.ranks.values()) == {opened.settings["r"]}:
            modules |= {module_path(part): _Module.of(adapters, opened.num_layers) for part in adapters.tensor.parts}
        else:  # which ranks belong to which part
            model = jax.eval_shape(lambda: config.build(vocab_axis(1), key=jax.random.key(0)))
            sizes = AxisSizes.of_model(model)
            modules |= {path: one for path, one, _ in _by_module(opened, adapters, file, sizes, set(file.tensors))}
    return _lora_keys(opened, modules)


@dataclass(frozen=True)
class _Module:
    """Ranks and scales by layer (None outside of layers) of the adapters of a parameter, which `layers` have."""

    kind: tuple[str, str]
    ranks: Mapping[int | None, int]
    scales: Mapping[int | None, float]
    layers: Sequence[int | None]

    @staticmethod
    def of(adapters: _Adapters | ExpertAdapters, num_layers: int, rank: int | None = None) -> "_Module":
        """Those of a whole matrix, or with another rank."""
        ranks = adapters.ranks if rank is None else dict.fromkeys(adapters.ranks, rank)
        return _Module(adapters.kind, ranks, adapters.scales, layers_of(adapters.tensor, num_layers))


def _by_module(
    opened: _Folder, adapters: _Adapters | ExpertAdapters, file: SafetensorsFile, sizes: AxisSizes, unread: set[str]
) -> Iterable[tuple[str, _Module, Arrays]]:
    """(path, sizes, arrays) of the adapter of each parameter in a matrix."""
    tensor = adapters.tensor
    if isinstance(adapters, ExpertAdapters):
        outputs_first = has_outputs_first(opened.experts, file, sizes, opened.settings, opened.path)
        whole = adapters.stacked(file, opened.num_layers, unread, outputs_first=outputs_first)
    else:
        whole = adapters.stacked(file, opened.num_layers, unread, dora=opened.dora)
    if len(tensor.parts) == 1:
        parts = [(module_path(tensor.parts[0]), None, whole)]
    else:
        parts = FusedMatrix(tensor, sizes.of(tensor)).split(whole, int(opened.settings["r"]))
    for path, rank, arrays in parts:
        layered = arrays if tensor.is_stacked else Arrays(**{name: one[0] for name, one in arrays.present().items()})
        yield path, _Module.of(adapters, opened.num_layers, rank), layered


def _lora_keys(opened: _Folder, modules: Mapping[str, _Module]) -> dict[str, Any]:
    settings, num_layers = opened.settings, opened.num_layers
    rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
    power = 0.5 if settings.get("use_rslora") else 1.0
    used = {layer for module in modules.values() for layer in module.ranks if layer is not None}
    layers = sorted(used) if 0 < len(used) < num_layers else None
    experts = [module_path(part) for adapters in opened.experts for part in adapters.tensor.parts]
    linear = [path for path, module in modules.items() if module.kind == LINEAR and path not in experts]
    tied = [HEAD] if opened.tied and HEAD in modules else []
    tables = [path for path, module in modules.items() if module.kind == EMBEDDING] + tied
    linear = [path for path in linear if path not in tied]
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for path, module in modules.items():
        expected = [layer for layer in module.layers if layers is None or layer is None or layer in layers]
        module_ranks = {layer: module.ranks.get(layer, 0) for layer in expected}
        ranks |= _patterns(
            path, {layer: value for layer, value in module_ranks.items() if value != rank}, len(module_ranks)
        )
        theirs = {
            layer: module.scales[layer] * module_ranks[layer] ** power for layer in module_ranks if module_ranks[layer]
        }
        others = {layer: value for layer, value in theirs.items() if not math.isclose(value, alpha, rel_tol=1e-6)}
        alphas |= _patterns(path, others, len(module_ranks))
    return {
        "target": _any_of(linear),
        "rank": rank,
        "alpha": alpha,
        "dropout": 0.0 if experts else float(settings.get("lora_dropout") or 0.0),
        "rslora": bool(settings.get("use_rslora")),
        "use_dora": opened.dora,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "layers_to_transform": layers,
        "embeddings": _any_of(tables),
        "experts": _any_of(experts),
        "ensure_weight_tying": bool(settings.get("ensure_weight_tying")) and _TOKENS in tables,
        "modules_to_save": [
            _saved_pattern(part, [*modules, *([_TOKENS] if tied else [])])
            for tensor, _ in opened.saved
            for part in tensor.parts
        ],
    }


def _any_of(paths: Sequence[str]) -> str | None:
    return f"^({'|'.join(map(re.escape, paths))})$" if paths else None


def _saved_pattern(part: Part, adapted: Iterable[str]) -> str:
    """The regular expression for a parameter, which is inside of the adapted layer if its module has an adapter."""
    module, _, name = part.path.rpartition(".")
    path = f"{module}.base.{name}" if module in adapted else part.path
    return f"^{re.escape(path)}$"


def _patterns(path: str, values: Mapping[int | None, Any], num_all: int) -> dict[str, Any]:
    """Regular expression for the numbered paths of some layers -> their value. Args: num_all: number of all layers."""
    patterns = {}
    for value in dict.fromkeys(values.values()):
        layers = [layer for layer, other in values.items() if other == value]
        number = r"\d+" if len(layers) == num_all else f"({'|'.join(map(str, layers))})"
        patterns[f"^{re.escape(path)}$".replace(r"\.stacked\.", rf"\.{number}\.")] = value
    return patterns


def _rows_of_tokens(adapters: _Adapters | ExpertAdapters, arrays: Arrays, sizes: AxisSizes, folder: Path) -> Arrays:
    """The arrays of an adapter without rows that no token has, as weights are read.

    Raises:
        ConfigError: training has changed such a row of an embedding, which only its token does.
    """
    a, b, magnitude = arrays
    is_table = adapters.kind == EMBEDDING
    rows = a.shape[-1] if is_table else b.shape[-2]
    if adapters.tensor.parts[0].dims[0] != (VOCAB,) or rows <= sizes.vocab:
        return arrays
    _check_own_tokenizer(folder, sizes)
    if is_table and magnitude is not None:
        raise ConfigError(
            f"{folder / WEIGHTS}: the DoRA magnitudes of the token embedding depend on all of its {rows} rows, but the model"
            f" has {sizes.vocab}. Merge the adapter in PEFT and import the merged model"
        )
    if is_table and (changed := np.flatnonzero(a[..., sizes.vocab :].any(axis=tuple(range(a.ndim - 1))))).size:
        raise ConfigError(
            f"{folder / WEIGHTS}: it changes the embeddings of {changed.size} tokens that are not among this model's"
            f" {sizes.vocab}: {sizes.vocab + changed[0]} is the first id. Set data.tokenizer to the tokenizer that the"
            " adapter was trained with"
        )
    if is_table:
        return Arrays(a[..., : sizes.vocab], b)
    return Arrays(a, b[..., : sizes.vocab, :], None if magnitude is None else magnitude[..., : sizes.vocab])


def _check_own_tokenizer(folder: Path, sizes: AxisSizes) -> None:
    """Raises `ConfigError` if the folder has a tokenizer with tokens whose rows would be left out."""
    file = folder / "tokenizer.json"
    added = read_json_object(file).get("added_tokens") if file.is_file() else None
    tokens = {token.get("id"): token.get("content") for token in added or () if isinstance(token, dict)}
    if more := [repr(name) for number, name in tokens.items() if type(number) is int and number >= sizes.vocab]:
        raise ConfigError(
            f"{file}: {', '.join(more[:_MAX_LISTED])}: tokens beyond the {sizes.vocab} of the model, whose rows the adapter"
            f" has. Set data.tokenizer to {folder}, or data.added_tokens to these tokens"
        )


def _check_shape(tensor: Tensor, shape: Sequence[int], sizes: AxisSizes, where: str) -> None:
    expected = tensor.shape(sizes.of(tensor))
    rows = len(shape) > 0 and tensor.parts[0].dims[0] == (VOCAB,) and shape[0] > expected[0]
    if tuple(shape) != (shape[0] if rows else expected[0], *expected[1:]):
        raise ConfigError(
            f"{where}: {list(shape)} in the file, but {list(expected)} in the model. If the rows differ, the"
            " adapter belongs to a model with another vocabulary: resize the base model first, as it was trained"
        )


def _wrong_model(folder: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{folder / WEIGHTS}: {problem}. Check that the adapter belongs to a model of this configuration"
    )
