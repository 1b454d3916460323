"""Weight tables for import and export, and entries of them that families share.

A layout lists the tensor's dimensions, each as a product of named axes: `heads head_size | embed` is a matrix whose rows
are the features of all heads. It omits the axes `layers`, `value_layers` and `experts` if the files have one tensor per
layer or expert. If they have one tensor with all experts of a layer, its name has no `{expert}`, and its layout has the axis:
`experts | mlp | embed`.
"""

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import EXPERTS, LAYERS, SHARED_MLP, VALUE_LAYERS
from jaxlm.core.parameters import declared
from jaxlm.core.publish import PublishError
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.safetensors_file import TensorInfo, in_shards, shard_names, write_safetensors
from jaxlm.interop.hf.stored_formats import StoredView
from jaxlm.interop.hf.tensor_files import Region, TensorSource
from jaxlm.models.base import LanguageModel
from jaxlm.models.stacks import numbers_by_stack

Sizes = dict[str, int]
_COMPARED_AT_ONCE = 1 << 24
_DECODE = "Set hf_stored_format: decode (jaxlm convert: --stored_format decode)"
_LAYERS = {LAYERS: "layer", VALUE_LAYERS: "value_layer"}
_NUMBERS = {
    **_LAYERS,
    EXPERTS: "expert",
    "heads": "head",
    "kv_heads": "kv_head",
}  # axis -> placeholder for its index in tensor names
_MAY_BE_LONGER = (("vocab",), ("position",))  # in a file than in the model; the additional rows are ignored


@dataclass(frozen=True)
class Part:
    """A parameter within a tensor.

    Attributes:
        path: path of the leaf, as in `jaxlm.core.tree`.
        dims: dimensions of the tensor, each as a product of named axes.
    """

    path: str
    dims: tuple[tuple[str, ...], ...]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(int(np.prod([sizes[axis] for axis in dim], dtype=int)) for dim in self.dims)


