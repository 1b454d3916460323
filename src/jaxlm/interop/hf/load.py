"""Loads weights from files directly into sharded arrays.

A host reads only the shards of its own devices, one shard of one parameter at a time, so its peak memory is one shard.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.tensor_files import TensorSource, renamed
from jaxlm.interop.hf.weights import Tensor, expanded
from jaxlm.models.base import LanguageModel

_HEADS = ("lm_head.weight", "embed_out.weight")  # files of models with tied embeddings may contain the head as well
_EMBEDDING = "tokens.weight"  # path of our parameter
_ROWS_AT_ONCE = 4096
_CHECKED_AT_ONCE = 1 << 18
_MAX_LISTED = 40
View = Callable[[tuple[int, ...], tuple[slice, ...]], tuple[str, np.ndarray]]
"""(Indices of the stacked axes, slices of the others) -> the tensor's file and name for messages, and that part of the
parameter."""
Change = Callable[[Iterator[hax.NamedArray]], Any]
"""What is made of a parameter, given its layers one by one (each with an axis `layers` of size 1), or all of it."""


def load_weights(
    abstract: LanguageModel,
    tensors: Sequence[Tensor],
    source: TensorSource,
    layout: Layout,
    *,
    where: str,
    prefix: str = "",
    unused: Sequence[str] = (),
    vocab_size: int | None = None,
    changes: Mapping[str, Change] | None = None,
) -> LanguageModel:
    """Loads a model with the shapes and dtypes of `abstract`, sharded by the layout's parameter mapping.

    Args:
        abstract: the model under `jax.eval_shape`.
        tensors: the table of weights.
        where: name of the source in messages.
        prefix: prefix of names in the table, which the source may omit from all of its names.
        unused: regular expressions for tensors that are not parameters.
        vocab_size: number of rows of the embedding according to the source's configuration; None if it has none.
        changes: path of a leaf -> what is made of it.

    Raises:
        ConfigError: lists all tensors that are missing, unexpected, or have another shape; or one has NaN or infinity.
    """
    leaves, source = dict(tree.leaves(abstract)), _head_as_embedding(tensors, source, prefix)
    omitted = _omitted(prefix, source)
    problems = misfits(tensors, source, leaves, prefix=prefix, unused=unused)
    if vocab_size is not None:
        problems += _cut_rows(tensors, omitted, source, vocab_size)
    _raise_if_any([*problems, *_lost_head(tensors, source, prefix)], where)
    places = {part.path: (tensor, number) for tensor in tensors for number, part in enumerate(tensor.parts)}
    unfilled = [path for path in leaves if path not in places]
    assert not unfilled, f"the table of weights has no row for {unfilled}"

    def load(path: str, leaf: Any) -> Any:
        tensor, number = places[path]
        sizes = tensor.sizes(leaves)

        def view(numbers: tuple[int, ...], wanted: tuple[slice, ...]) -> tuple[str, np.ndarray]:
            theirs = tensor.numbered(numbers).removeprefix(omitted)
            read = functools.partial(source.view, theirs)
            return source.where(theirs), tensor.read_region(read, number, sizes, tensor.own_axes(leaf), wanted)

        def whole(leaf: Any, view: View = view) -> hax.NamedArray:
            return hax.NamedArray(_load_sharded(leaf, tensor.stacked, view, layout), leaf.axes)

        if changes is None or path not in changes:
            return whole(leaf)
        if LAYERS not in tensor.stacked:
            return changes[path](iter([whole(leaf)]))
        at = tensor.stacked.index(LAYERS)

        def layer(first: int) -> hax.NamedArray:
            return whole(
                one, lambda numbers, wanted: view((*numbers[:at], numbers[at] + first, *numbers[at + 1 :]), wanted)
            )

        one = jax.eval_shape(lambda leaf: leaf[LAYERS, 0:1], leaf)
        return changes[path](map(layer, range(leaf.axis_size(LAYERS))))

    return tree.map_leaves(load, abstract)


def _omitted(prefix: str, source: TensorSource) -> str:
    """The part of the table's names that the source omits: the prefix, or nothing."""
    return "" if any(name.startswith(prefix) for name in source.tensors) else prefix


