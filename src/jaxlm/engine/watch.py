"""Norms and histograms of what a step works with, from inside of the step: `trainer.watch`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.types import Histogram

NUM_BINS = 64
Numbers = dict[str, Any]
# What each target is called in the metrics' names.
_NAMES = {"grads": "grad", "params": "params", "opt_state": "opt_state", "updates": "updates"}


@dataclass(frozen=True)
class WatchConfig:
    """What to look at inside of the step.

    Attributes:
        watch_targets: of `grads`, `params`, `updates`, `opt_state`, and `batch`, which logs a hash of the step's tokens:
            the same for the same tokens on any mesh.
        include_norms: the norm of each target as a whole.
        include_per_parameter_norms: of each array in it.
        include_histograms: of each array, in 64 equal bins; they go to
            `<log_dir>/<id>/histograms.jsonl`, and to TensorBoard and wandb as histograms.
        split_scan_layers: each layer on its own where layers are stacked in one array.
        interval: steps between two looks.
    """

    watch_targets: list[Literal["grads", "params", "updates", "opt_state", "batch"]] = field(
        default_factory=lambda: ["grads", "params"]
    )
    include_norms: bool = True
    include_per_parameter_norms: bool = True
    include_histograms: bool = False
    split_scan_layers: bool = True
    interval: int = 10

    def check(self) -> None:
        """Raises `ConfigError` where nothing would ever be looked at."""
        if self.interval < 1:
            raise ConfigError(f"trainer.watch.interval: {self.interval} given, 1 or more steps expected")
        looks = self.include_norms or self.include_per_parameter_norms or self.include_histograms
        if not self.watch_targets or not (looks or "batch" in self.watch_targets):
            raise ConfigError(
                "trainer.watch: nothing to look at. Name watch_targets and one of include_*, or leave it out"
            )

    def due(self, step: Any) -> Any:
        """Whether to look after a step (traced or not)."""
        return step % self.interval == 0

    def look(self, step: jax.Array, trees: Mapping[str, Any], batch: Any) -> Numbers:
        """The numbers by name, scalars and one a layer; zeros where the step is not due (traced).

        Args:
            step: the number of this step, from 1.
            trees: target -> its arrays.
        """
        wanted = {name: trees[name] for name in self.watch_targets if name != "batch"}

        def measure() -> Numbers:
            numbers = {"data/batch_hash": batch_hash(batch)} if "batch" in self.watch_targets else {}
            for name, arrays in wanted.items():
                numbers |= self._measured(_NAMES[name], arrays)
            return numbers

        def nothing() -> Numbers:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(measure))

        return jax.lax.cond(self.due(step), measure, nothing)

    def _measured(self, name: str, arrays: Any) -> Numbers:
        found = {path: leaf for path, leaf in tree.leaves(arrays) if tree.is_inexact(leaf)}
        squares = {path: self._each(_square_sum, leaf) for path, leaf in found.items()}
        numbers: Numbers = {}
        if self.include_norms:
            numbers[f"{name}/norm/total"] = jnp.sqrt(sum((jnp.sum(s) for s in squares.values()), jnp.zeros(())))
        if self.include_per_parameter_norms:
            numbers |= {f"{name}/norm/{path}": jnp.sqrt(square) for path, square in squares.items()}
        if self.include_histograms:
            numbers |= {f"{name}/hist/{path}": self._each(_histogram, leaf) for path, leaf in found.items()}
        return numbers

    def _each(self, measure: Any, leaf: Any) -> Any:
        """What is measured of an array, or of each of its layers."""
        if self.split_scan_layers and tree.is_named(leaf) and any(axis.name == LAYERS for axis in leaf.axes):
            first = hax.rearrange(leaf, (LAYERS, ...)).array
            return jax.vmap(measure)(first)
        return measure(tree.raw(leaf))


def arrived(
    numbers: Mapping[str, np.ndarray | tuple[np.ndarray, ...]],
) -> tuple[dict[str, float], dict[str, Histogram]]:
    """Scalars and histograms by name, one a layer (`<name>.<layer>`) where they are of layers."""
    scalars: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}
    for name, value in numbers.items():
        if isinstance(value, tuple):
            low, high, counts = map(np.asarray, value)
            for key, index in _places(name, low.shape):
                histograms[key] = Histogram(float(low[index]), float(high[index]), tuple(counts[index].tolist()))
        else:
            for key, index in _places(name, np.shape(value)):
                scalars[key] = float(np.asarray(value)[index])
    return scalars, histograms


def _places(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, ())] if shape == () else [(f"{name}.{layer}", (layer,)) for layer in range(shape[0])]


def _square_sum(array: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(array.astype(jnp.float32)))


def _histogram(array: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(least, greatest, int32 counts {bin}); what is not finite is in no bin."""
    x = array.astype(jnp.float32).ravel()
    finite = jnp.isfinite(x)
    low = jnp.min(x, initial=jnp.inf, where=finite)
    high = jnp.max(x, initial=-jnp.inf, where=finite)
    width = jnp.where(high > low, high - low, 1.0) / NUM_BINS
    bins = jnp.clip(((x - low) / width), 0, NUM_BINS - 1).astype(jnp.int32)
    return low, high, jnp.zeros(NUM_BINS, jnp.int32).at[bins].add(finite.astype(jnp.int32))


def batch_hash(batch: Any) -> jax.Array:
    """A number below 2**24, so that float32 has it exactly, made of every token and its place in the batch.

    Sums of integers do not depend on their order: any mesh and any number of micro-batches give the same one.
    """
    tokens, inside = (column.array.reshape(-1, column.array.shape[-1]) for column in (batch.tokens, batch.segment_ids))
    row, at = (jax.lax.broadcasted_iota(jnp.uint32, tokens.shape, dimension) for dimension in (0, 1))
    mixed = (
        tokens.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + row * jnp.uint32(0x85EBCA6B) + at * jnp.uint32(0xC2B2AE35)
    )
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
    mixed = (mixed ^ (mixed >> 12)) * jnp.uint32(0x297A2D39)
    total = jnp.sum(jnp.where(inside > 0, mixed, jnp.uint32(0)))
    return (total >> 8).astype(jnp.float32)
