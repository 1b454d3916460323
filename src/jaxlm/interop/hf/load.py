"""Weights from files of theirs, each slice straight to the device where it rests.

A host reads only what its own devices hold, one device's share of one parameter at a time; beside what the devices
hold themselves, no more than that is in memory.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import haliax as hax
import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.tensor_files import TensorSource
from jaxlm.interop.hf.weights import Sizes, Tensor, axis_sizes, expanded
from jaxlm.models.base import LanguageModel

_HEADS = ("lm_head.weight", "embed_out.weight")  # in files of tied models too, where the embedding stands for it
_MOST_SHOWN = 40
View = Callable[[tuple[int, ...]], np.ndarray]
"""Numbers of the stacked axes -> our part of that tensor of theirs."""


def load_weights(
    abstract: LanguageModel,
    tensors: Sequence[Tensor],
    source: TensorSource,
    layout: Layout,
    *,
    where: str,
    prefix: str = "",
    unused: Sequence[str] = (),
) -> LanguageModel:
    """The model with the numbers of a source, in the shapes, dtypes and places of `abstract`.

    Args:
        abstract: of `jax.eval_shape`.
        tensors: the table of weights.
        where: what the source is called in messages.
        prefix: of names in the table, which all of the source's may lack.
        unused: regular expressions of names that are no parameters.

    Raises:
        ConfigError: tensors that are missing, that nothing reads, or that have another shape; all are named.
    """
    leaves = tree.leaves(abstract)
    sizes = axis_sizes(leaves)
    names = _Names(source, prefix)
    _check(tensors, names, source, sizes, where, unused)
    places = {part.path: (tensor, number) for tensor in tensors for number, part in enumerate(tensor.parts)}
    unfilled = [path for path, _ in leaves if path not in places]
    assert not unfilled, f"the table of weights has no row for {unfilled}"

    def placed(path: str, leaf: Any) -> Any:
        tensor, number = places[path]

        def view(numbers: tuple[int, ...]) -> np.ndarray:
            return tensor.read(source.view(names.of(tensor.numbered(numbers))), number, sizes, tensor.own_axes(leaf))

        return hax.NamedArray(_spread(leaf, tensor.stacked, view, layout), leaf.axes)

    return tree.map_leaves(placed, abstract)


class _Names:
    """The source's names for those of the table."""

    def __init__(self, source: TensorSource, prefix: str):
        bare = bool(prefix) and not any(name.startswith(prefix) for name in source.tensors)
        self._prefix = prefix if bare else ""

    def of(self, name: str) -> str:
        return name.removeprefix(self._prefix)


def _check(
    tensors: Sequence[Tensor], names: _Names, source: TensorSource, sizes: Sizes, where: str, unused: Sequence[str]
) -> None:
    there = source.tensors
    problems, wanted = [], set()
    for name, tensor, _ in expanded(tensors, sizes):
        theirs, shape = names.of(name), tensor.shape(sizes)
        wanted.add(theirs)
        if theirs not in there:
            problems.append(f"{theirs}: missing; {list(shape)} expected")
        elif not _fits(there[theirs].shape, shape, tensor.longer_dims()):
            problems.append(f"{theirs}: {list(there[theirs].shape)} in the file, {list(shape)} expected")
    for name, info in there.items():
        if name not in wanted and name not in _HEADS and not any(re.search(pattern, name) for pattern in unused):
            problems.append(f"{name}: {list(info.shape)} in the file, and nothing in the model reads it")
    if problems:
        more = f"\n  ... and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        raise ConfigError(
            f"{where}: the weights are not those of the model:\n"
            + "\n".join(f"  {line}" for line in problems[:_MOST_SHOWN])
            + more
            + "\nNothing was loaded. Is config.json, or the model section, the one that these weights were saved with?"
        )


def _fits(theirs: tuple[int, ...], ours: tuple[int, ...], longer: set[int]) -> bool:
    return len(theirs) == len(ours) and all(
        there == here or (dim in longer and there > here)
        for dim, (there, here) in enumerate(zip(theirs, ours, strict=True))
    )


def _spread(leaf: Any, stacked: Sequence[str], view: View, layout: Layout) -> jax.Array:
    """One parameter; every device's share is read when its turn comes."""
    shape, dtype = leaf.array.shape, leaf.array.dtype
    sharding = layout.parameter_sharding(leaf.axes)
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        exact = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        holders.setdefault(exact, []).append(device)
    axes = [axis.name for axis in leaf.axes]
    shards = []
    for bounds, devices in holders.items():
        block = _read(tuple(slice(*pair) for pair in bounds), axes, stacked, dtype, view)
        shards += [jax.device_put(block, device) for device in devices]
        jax.block_until_ready(shards)
        del block  # before the next one is made
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _read(index: tuple[slice, ...], axes: Sequence[str], stacked: Sequence[str], dtype: Any, view: View) -> np.ndarray:
    """A share of a parameter. Args: stacked: those of its axes of which each number is a tensor of its own."""
    at = [axes.index(axis) for axis in stacked]
    own = tuple(part for place, part in enumerate(index) if place not in at)
    block = np.empty([part.stop - part.start for part in index], dtype)
    by_number = np.moveaxis(block, at, range(len(at)))
    starts = [index[place].start for place in at]
    for offsets in itertools.product(*(range(size) for size in by_number.shape[: len(at)])):
        numbers = tuple(start + offset for start, offset in zip(starts, offsets, strict=True))
        by_number[(*offsets, ...)] = view(numbers)[own]
    return block