def differing_head(tensors: Sequence[Tensor], source: TensorSource, prefix: str) -> str | None:
    """The name of a head that the source has beside the token embedding, if their values differ."""
    embedding = _embedding(tensors).removeprefix(_omitted(prefix, source))
    head = next((name for name in _HEADS if name in source.tensors), None)
    if head is None or embedding not in source.tensors:
        return None
    if source.tensors[head].shape != source.tensors[embedding].shape:
        return head
    first, second = (np.atleast_1d(source.view(name)) for name in (embedding, head))
    starts = range(0, len(first), _ROWS_AT_ONCE)
    blocks = (slice(start, start + _ROWS_AT_ONCE) for start in starts)
    return None if all(np.array_equal(first[block], second[block]) for block in blocks) else head


def embedding_names(tensors: Sequence[Tensor], source: TensorSource, prefix: str) -> tuple[str, ...]:
    """The names of the table for the tensors that a source has as its token embedding, if its head is the same."""
    omitted = _omitted(prefix, source)
    names = {name: name.removeprefix(omitted) for name in (_embedding(tensors), *_HEADS)}
    dtypes = {name: source.tensors[theirs].dtype for name, theirs in names.items() if theirs in source.tensors}
    return tuple(dtypes) if len({*dtypes.values()}) == 1 else ()


def with_tied_names(tensors: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """A table of weights that writes the embedding by all of these names, unless it has a head or there are none."""
    if not names or any(tensor.name in _HEADS for tensor in tensors):
        return [*tensors]
    written = {_embedding(tensors): names}
    return [replace(tensor, name=name) for tensor in tensors for name in written.get(tensor.name, (tensor.name,))]


def with_copies(tensors: Sequence[Tensor], copies: Mapping[str, str], config: Any) -> list[Tensor]:
    """A table of weights that writes tensors by further names too. Args: copies: of a `SourceFolder`."""
    rows = {tensor.name: tensor for tensor in tensors}
    return [*tensors, *(replace(rows[of], name=name.format(layer=config.num_layers)) for name, of in copies.items())]


def _head_as_embedding(tensors: Sequence[Tensor], source: TensorSource, prefix: str) -> TensorSource:
    """The source with its head as token embedding, if the model ties the two and the source has only the head."""
    embedding = _embedding(tensors).removeprefix(_omitted(prefix, source))
    head = next((name for name in _HEADS if name in source.tensors), None)
    if head is None or embedding in source.tensors or any(tensor.name in _HEADS for tensor in tensors):
        return source
    return renamed(source, {re.escape(head): embedding, "(.*)": r"\1"})


def _lost_head(tensors: Sequence[Tensor], source: TensorSource, prefix: str) -> list[str]:
    if any(tensor.name in _HEADS for tensor in tensors):
        return []
    head = differing_head(tensors, source, prefix)
    fix = "Set model.tie_word_embeddings: false"
    return [] if head is None else [f"{head}: differs from the token embedding, but the model ties the two. {fix}"]


def _embedding(tensors: Sequence[Tensor]) -> str:
    return next(tensor.name for tensor in tensors if tensor.parts[0].path == _EMBEDDING)


def _cut_rows(tensors: Sequence[Tensor], omitted: str, source: TensorSource, vocab_size: int) -> list[str]:
    name = _embedding(tensors).removeprefix(omitted)
    rows = source.tensors[name].shape[0] if name in source.tensors and source.tensors[name].shape else 0
    if rows <= vocab_size:
        return []
    return [f"{name}: {rows} rows in the file, but vocab_size is {vocab_size} in config.json, which would cut rows"]


def misfits(
    tensors: Sequence[Tensor],
    source: TensorSource,
    leaves: Mapping[str, Any],
    *,
    prefix: str,
    unused: Sequence[str] = (),
) -> list[str]:
    """The tensors that are missing, unexpected, or have another shape. Arguments as of `load_weights`."""
    available, omitted = source.tensors, _omitted(prefix, source)
    problems, expected = [], set()
    for name, tensor, _ in expanded(tensors, lambda tensor: tensor.sizes(leaves)):
        theirs, shape = name.removeprefix(omitted), tensor.shape(tensor.sizes(leaves))
        expected.add(theirs)
        if theirs not in available:
            problems.append(f"{theirs}: missing; {list(shape)} expected")
        elif not _fits(available[theirs].shape, shape, tensor.longer_dims()):
            problems.append(f"{theirs}: {list(available[theirs].shape)} in the file, {list(shape)} expected")
        elif tree.is_inexact(leaves.get(tensor.parts[0].path)) and not is_floating(available[theirs].dtype):
            problems.append(f"{theirs}: {available[theirs].dtype} in the file, a floating-point dtype expected")
    for name, info in available.items():
        if name not in expected and name not in _HEADS and not any(re.search(pattern, name) for pattern in unused):
            problems.append(f"{name}: {list(info.shape)} in the file, but not used by the model")
    return problems


def _raise_if_any(problems: Sequence[str], where: str) -> None:
    if problems:
        more = f"\n  ... and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise ConfigError(
            f"{where}: the weights do not fit the model:\n"
            + "\n".join(f"  {line}" for line in problems[:_MAX_LISTED])
            + more
            + "\nNothing was loaded. Check that config.json, or the model section, is the one these weights were saved with"
        )


