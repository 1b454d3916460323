"""Norms and histograms of gradients, parameters, updates and optimizer state, computed inside the step: `trainer.watch`."""

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import STACKED_LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.values.logged import Histogram

NUM_BINS = 64
Numbers = dict[str, Any]
# Target -> its prefix in metric names.
_NAMES = {"grads": "grad", "params": "params", "opt_state": "opt_state", "updates": "updates"}


@dataclass(frozen=True)
class WatchConfig:
    """Logs norms and histograms of values inside the training step.

    Attributes:
        watch_targets: what to log: any of `grads`, `params`, `updates`, `opt_state` and `batch`. `batch` logs a hash of the
            step's batch that does not depend on the mesh.
        include_norms: log the global norm of each target.
        include_per_parameter_norms: log the norm of each array in each target.
        include_histograms: log a histogram with 64 equal-width bins of each array. Histograms are written to
            `<log_dir>/<id>/histograms.jsonl` and sent to TensorBoard and wandb.
        split_scan_layers: log each layer separately if layers are stacked in one array.
        interval: log every `interval` steps.
    """

    watch_targets: list[Literal["grads", "params", "updates", "opt_state", "batch"]] = field(
        default_factory=lambda: ["grads", "params"]
    )
    include_norms: bool = True
    include_per_parameter_norms: bool = True
    include_histograms: bool = False
    split_scan_layers: bool = True
    interval: PositiveInt = 10

    def check(self) -> None:
        """Raises `ConfigError` if nothing would ever be logged."""
        includes_any = self.include_norms or self.include_per_parameter_norms or self.include_histograms
        if not self.watch_targets or not (includes_any or "batch" in self.watch_targets):
            raise ConfigError(
                "trainer.watch: nothing to log. Set watch_targets and at least one include_* option, or remove the section"
            )

    def due(self, step: Any) -> Any:
        """Tells whether to measure at this step (a traced or concrete integer)."""
        return step % self.interval == 0

    def measure(self, step: jax.Array, trees: Mapping[str, Any], batch: Any) -> Numbers:
        """Measurements by metric name, scalars or one per layer; zeros if this step is not due. Traceable.

        `step` counts from 1. `trees` maps each target to its arrays.
        """
        targets = {name: trees[name] for name in self.watch_targets if name != "batch"}

        def measure_all() -> Numbers:
            numbers = {"data/batch_hash": batch_hash(batch)} if "batch" in self.watch_targets else {}
            for name, arrays in targets.items():
                numbers |= self._measure_target(_NAMES[name], arrays)
            return numbers

        def zeros() -> Numbers:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(measure_all))

        return jax.lax.cond(self.due(step), measure_all, zeros)

    def _measure_target(self, name: str, arrays: Any) -> Numbers:
        leaves = {path: leaf for path, leaf in tree.leaves(arrays) if tree.is_inexact(leaf)}
        square_sum = lambda array: jnp.sum(jnp.square(array.astype(jnp.float32)))  # noqa: E731
        squares = {path: self._per_layer(square_sum, leaf) for path, leaf in leaves.items()}
        numbers: Numbers = {}
        if self.include_norms:
            numbers[f"{name}/norm/total"] = jnp.sqrt(sum((jnp.sum(s) for s in squares.values()), jnp.zeros(())))
        if self.include_per_parameter_norms:
            numbers |= {f"{name}/norm/{path}": jnp.sqrt(square) for path, square in squares.items()}
        if self.include_histograms:
            numbers |= {f"{name}/hist/{path}": self._per_layer(_histogram, leaf) for path, leaf in leaves.items()}
        return numbers

    def _per_layer(self, function: Any, leaf: Any) -> Any:
        """Applies a function to an array, or to each layer of it if the layers are stacked and logged separately."""
        stacked = [axis.name for axis in leaf.axes if axis.name in STACKED_LAYERS] if tree.is_named(leaf) else []
        if self.split_scan_layers and stacked:
            layers_first = hax.rearrange(leaf, (stacked[0], ...)).array
            return jax.vmap(function)(layers_first)
        return function(tree.raw(leaf))


def split_watched(
    numbers: Mapping[str, np.ndarray | tuple[np.ndarray, ...]],
) -> tuple[dict[str, float], dict[str, Histogram]]:
    """Splits fetched measurements into scalars and histograms by name; layers are named `<name>.<layer>`."""
    scalars: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}
    for name, value in numbers.items():
        if isinstance(value, tuple):
            low, high, counts = map(np.asarray, value)
            for key, index in _layer_names(name, low.shape):
                histograms[key] = Histogram(float(low[index]), float(high[index]), tuple(counts[index].tolist()))
        else:
            for key, index in _layer_names(name, np.shape(value)):
                scalars[key] = float(np.asarray(value)[index])
    return scalars, histograms


def _layer_names(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, ())] if shape == () else [(f"{name}.{layer}", (layer,)) for layer in range(shape[0])]


def _histogram(array: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(minimum, maximum, int32 counts {bin}) of the finite values; other values are in no bin."""
    x = array.astype(jnp.float32).ravel()
    finite = jnp.isfinite(x)
    low = jnp.min(x, initial=jnp.inf, where=finite)
    high = jnp.max(x, initial=-jnp.inf, where=finite)
    width = jnp.where(high > low, high - low, 1.0) / NUM_BINS
    bins = jnp.clip(((x - low) / width), 0, NUM_BINS - 1).astype(jnp.int32)
    return low, high, jnp.zeros(NUM_BINS, jnp.int32).at[bins].add(finite.astype(jnp.int32))


def batch_hash(batch: Any) -> jax.Array:
    """Hash of every element of a batch and its position, below 2**24 so that float32 represents it exactly.

    Integer sums do not depend on their order, so any mesh and any number of microbatches give the same hash. Rows that are
    zero in every column are padding and do not count.
    """
    columns = [_as_rows(leaf.array) for leaf in jax.tree.leaves(batch, is_leaf=tree.is_named)]
    in_use = functools.reduce(operator.or_, (jnp.any(column != 0, axis=1) for column in columns))
    total = jnp.zeros((), jnp.uint32)
    for number, bits in enumerate(columns):
        row, column = (jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dimension) for dimension in (0, 1))
        mixed = (
            (bits + jnp.uint32(number)) * jnp.uint32(0x9E3779B1)
            + row * jnp.uint32(0x85EBCA6B)
            + column * jnp.uint32(0xC2B2AE35)
        )
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
        mixed = (mixed ^ (mixed >> 12)) * jnp.uint32(0x297A2D39)
        total += jnp.sum(jnp.where(in_use[:, None], mixed, jnp.uint32(0)))
    return (total >> 8).astype(jnp.float32)


def _as_rows(column: jax.Array) -> jax.Array:
    """The bits of a column {microbatch, batch, ...} as uint32 [microbatch * batch, ...]."""
    bits = jax.lax.bitcast_convert_type(column, jnp.uint32) if column.dtype.itemsize == 4 else column.astype(jnp.uint32)
    return bits.reshape(column.shape[0] * column.shape[1], -1)
