"""The names in PEFT's files of a model's modules and parameters, fused matrices, and rows of the vocabulary.

A fused matrix is several parameters in jaxlm, such as queries, keys and values. jaxlm has an adapter for each parameter,
and PEFT one for the whole matrix. The rows of each parameter get ranks of their own:

    B_q  0   0        A_q
     0  B_k  0    x   A_k
     0   0  B_v       A_v

Conversely, in any adapter of the whole matrix, the rows of B that belong to a parameter are that parameter's B, beside the
whole A. If only some ranks have values in these rows, the others can be left out. DoRA's norms are over the inputs, so each
row has its own magnitude, which is that of its parameter.

The base of an adapter may have rows of the vocabulary that the trained model does not: a run's embedding has a row for each
token of its tokenizer, and published tables often have more. PEFT loads adapters only into a base with as many rows as they
have.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import EXPERTS, LAYERS, LORA, VOCAB
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.mtp import without_mtp
from jaxlm.interop.hf.tensor_files import TensorSource
from jaxlm.interop.hf.weights import Part, Sizes, Tensor, axis_sizes
from jaxlm.models.base import ModelConfig, as_family

PREFIX = "base_model.model."
"""Prefix of all module names in PEFT files."""
LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE = "lora_magnitude_vector"
HEAD = "head"
"""The path in jaxlm of a head, also if it is tied to the token embedding."""


def peft_tensors(config: ModelConfig) -> list[Tensor]:
    """The table of weights of a model. PEFT adapts the head as a module of its own, also if its weight is tied."""
    family, config = family_of_config(config), as_family(config)
    tensors = without_mtp(family.tensors(config))
    if is_tied(config):
        untied = family.tensors(dataclasses.replace(config, tie_word_embeddings=False))  # pyright: ignore[reportCallIssue]
        tensors += [tensor for tensor in untied if module_path(tensor.parts[0]) == HEAD]
    with_experts = [tensor for tensor in tensors if any(EXPERTS in dim for part in tensor.parts for dim in part.dims)]
    return [tensor for tensor in tensors if tensor.stacked in ((), (LAYERS,)) and tensor not in with_experts]


def is_tied(config: ModelConfig) -> bool:
    """Tells whether the head of a model is its token embedding."""
    fields = {field.name for field in dataclasses.fields(config)}
    return "tie_word_embeddings" in fields and bool(getattr(config, "tie_word_embeddings"))  # noqa: B009


def module_path(part: Part) -> str:
    """The path in jaxlm of the module that has this weight."""
    return part.path.removesuffix(".weight")


def module_name(tensor: Tensor, layer: int | None) -> str:
    """The name of the module that has this weight, without the prefix."""
    return weight_name(tensor, layer).rpartition(".")[0]


def weight_name(tensor: Tensor, layer: int | None) -> str:
    """The name of this weight in a layer."""
    return tensor.name if layer is None else tensor.name.format(layer=layer)


def layers_of(tensor: Tensor, num_layers: int) -> list[int | None]:
    """The number of every layer that has such a tensor; None for one that is not in a layer."""
    if not tensor.is_stacked:
        return [None]
    return list(range(num_layers) if tensor.numbers is None else tensor.numbers)


def by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of `rank_pattern` or `alpha_pattern` for a module, as PEFT finds it: the first that matches the end."""
    matches = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, default)


def shortest_suffix(name: str, mine: Sequence[str], others: Sequence[str], *, whole: bool) -> str | None:
    """The shortest end of a module's name that only modules in `mine` have. None if even the whole name is not enough.

    Args:
        name: without the part that differs between layers.
        whole: an end begins with a whole part of the name. Otherwise it may begin anywhere, as in `modules_to_save`.
    """
    parts = name.split(".")
    for start in range(len(parts) - 1, -1, -1):
        end = ".".join(parts[start:])
        if "{layer}" in end:
            return None
        same = [other for other in others if other == end or other.endswith(f".{end}" if whole else end)]
        if all(other in mine for other in same):
            return end
    return None


@dataclass(frozen=True)
class AxisSizes:
    """Sizes of the axes of a model. An axis may have another size in another kind of layer.

    Attributes:
        usual: the sizes of all axes, of which one layer decides.
        by_path: path of a parameter in a model without adapters -> those of its own axes.
    """

    usual: Sizes
    by_path: Mapping[str, Sizes]

    @staticmethod
    def of_model(model: Any) -> "AxisSizes":
        """Those of a concrete or abstract model, with or without adapters."""
        is_weight = lambda node: tree.is_named(node) or isinstance(node, StoredWeight)  # noqa: E731
        nodes, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_weight)
        sizes = {tree.dotted(path): axis_sizes([("", node)]) for path, node in nodes if is_weight(node)}
        usual = axis_sizes(tree.leaves(model))
        return AxisSizes(usual, {path.replace(".base.", "."): own for path, own in sizes.items()})

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.usual[VOCAB]

    def of(self, tensor: Tensor) -> Sizes:
        """Those of the parameters of a tensor."""
        sizes = dict(self.usual)
        for part in tensor.parts:
            sizes |= self.by_path.get(part.path, {})
        return sizes


