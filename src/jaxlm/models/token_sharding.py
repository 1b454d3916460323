"""Sharding of tokens and head for code inside `jax.shard_map`, and the collectives over them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.partitioning import pspec_for_axis
from jax.sharding import Mesh, PartitionSpec

from jaxlm.core.axes import BATCH, EMBED, POSITION, VOCAB
from jaxlm.core.products.stored_weights import StoredArray, Weight
from jaxlm.core.sharding import Layout, current_layout


@dataclass(frozen=True)
class TokenSharding:
    """Sharding of tokens and head on the mesh.

    Attributes:
        mesh: None for a single device.
        batch, position: mesh axes that shard these two axes, in the order of a partition spec.
        head: partition spec of the head as the loss reads it: replicated, or sharded over the vocabulary.
        head_at_rest: partition spec of the head's gradient: `head`, plus the axes that shard both tokens and the stored
            parameter.
        vocab_size: number of tokens of the vocabulary.
        padded_vocab_size: rows of the head as the loss reads it: at least `vocab_size`, and divisible by its shards.
    """

    mesh: Mesh | None
    batch: tuple[str, ...]
    position: tuple[str, ...]
    head: PartitionSpec
    head_at_rest: PartitionSpec
    vocab_size: int
    padded_vocab_size: int

    @staticmethod
    def of(hidden: NamedArray, head: Weight | None, vocab_multiple: int = 1) -> "TokenSharding":
        """The sharding of hidden states {batch, position, embed} and a head {vocab, embed} under the current layout.

        Args:
            vocab_multiple: the rows of the head are padded to a multiple of this.
        """
        layout: Layout | None = current_layout()
        vocab_size = (hidden if head is None else head).resolve_axis(VOCAB).size
        sizes = vocab_size, vocab_size if head is None else _rounded_up(vocab_size, vocab_multiple)
        if layout is None or layout.mesh.size == 1:
            return TokenSharding(None, (), (), PartitionSpec(), PartitionSpec(), *sizes)
        batch, position = (mesh_axes(hidden.resolve_axis(a), layout.compute) for a in (BATCH, POSITION))
        if head is None:
            return TokenSharding(layout.mesh, batch, position, PartitionSpec(), PartitionSpec(), *sizes)
        vocab_axis, embed_axis = head.resolve_axis(VOCAB), head.resolve_axis(EMBED)
        vocab = mesh_axes(vocab_axis, layout.compute)
        entries = []
        spec = layout.parameter_sharding(head.axes).spec
        at_rest = {axis.name: _names(entry) for axis, entry in zip(head.axes, spec, strict=True)}
        for axis, compute in ((vocab_axis, vocab), (embed_axis, ())):
            token_axes = (a for a in at_rest[axis.name] if a in batch + position and a not in compute)
            entries.append((*compute, *token_axes))
        head_at_rest = PartitionSpec(*(entry or None for entry in entries))
        shards = math.prod(layout.mesh.shape[name] for name in entries[0])
        sizes = vocab_size, _rounded_up(vocab_size, math.lcm(vocab_multiple, shards))
        return TokenSharding(layout.mesh, batch, position, PartitionSpec(vocab or None), head_at_rest, *sizes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        return self.batch + self.position

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        return _names(self.head[0]) if len(self.head) else ()

    def pad_vocab(self, w_VD: jax.Array | StoredArray) -> jax.Array | StoredArray:
        """A head with the padding rows that the loss reads, all zero. They exist only in a computation."""
        padding = self.padded_vocab_size - self.vocab_size
        return jax.tree.map(lambda a: jnp.pad(a, ((0, padding), (0, 0))), w_VD) if padding else w_VD

    def fill_padding(self, x_CV: jax.Array, value: float) -> jax.Array:
        """Replaces the columns of tokens that are not in the vocabulary. Args: x_CV: this device's shard of the columns."""
        if self.padded_vocab_size == self.vocab_size:
            return x_CV
        ids = self.first_id(x_CV.shape[1]) + jnp.arange(x_CV.shape[1])
        return jnp.where(ids < self.vocab_size, x_CV, value)

    def local_ids(self, ids: jax.Array, num_local: int) -> jax.Array:
        """Token ids as indices into this device's shard of the vocabulary; outside [0, num_local) for other shards."""
        return ids - self.first_id(num_local) if self.vocab_axes else ids

    def first_id(self, num_local: int) -> jax.Array | int:
        """The id of the first of the `num_local` tokens in this device's shard of the vocabulary."""
        return jax.lax.axis_index(self.vocab_axes) * num_local if self.vocab_axes else 0

    def tokens(self, num_trailing: int = 0) -> PartitionSpec:
        """The partition spec of a {batch, position, ...} array."""
        return PartitionSpec(self.batch or None, self.position or None, *([None] * num_trailing))

    def shard_map(self, fun: Callable, in_specs, out_specs) -> Callable:
        """Runs `fun` on each device's shard."""
        if self.mesh is None:
            return fun
        # The collectives inside establish replication. The check would require annotations on every loop carry.
        return jax.shard_map(fun, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def sum_tokens(self, x: jax.Array) -> jax.Array:
        """Sums over all devices that hold different tokens."""
        return jax.lax.psum(x, self.token_axes) if self.token_axes else x

    def sum_vocab(self, x: jax.Array) -> jax.Array:
        """Sums over all devices that hold different shards of the vocabulary."""
        return jax.lax.psum(x, self.vocab_axes) if self.vocab_axes else x

    def max_tokens(self, x: jax.Array) -> jax.Array:
        """Maximum over all devices that hold different tokens. It has no derivative."""
        return jax.lax.pmax(x, self.token_axes) if self.token_axes else x

    def max_vocab(self, x: jax.Array) -> jax.Array:
        """Maximum over all devices that hold different shards of the vocabulary."""
        # all_gather rather than pmax, which has no derivative rule
        return jnp.max(jax.lax.all_gather(x, self.vocab_axes), axis=0) if self.vocab_axes else x

    def reduce_head_gradient(self, dw_VD: jax.Array) -> jax.Array:
        """Sums the head's gradient over all tokens; each device receives only its shard (`head_at_rest`)."""
        scattered = set()
        for dim, entry in enumerate(self.head_at_rest):
            for axis in _names(entry):
                if axis in self.token_axes:
                    dw_VD = jax.lax.psum_scatter(dw_VD, axis, scatter_dimension=dim, tiled=True)
                    scattered.add(axis)
        rest = tuple(a for a in self.token_axes if a not in scattered)
        return jax.lax.psum(dw_VD, rest) if rest else dw_VD


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def mesh_axes(axis: hax.Axis, mapping) -> tuple[str, ...]:
    """The mesh axes that shard an axis under a mapping."""
    return _names(pspec_for_axis(axis, mapping)[0])