@dataclass(frozen=True)
class Tensor:
    """A tensor in Hugging Face format.

    Attributes:
        name: tensor name, with `{layer}` (or `{value_layer}`), `{expert}`, `{head}` and `{kv_head}` as placeholders if there
            is one tensor per layer, expert or head.
        parts: the parameters that are concatenated in it.
        along: dimension of the concatenation.
        merged: number of leading dimensions that are stored as one. GPT-NeoX concatenates queries, keys and values
            within each head.
        interleaved: the parts take turns along the dimension of the concatenation (gate 0, up 0, gate 1, up 1, ...) instead
            of following one another. They have the same size there.
        numbers: the number in the name for each index of the first stacked axis; None counts from 0.
    """

    name: str
    parts: tuple[Part, ...]
    along: int = 0
    merged: int = 1
    numbers: tuple[int, ...] | None = None
    interleaved: bool = False

    @property
    def stacked(self) -> tuple[str, ...]:
        """The axes that have one tensor per index."""
        return tuple(axis for axis, number in _NUMBERS.items() if f"{{{number}}}" in self.name)

    @property
    def is_stacked(self) -> bool:
        """Tells whether there is one tensor per layer."""
        return LAYERS in self.stacked

    def own_axes(self, leaf: Any) -> list[str]:
        """Names of a leaf's axes, without the stacked ones."""
        return [axis.name for axis in leaf.axes if axis.name not in self.stacked]

    def numbered(self, indices: Sequence[int]) -> str:
        """The tensor's name for one index of each stacked axis."""
        in_name = [*indices]
        if self.numbers is not None:
            in_name[0] = self.numbers[indices[0]]
        return self.name.format(**{_NUMBERS[axis]: n for axis, n in zip(self.stacked, in_name, strict=True)})

    def sizes(self, leaves: Mapping[str, Any]) -> Sizes:
        """Sizes of the axes of its parameters. Args: leaves: path -> parameter."""
        return axis_sizes([(part.path, leaves[part.path]) for part in self.parts if part.path in leaves])

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Shape of the tensor in the files, for a model with these axis sizes."""
        shape = self._unmerged(sizes)
        return (int(np.prod(shape[: self.merged])), *shape[self.merged :])

    def read(self, theirs: np.ndarray, number: int, sizes: Sizes, axes: Sequence[str]) -> np.ndarray:
        """Part `number` of the tensor, as a view with the given axes (without stacked ones) in this order."""
        return self.read_region(theirs.__getitem__, number, sizes, axes, [slice(0, sizes[axis]) for axis in axes])

    def read_region(
        self,
        view: Callable[[Region], np.ndarray],
        number: int,
        sizes: Sizes,
        axes: Sequence[str],
        wanted: Sequence[slice],
    ) -> np.ndarray:
        """As `read`, of slices of the axes. Args: view: a region of the tensor -> its numbers."""
        part = self.parts[number]
        slices = dict(zip(axes, wanted, strict=True))
        region, read = [], Sizes()  # whole rows, columns, ... which have the wanted numbers of a dimension's first axis
        for dim in part.dims:
            read |= {axis: sizes[axis] for axis in dim}
            inner, outer = math.prod(sizes[axis] for axis in dim[1:]), slices[dim[0]] if dim else slice(0, 1)
            read |= dict.fromkeys(dim[:1], outer.stop - outer.start)
            region.append(slice(outer.start * inner, outer.stop * inner))
        before, rows = sum(part.shape(sizes)[self.along] for part in self.parts[:number]), region[self.along]
        region[self.along] = slice(before + rows.start, before + rows.stop)
        if self.interleaved:
            count = len(self.parts)
            region[self.along] = slice(number + count * rows.start, count * rows.stop, count)
        whole = view(()).reshape(self._unmerged(sizes)) if self.merged > 1 else None
        section = view(tuple(region)) if whole is None else whole[tuple(region)]
        order, first = list(read), {dim[0] for dim in part.dims if dim}
        array = section.reshape(list(read.values())).transpose([order.index(axis) for axis in axes])
        return array[tuple(slice(None) if axis in first else slices[axis] for axis in axes)]

    def write(self, parts: Sequence[np.ndarray], axes: Sequence[Sequence[str]], sizes: Sizes) -> np.ndarray:
        """Combines parameters to a tensor. `axes` has the axis names of each parameter (without stacked ones)."""
        arranged = []
        for part, array, names in zip(self.parts, parts, axes, strict=True):
            order = [axis for dim in part.dims for axis in dim]
            arranged.append(array.transpose([list(names).index(axis) for axis in order]).reshape(part.shape(sizes)))
        if self.interleaved:
            return np.stack(arranged, axis=self.along + 1).reshape(self.shape(sizes))
        return np.concatenate(arranged, axis=self.along).reshape(self.shape(sizes))

    def longer_dims(self) -> set[int]:
        """Dimensions that may be longer in the file than in the model."""
        first, *others = self.parts
        return set() if others else {i for i, dim in enumerate(first.dims) if dim in _MAY_BE_LONGER}

    def _unmerged(self, sizes: Sizes) -> tuple[int, ...]:
        shapes = [part.shape(sizes) for part in self.parts]
        whole = [*shapes[0]]
        whole[self.along] = sum(shape[self.along] for shape in shapes)
        return tuple(whole)


def single(name: str, path: str, layout: str) -> Tensor:
    """A tensor with a single parameter."""
    return fused(name, {path: layout})


def fused(name: str, parts: dict[str, str], *, along: int = 0, merged: int = 1, interleaved: bool = False) -> Tensor:
    """A tensor with several parameters, given as path -> layout."""
    dims = {path: tuple(tuple(dim.split()) for dim in layout.split("|")) for path, layout in parts.items()}
    sections = tuple(Part(path, part_dims) for path, part_dims in dims.items())
    return Tensor(name, sections, along, merged, interleaved=interleaved)


def expanded(
    tensors: Sequence[Tensor], sizes: Callable[[Tensor], Sizes]
) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """(name, tensor, indices of its stacked axes) for every tensor in the files, layer by layer.

    Args:
        sizes: axis sizes of a tensor's parameters.
    """
    for tensor in tensors:
        if not tensor.stacked:
            yield tensor.name, tensor, ()
    for axis in _LAYERS:
        stacked_tensors = [tensor for tensor in tensors if tensor.stacked[:1] == (axis,)]
        layers = [
            (number, tensor, index)
            for tensor in stacked_tensors
            for index, number in enumerate(tensor.numbers or range(sizes(tensor).get(axis, 0)))
        ]
        for _, tensor, index in sorted(layers, key=lambda layer: layer[0]):
            for rest in itertools.product(*(range(sizes(tensor)[axis]) for axis in tensor.stacked[1:])):
                yield tensor.numbered((index, *rest)), tensor, (index, *rest)


def axis_sizes(leaves: Sequence[tuple[str, Any]]) -> Sizes:
    """Sizes of all axes of the named leaves."""
    return {axis.name: axis.size for _, leaf in leaves for axis in leaf.axes}


BLOCK = "body.layers.stacked."
"""Path prefix of the parameters of all layers."""
HEADS = {"q_proj": "heads head_size", "k_proj": "kv_heads head_size", "v_proj": "kv_heads head_size"}
"""Output axes of the query, key and value projections."""


def embeddings_and_head(config: Any, *, final_norm: bool = True) -> Iterator[Tensor]:
    """Embedding, final norm and head, with Llama's names. Args: final_norm: whether the final norm has a weight."""
    yield single("model.embed_tokens.weight", "tokens.weight", "vocab | embed")
    if final_norm:
        yield single("model.norm.weight", "body.final_norm.weight", "embed")
    if not config.tie_word_embeddings:
        yield single("lm_head.weight", "head.weight", "vocab | embed")