_ONE = "one"  # an axis of size 1, in place of the inputs


class Arrays(NamedTuple):
    """An adapter's a [rank, in], b [out, rank] and, with DoRA, magnitude [out]. Several have leading axes."""

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None = None

    def present(self) -> dict[str, np.ndarray]:
        """Those that there are, by name."""
        return {name: array for name, array in self._asdict().items() if array is not None}


@dataclass(frozen=True)
class FusedMatrix:
    """The layout of a matrix of several parameters.

    Attributes:
        tensor: its entry in the table of weights.
        sizes: axis sizes of the model.
    """

    tensor: Tensor
    sizes: Sizes

    def fuse(self, pairs: Mapping[str, Arrays]) -> Arrays:
        """The adapter of the whole matrix.

        Args:
            pairs: module path -> its adapter; modules without one do not change.

        Raises:
            ConfigError: some of the modules have magnitudes. Those of the others are norms of weights, which are not given.
        """
        adapted = [path for path in map(module_path, self.tensor.parts) if path in pairs]
        magnitudes = [pairs[path].magnitude for path in adapted]
        if any(magnitude is not None for magnitude in magnitudes) and len(adapted) < len(self.tensor.parts):
            raise ConfigError(
                f"{self.tensor.name}: with DoRA, all parameters of this matrix must have adapters so that PEFT can read them,"
                f" but only {', '.join(adapted)} have. Export the merged model: --adapters merge"
            )
        num_ranks = sum(len(pairs[path].a) for path in adapted)
        start, parts = 0, []
        for part in self.tensor.parts:
            outputs = [self.sizes[axis] for axis in self._outputs(part)]
            whole = np.zeros((int(np.prod(outputs)), num_ranks), pairs[adapted[0]].b.dtype)
            if (path := module_path(part)) in pairs:
                b = pairs[path].b
                whole[:, start : start + b.shape[1]] = b
                start += b.shape[1]
            parts.append(whole.reshape((*outputs, num_ranks)))
        b = self._joined(parts, LORA, num_ranks)
        magnitude = None
        if magnitudes[0] is not None:
            shapes = [[self.sizes[axis] for axis in self._outputs(part)] for part in self.tensor.parts]
            present = [magnitude for magnitude in magnitudes if magnitude is not None]
            columns = [np.reshape(values, (*shape, 1)) for values, shape in zip(present, shapes, strict=True)]
            magnitude = self._joined(columns, _ONE, 1).reshape(-1)
        return Arrays(np.concatenate([pairs[path].a for path in adapted]), b, magnitude)

    def _joined(self, parts: list[np.ndarray], name: str, size: int) -> np.ndarray:
        """[all outputs, size] from one array [*outputs, size] of each parameter."""
        axes = [(*self._outputs(part), name) for part in self.tensor.parts]
        whole = self._with_inputs(name).write(parts, axes, {**self.sizes, name: size})
        return whole.T if self._has_inputs_first else whole

    def split(self, adapter: Arrays, rank: int) -> Iterator[tuple[str, int | None, Arrays]]:
        """(path, rank, adapter) of each module. The rank is None if it has all ranks of the whole adapter.

        Args:
            adapter: the whole one, with arrays [layers, ...]. Those of modules are stacked alike.
            rank: if the ranks are blocks of this size, and no parameter has values in more than one of them, each gets its
                own block.

        Raises:
            ConfigError: the whole adapter has another shape.
        """
        a, b, magnitude = adapter
        num_ranks = a.shape[1]
        outputs = self._with_inputs(LORA).shape({**self.sizes, LORA: num_ranks})
        expected = (outputs[:: -1 if self._has_inputs_first else 1], self.sizes[self._inputs[0]])
        if (b.shape[1:], a.shape[2]) != expected:
            raise ConfigError(
                f"the adapter at {self.tensor.name.removesuffix('.weight')} has lora_A {list(a.shape[1:])} and lora_B"
                f" {list(b.shape[1:])}, but {[num_ranks, expected[1]]} and {list(expected[0])} expected. Check that it"
                " belongs to a model of this configuration"
            )
        rows = [self._rows(b, number, LORA) for number in range(len(self.tensor.parts))]
        blocks = [slice(start, start + rank) for start in range(0, num_ranks, rank)]
        used = [[block for block in blocks if part_rows[..., block].any()] or blocks[:1] for part_rows in rows]
        whole = num_ranks % rank > 0 or num_ranks == rank or any(len(part_blocks) > 1 for part_blocks in used)
        for number, part in enumerate(self.tensor.parts):
            ranks = slice(None) if whole else used[number][0]
            part_magnitude = None if magnitude is None else self._rows(magnitude[..., None], number, _ONE)[..., 0]
            yield (
                module_path(part),
                None if whole else rank,
                Arrays(a[:, ranks], rows[number][..., ranks], part_magnitude),
            )

    def _rows(self, whole: np.ndarray, number: int, name: str) -> np.ndarray:
        """[layers, out, size] of one parameter, from [layers, all outputs, size]."""
        sizes = {**self.sizes, name: whole.shape[-1]}
        axes = (*self._outputs(self.tensor.parts[number]), name)
        layers = (layer.T if self._has_inputs_first else layer for layer in whole)
        rows = [self._with_inputs(name).read(layer, number, sizes, axes) for layer in layers]
        return np.stack([layer.reshape(-1, whole.shape[-1]) for layer in rows])

    @property
    def _has_inputs_first(self) -> bool:
        """As in GPT-2's files: then the parts are concatenated along the last dimension."""
        return self.tensor.along == len(self.tensor.parts[0].dims) - 1

    @property
    def _inputs(self) -> tuple[str, ...]:
        return self.tensor.parts[0].dims[0 if self._has_inputs_first else -1]

    def _with_inputs(self, name: str) -> Tensor:
        """The layout of the matrix with another axis in place of its inputs: that of B, with ranks."""
        replaced = (tuple((name,) if dim == self._inputs else dim for dim in part.dims) for part in self.tensor.parts)
        parts = (replace(part, dims=dims) for part, dims in zip(self.tensor.parts, replaced, strict=True))
        return replace(self.tensor, parts=tuple(parts))

    def _outputs(self, part: Part) -> tuple[str, ...]:
        """The output axes of a parameter, in the order of the file."""
        return tuple(axis for dim in part.dims if dim != self._inputs for axis in dim)


