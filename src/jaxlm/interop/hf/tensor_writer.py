"""Converts a model's parameters to the tensors of a weight table, one at a time, and writes them to files."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.safetensors_file import TensorInfo, in_shards, shard_names, write_safetensors
from jaxlm.interop.hf.weights import Sizes, Tensor, expanded
from jaxlm.models.base import LanguageModel


class TensorWriter:
    """Converts a model's parameters to tensors and writes them to files."""

    def __init__(
        self, model: LanguageModel, tensors: Any, layout: Layout, dtype: np.dtype, left_out: Collection[str] = ()
    ):
        """Args: left_out: paths of parameters that no tensor has."""
        leaves = [(path, leaf) for path, leaf in tree.leaves(model) if path not in left_out]
        self._leaves = dict(leaves)
        self._layout = layout
        self._places: dict[str, tuple[Tensor, tuple[int, ...]]] = {
            name: (tensor, indices) for name, tensor, indices in expanded(tensors, self._sizes)
        }
        written = {part.path for tensor in tensors for part in tensor.parts}
        assert written == set(self._leaves), f"not in the table of weights: {sorted(written ^ set(self._leaves))}"
        self.infos = {
            name: TensorInfo(tensor.shape(self._sizes(tensor)), self._stored(tensor, dtype))
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

    def write(self, folder: Path, largest_file: int) -> None:
        """Writes the weights files, and an index if there are several."""
        shards = list(in_shards(self.infos, largest_file))
        files = shard_names(len(shards))
        for file, infos in zip(files, shards, strict=True):
            write_safetensors(folder / file, infos, self.arrays(list(infos)))
        if len(shards) > 1:
            total = sum(info.num_bytes for info in self.infos.values())
            where = {name: file for file, infos in zip(files, shards, strict=True) for name in infos}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _sizes(self, tensor: Tensor) -> Sizes:
        return tensor.sizes(self._leaves)

    def _stored(self, tensor: Tensor, dtype: np.dtype) -> np.dtype:
        """The dtype in the files: integers keep theirs."""
        leaf = self._leaves[tensor.parts[0].path]
        return dtype if tree.is_inexact(leaf) else np.dtype(leaf.dtype)

    def _on_host(self, leaf: hax.NamedArray, stacked: Sequence[str], numbers: tuple[int, ...]) -> np.ndarray:
        names = [axis.name for axis in leaf.axes]
        return np.asarray(self._whole(leaf.array, numbers, tuple(names.index(axis) for axis in stacked)))


def _at(array: jax.Array, numbers: tuple[jax.Array, ...], axes: tuple[int, ...]) -> jax.Array:
    """Indexes an array at one number of each of these axes."""
    for number, axis in sorted(zip(numbers, axes, strict=True), key=lambda pair: -pair[1]):
        array = jax.lax.dynamic_index_in_dim(array, number, axis, keepdims=False)
    return array