def _fits(theirs: tuple[int, ...], ours: tuple[int, ...], longer: set[int]) -> bool:
    return len(theirs) == len(ours) and all(
        in_file == in_model or (dim in longer and in_file > in_model)
        for dim, (in_file, in_model) in enumerate(zip(theirs, ours, strict=True))
    )


def _load_sharded(leaf: Any, stacked: Sequence[str], view: View, layout: Layout) -> jax.Array:
    """Loads one parameter, one shard at a time."""
    shape, dtype = leaf.array.shape, leaf.array.dtype
    sharding = layout.parameter_sharding(leaf.axes)
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    axes = [axis.name for axis in leaf.axes]
    shards = []
    for bounds, devices in holders.items():
        block = _read_shard(tuple(slice(*pair) for pair in bounds), axes, stacked, dtype, view)
        shards += [jax.device_put(block, device) for device in devices]
        jax.block_until_ready(shards)
        del block  # free it before the next one is allocated
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _read_shard(
    index: tuple[slice, ...], axes: Sequence[str], stacked: Sequence[str], dtype: Any, view: View
) -> np.ndarray:
    """Reads one shard of a parameter.

    Args:
        stacked: axes of the parameter that have one tensor per index.
    """
    stacked_dims = [axes.index(axis) for axis in stacked]
    unstacked = tuple(part for dim, part in enumerate(index) if dim not in stacked_dims)
    block = np.empty([part.stop - part.start for part in index], dtype)
    by_number = np.moveaxis(block, stacked_dims, range(len(stacked_dims)))
    starts = [index[dim].start for dim in stacked_dims]
    for offsets in itertools.product(*(range(size) for size in by_number.shape[: len(stacked_dims)])):
        numbers = tuple(start + offset for start, offset in zip(starts, offsets, strict=True))
        where, part = view(numbers, unstacked)
        by_number[(*offsets, ...)] = part
        if not is_finite(by_number[(*offsets, ...)]):
            raise ConfigError(f"{where} has NaN or infinity as {np.dtype(dtype)}. Download or export the file again")
    return block


def is_floating(dtype: np.dtype) -> bool:
    """Tells whether a dtype has floating-point numbers, also those that numpy does not know."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_finite(part: np.ndarray) -> bool:
    """Compares bits, in blocks: np.isfinite needs ten times as long for bfloat16, and memory for the whole part."""
    if not is_floating(part.dtype):
        return True
    kind = np.dtype(f"u{part.dtype.itemsize}").type
    bits, without_sign = part.reshape(-1).view(kind), kind(np.iinfo(kind).max >> 1)
    infinity = np.array(np.inf, part.dtype).view(kind)
    starts = range(0, bits.size, _CHECKED_AT_ONCE)
    return all((bits[start : start + _CHECKED_AT_ONCE] & without_sign).max() < infinity for start in starts)