def attention(*, qkv_bias: bool = False, out_bias: bool = False) -> Iterator[Tensor]:
    """Query, key, value and output projections as separate tensors."""
    layer = "model.layers.{layer}.self_attn."
    for name, out in HEADS.items():
        yield single(f"{layer}{name}.weight", f"{BLOCK}attn.{name}.weight", f"{out} | embed")
        if qkv_bias:
            yield single(f"{layer}{name}.bias", f"{BLOCK}attn.{name}.bias", out)
    yield single(f"{layer}o_proj.weight", f"{BLOCK}attn.o_proj.weight", "embed | heads head_size")
    if out_bias:
        yield single(f"{layer}o_proj.bias", f"{BLOCK}attn.o_proj.bias", "embed")


def qk_norms(
    q: str = "head_size", k: str = "head_size", *, theirs: tuple[str, str] = ("q_norm", "k_norm")
) -> Iterator[Tensor]:
    """Query and key norms over these axes: by default over each head. Args: theirs: their names in a layer's attention."""
    for ours, name, axes in (("q_norm", theirs[0], q), ("k_norm", theirs[1], k)):
        yield single(f"model.layers.{{layer}}.self_attn.{name}.weight", f"{BLOCK}attn.{ours}.weight", axes)


def gated_mlp(
    *, use_bias: bool = False, theirs: str = "mlp", ours: str = "mlp", features: str = "mlp"
) -> Iterator[Tensor]:
    """Gate, up and down projections.

    Args:
        theirs, ours: names of the MLP in a block.
        features: axis of its hidden features.
    """
    inwards = (("gate_proj", features, "embed"), ("up_proj", features, "embed"))
    for name, out, into in (*inwards, ("down_proj", "embed", features)):
        names = f"model.layers.{{layer}}.{theirs}.{name}", f"{BLOCK}{ours}.{name}"
        yield single(f"{names[0]}.weight", f"{names[1]}.weight", f"{out} | {into}")
        if use_bias:
            yield single(f"{names[0]}.bias", f"{names[1]}.bias", out)