@dataclass(frozen=True)
class BaseRows:
    """Holds the vocabulary of a base.

    Attributes:
        name: of the base.
        num_rows: of its token embedding.
        open: its weights.
    """

    name: str
    num_rows: int
    open: Callable[[], TensorSource]

    def added_to(
        self, tensors: Mapping[str, np.ndarray], table: Sequence[Tensor], num_rows: int
    ) -> dict[str, np.ndarray]:
        """Adds the base's rows to an adapter's tensors: adapters do not change them, and copies have their values.

        Args:
            table: the table of weights.
            num_rows: of the trained model.

        Raises:
            ConfigError: the adapter has numbers that depend on the rows which the trained model does not have.
        """
        extended, missing = dict(tensors), self.num_rows - num_rows
        owners = [tensor for tensor in table if tensor.parts[0].dims[0] == (VOCAB,)] if missing > 0 else []
        for tensor in owners:
            module = f"{PREFIX}{module_name(tensor, None)}"
            if f"{module}.{MAGNITUDE}" in tensors:
                raise ConfigError(
                    f"{module_name(tensor, None)} has a DoRA adapter, whose magnitudes depend on the {missing} rows that"
                    f" {self.name} has and this model does not. Export the merged model: --adapters merge"
                )
            for name, axis in ((f"{module}.{EMBEDDING[0]}", 1), (f"{module}.{LINEAR[1]}", 0)):
                if name in tensors:
                    pads = [(0, missing if dim == axis else 0) for dim in range(2)]
                    extended[name] = np.pad(tensors[name], pads)
            for name in (f"{module}.weight", f"{module}.base_layer.weight"):
                if name in tensors:
                    rows = self._rows(tensor, owners[0])[num_rows:].astype(tensors[name].dtype)
                    extended[name] = np.concatenate([tensors[name], rows])
        return extended

    def _rows(self, tensor: Tensor, embedding: Tensor) -> np.ndarray:
        """The base's table. A tied head may not be in its file, whose names may begin later."""
        source = self.open()
        names = [name for name in source.tensors for one in (tensor, embedding) if one.name.endswith(name)]
        return source.view(min(names, key=lambda name: not tensor.name.endswith(name)))