def fused_gated_mlp() -> Iterator[Tensor]:
    """Gate and up projections as one matrix, and the down projection."""
    layer = "model.layers.{layer}.mlp."
    gate_up = {f"{BLOCK}mlp.{name}.weight": "mlp | embed" for name in ("gate_proj", "up_proj")}
    yield fused(f"{layer}gate_up_proj.weight", gate_up)
    yield single(f"{layer}down_proj.weight", f"{BLOCK}mlp.down_proj.weight", "embed | mlp")


def expert_rows(
    module: str = "mlp", *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Iterator[Tensor]:
    """A router and its experts.

    Args:
        module: name of the MoE module in a layer.
        gate, up, down: names of an expert's projections.
    """
    layer = f"model.layers.{{layer}}.{module}."
    yield single(f"{layer}gate.weight", f"{BLOCK}mlp.router.weight", "routes | embed")
    for theirs, ours, layout in (
        (gate, "gate", "mlp | embed"),
        (up, "up", "mlp | embed"),
        (down, "down", "embed | mlp"),
    ):
        yield single(f"{layer}experts.{{expert}}.{theirs}.weight", f"{BLOCK}mlp.{ours}_proj.weight", layout)


def correction_bias(module: str) -> Tensor:
    """The bias of a router. Args: module: the module in a layer that has it in the files."""
    name = f"model.layers.{{layer}}.{module}.e_score_correction_bias"
    return single(name, f"{BLOCK}mlp.routing.correction_bias", "routes")


def shared_expert_rows(theirs: str = "shared_expert", *, gate: bool = True) -> Iterator[Tensor]:
    """The expert that all tokens share. Args: theirs: its name in `mlp`; gate: whether it has one."""
    yield from gated_mlp(theirs=f"mlp.{theirs}", ours="shared_expert.mlp", features=SHARED_MLP)
    if gate:
        yield single(f"model.layers.{{layer}}.mlp.{theirs}_gate.weight", f"{BLOCK}shared_expert.gate", "| embed")


def stacked_expert_rows(
    module: str = "mlp",
    names: tuple[str, str, str] = ("gate.weight", "experts.gate_up_proj", "experts.down_proj"),
    *,
    inputs_first: bool = False,
    interleaved: bool = False,
    use_bias: bool = False,
) -> Iterator[Tensor]:
    """A router and its experts, all of a layer in one tensor [experts, out, in] for gate and up and one for down.

    Args:
        module: name of the MoE module in a layer.
        names: of the three tensors in it.
        inputs_first: they are stored as [experts, in, out].
        interleaved: the features of gate and up take turns, instead of all of gate before those of up.
        use_bias: router and experts have biases: `router.bias` beside `router.weight`, and `experts.down_proj_bias`.
    """
    layer = f"model.layers.{{layer}}.{module}."
    inwards, outwards = "experts | mlp | embed", "experts | embed | mlp"
    if inputs_first:
        inwards, outwards = outwards, inwards
    gate_up = {f"{BLOCK}mlp.{name}_proj.weight": inwards for name in ("gate", "up")}
    yield single(f"{layer}{names[0]}", f"{BLOCK}mlp.router.weight", "routes | embed")
    yield fused(f"{layer}{names[1]}", gate_up, along=2 if inputs_first else 1, interleaved=interleaved)
    yield single(f"{layer}{names[2]}", f"{BLOCK}mlp.down_proj.weight", outwards)
    if use_bias:
        gate_up = {f"{BLOCK}mlp.{name}_proj.bias": "experts | mlp" for name in ("gate", "up")}
        yield single(f"{layer}{names[0].removesuffix('weight')}bias", f"{BLOCK}mlp.router.bias", "routes")
        yield fused(f"{layer}{names[1]}_bias", gate_up, along=1, interleaved=interleaved)
        yield single(f"{layer}{names[2]}_bias", f"{BLOCK}mlp.down_proj.bias", "experts | embed")


def rows_by_stack(
    config: Any, others: Iterable[Tensor], *, experts: Iterable[Tensor], dense: Iterable[Tensor]
) -> Iterator[Tensor]:
    """The table of a family with experts, some of whose layers may be dense.

    Args:
        others: rows outside the layers.
        experts, dense: rows of the layers with experts, and of the dense ones, as if the model had one stack of them.
    """
    experts, dense = tuple(experts), tuple(dense)
    return in_stacks(config, others, lambda layer: dense if layer in config.dense_layers else experts)


def in_stacks(config: Any, others: Iterable[Tensor], rows_of: Callable[[int], Iterable[Tensor]]) -> Iterator[Tensor]:
    """The table of a family whose layers may differ in their parameters.

    Args:
        others: rows outside the layers.
        rows_of: the number of a layer -> the rows of layers like it, as if the model had one stack of them.
    """
    stacks = numbers_by_stack(config.stack_of_layer)
    for tensor in others:
        yield _in_stack(tensor, len(stacks) - 1, None) if len(stacks) > 1 else tensor
    for number, layers in enumerate(stacks):
        for tensor in rows_of(layers[0]):
            yield _in_stack(tensor, number, layers) if len(stacks) > 1 else tensor


def _in_stack(tensor: Tensor, number: int, layers: tuple[int, ...] | None) -> Tensor:
    """A row whose parameters in the body are those of one of several stacks."""
    body, stack = "body.", f"body.{number}."
    parts = (
        replace(part, path=stack + part.path.removeprefix(body)) if part.path.startswith(body) else part
        for part in tensor.parts
    )
    return replace(tensor, parts=tuple(parts), numbers=layers)


def block_norms(**names: str) -> Iterator[Tensor]:
    """Norms of a block, as name in jaxlm=name in the files."""
    for ours, theirs in names.items():
        yield single(f"model.layers.{{layer}}.{theirs}.weight", f"{BLOCK}{ours}.weight", "embed")


def pre_norms() -> Iterator[Tensor]:
    """The two norms of Llama's blocks."""
    return block_norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")


class TensorWriter:
    """Converts a model's parameters to tensors and writes them to files."""

    def __init__(
        self,
        model: LanguageModel,
        tensors: Any,
        layout: Layout,
        dtype: Callable[[str, bool], np.dtype],
        left_out: Collection[str] = (),
    ):
        """Args: dtype: (name of a tensor, whether its parameters are float32 in each precision) -> dtype in the files.
        left_out: paths of parameters that no tensor has."""
        leaves = [(path, leaf) for path, leaf in tree.leaves(model) if path not in left_out]
        self._leaves = dict(leaves)
        self._layout = layout
        self._float32 = {path for path, parameter in declared(model).items() if parameter.float32}
        self._places: dict[str, tuple[Tensor, tuple[int, ...]]] = {
            name: (tensor, indices) for name, tensor, indices in expanded(tensors, self._sizes)
        }
        written = {part.path for tensor in tensors for part in tensor.parts}
        assert written == set(self._leaves), f"not in the table of weights: {sorted(written ^ set(self._leaves))}"
        self.infos = {
            name: TensorInfo(tensor.shape(self._sizes(tensor)), self._stored(name, tensor, dtype))
            for name, (tensor, _) in self._places.items()
        }
        self._left = dict.fromkeys(self.infos)  # tensors that have not been converted
        # Compiled once per shape: selects the parameter of one tensor and replicates it to every device.
        self._whole: Callable[..., jax.Array] = jax.jit(_at, static_argnums=2, out_shardings=layout.replicated())

    def arrays(self, names: list[str]) -> Iterator[np.ndarray]:
        """Yields the tensors one at a time."""
        for name in names:
            tensor, numbers = self._places[name]
            leaves = [self._leaves[part.path] for part in tensor.parts]
            hosted = [self._on_host(leaf, tensor.stacked, numbers).astype(self.infos[name].dtype) for leaf in leaves]
            del self._left[name]
            yield tensor.write(hosted, [tensor.own_axes(leaf) for leaf in leaves], self._sizes(tensor))

    def join_others(self) -> None:
        """Takes part in the conversion of all tensors that are left, for the processes that need them."""
        for _ in self.arrays(list(self._left)):
            pass

    def write(
        self, folder: Path, largest_file: int, others: TensorSource | None = None, stored: StoredView | None = None
    ) -> None:
        """Writes the weights files, and an index if there are several.

        Args:
            others: more tensors, to be copied.
            stored: the source, with tensors that are copied in their stored form.

        Raises:
            PublishError: a tensor differs from the one that is to be copied in its stored form, or is not in the source.
        """
        copied = {} if others is None else others.tensors
        all_infos, stored_in = {}, {}
        for name, info in {**self.infos, **copied}.items():
            if stored is not None and name not in stored.tensors:
                raise PublishError(f"cannot keep stored weights: the source has no {name}. {_DECODE}")
            if stored is None or name not in stored.stored:
                all_infos[name] = info
                continue
            pieces = stored.stored[name].names
            all_infos |= {piece: stored.source.tensors[piece] for piece in pieces}
            stored_in |= {piece: name if piece == pieces[0] else "" for piece in pieces}

        def whole(name: str) -> Iterator[np.ndarray]:
            if others is not None and name in copied:
                yield others.view(name)
            else:
                yield from self.arrays([name])

        def arrays(names: Iterable[str]) -> Iterator[np.ndarray]:
            for name in names:
                if stored is None or name not in stored_in:
                    yield from whole(name)
                    continue
                for array in whole(stored_in[name]) if stored_in[name] else ():
                    self._check_same(stored_in[name], array, stored)
                yield stored.source.view(name)

        shards = list(in_shards(all_infos, largest_file))
        files = shard_names(len(shards))
        for file, infos in zip(files, shards, strict=True):
            write_safetensors(folder / file, infos, arrays(infos))
        if len(shards) > 1:
            total = sum(info.num_bytes for info in all_infos.values())
            where = {name: file for file, infos in zip(files, shards, strict=True) for name in infos}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _check_same(self, name: str, array: np.ndarray, stored: StoredView) -> None:
        """Checks that a tensor has the numbers that the stored one stands for, a part of its rows at a time."""
        leaf = self._leaves[self._places[name][0].parts[0].path] if name in self._places else array
        rows = max(1, _COMPARED_AT_ONCE // max(1, array[:1].size))
        for start in range(0, len(array), rows):
            part = stored.view(name, (slice(start, start + rows),)).astype(leaf.dtype).astype(array.dtype)
            if not np.array_equal(part, array[start : start + rows]):
                raise PublishError(
                    f"cannot keep {name} in its stored form: it was trained, or its source changed. {_DECODE}"
                )

    def _sizes(self, tensor: Tensor) -> Sizes:
        return tensor.sizes(self._leaves)

    def _stored(self, name: str, tensor: Tensor, dtype: Callable[[str, bool], np.dtype]) -> np.dtype:
        """The dtype in the files: integers keep theirs."""
        leaf = self._leaves[tensor.parts[0].path]
        is_float32 = any(part.path in self._float32 for part in tensor.parts)
        return dtype(name, is_float32) if tree.is_inexact(leaf) else np.dtype(leaf.dtype)

    def _on_host(self, leaf: hax.NamedArray, stacked: Sequence[str], numbers: tuple[int, ...]) -> np.ndarray:
        names = [axis.name for axis in leaf.axes]
        return np.asarray(self._whole(leaf.array, numbers, tuple(names.index(axis) for axis in stacked)))


def _at(array: jax.Array, numbers: tuple[jax.Array, ...], axes: tuple[int, ...]) -> jax.Array:
    """Indexes an array at one number of each of these axes."""
    for number, axis in sorted(zip(numbers, axes, strict=True), key=lambda pair: -pair[1]):
        array = jax.lax.dynamic_index_in_dim(array, number, axis, keepdims=False)
    return array
