"""How the tokens of a batch and the head lie on the mesh, and the sums over both."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.partitioning import pspec_for_axis
from jax.sharding import Mesh, PartitionSpec

from jaxlm.core.axes import BATCH, EMBED, HEADS, KV_HEADS, POSITION, VOCAB
from jaxlm.core.sharding import Layout, current_layout, spec_of


@dataclass(frozen=True)
class TokenSharding:
    """How tokens and head lie on the mesh; without a mesh, everything is here.

    Attributes:
        mesh: None where there is one device.
        batch, position: the mesh axes over which these two are spread, as a partition spec writes them.
        head: the head as the loss reads it: whole, or a slice of the vocabulary.
        head_at_rest: the same at rest, as far as the mesh axes that spread tokens go: the gradient's place.
    """

    mesh: Mesh | None
    batch: tuple[str, ...]
    position: tuple[str, ...]
    head: PartitionSpec
    head_at_rest: PartitionSpec

    @staticmethod
    def of(hidden: NamedArray, head: NamedArray | None) -> "TokenSharding":
        """Under the current layout, of hidden states {batch, position, embed} and a head {vocab, embed}, if there is one."""
        layout: Layout | None = current_layout()
        if layout is None or layout.mesh.size == 1:
            return TokenSharding(None, (), (), PartitionSpec(), PartitionSpec())
        batch, position = (mesh_axes(hidden.resolve_axis(a), layout.compute) for a in (BATCH, POSITION))
        if head is None:
            return TokenSharding(layout.mesh, batch, position, PartitionSpec(), PartitionSpec())
        vocab_axis, embed_axis = head.resolve_axis(VOCAB), head.resolve_axis(EMBED)
        vocab = mesh_axes(vocab_axis, layout.compute)
        rest = []
        spec = spec_of(head.axes, layout.parameter)
        at_rest = {axis.name: _names(entry) for axis, entry in zip(head.axes, spec, strict=True)}
        for axis, kept in ((vocab_axis, vocab), (embed_axis, ())):
            spread = (a for a in at_rest[axis.name] if a in batch + position and a not in kept)
            rest.append((*kept, *spread))
        return TokenSharding(
            layout.mesh, batch, position, PartitionSpec(vocab or None), PartitionSpec(*(r or None for r in rest))
        )

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes over which tokens are spread."""
        return self.batch + self.position

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the vocabulary is spread."""
        return _names(self.head[0]) if len(self.head) else ()

    @property
    def vocab_parts(self) -> int:
        """Over how many devices the vocabulary is spread."""
        return math.prod(self.mesh.shape[a] for a in self.vocab_axes) if self.mesh is not None else 1

    def tokens(self, num_trailing: int = 0) -> PartitionSpec:
        """The place of a {batch, position, ...} array."""
        return PartitionSpec(self.batch or None, self.position or None, *([None] * num_trailing))

    def mapped(self, fun: Callable, in_specs, out_specs) -> Callable:
        """`fun` on every device's own part."""
        if self.mesh is None:
            return fun
        # Scatters and sums here say themselves what is replicated; the check would want every loop carry annotated.
        return jax.shard_map(fun, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def sum_tokens(self, x: jax.Array) -> jax.Array:
        """The sum over all devices that hold different tokens."""
        return jax.lax.psum(x, self.token_axes) if self.token_axes else x

    def sum_vocab(self, x: jax.Array) -> jax.Array:
        """The sum over all devices that hold different parts of the vocabulary."""
        return jax.lax.psum(x, self.vocab_axes) if self.vocab_axes else x

    def max_vocab(self, x: jax.Array) -> jax.Array:
        """The maximum over all devices that hold different parts of the vocabulary."""
        # all_gather rather than pmax, which has no derivative rule
        return jnp.max(jax.lax.all_gather(x, self.vocab_axes), axis=0) if self.vocab_axes else x

    def to_rest(self, dw_VD: jax.Array) -> jax.Array:
        """Sums the head's gradient over all tokens, each device receiving only the part that it keeps."""
        scattered = set()
        for dim, entry in enumerate(self.head_at_rest):
            for axis in _names(entry):
                if axis in self.token_axes:
                    dw_VD = jax.lax.psum_scatter(dw_VD, axis, scatter_dimension=dim, tiled=True)
                    scattered.add(axis)
        rest = tuple(a for a in self.token_axes if a not in scattered)
        return jax.lax.psum(dw_VD, rest) if rest else dw_VD


@dataclass(frozen=True)
class HeadSharding:
    """How attention lies on the mesh, for kernels that the partitioner cannot look into.

    Attributes:
        mesh: None where there is one device.
        batch, heads, kv_heads: the mesh axes over which these are spread.
    """

    mesh: Mesh | None
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()

    @staticmethod
    def of(q: NamedArray, k: NamedArray) -> "HeadSharding":
        """Under the current layout, of queries {batch, heads, ...} and keys {kv_heads, ...}."""
        layout = current_layout()
        if layout is None or layout.mesh.size == 1:
            return HeadSharding(None)
        batch, heads = (mesh_axes(q.resolve_axis(a), layout.compute) for a in (BATCH, HEADS))
        return HeadSharding(layout.mesh, batch, heads, mesh_axes(k.resolve_axis(KV_HEADS), layout.compute))

    def mapped(self, kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """`kernel(q_BTKGH, k_BTKH, v_BTKH, segment_BT, *scalars)` on every device's own rows and heads."""
        if self.mesh is None:
            return kernel
        keys = PartitionSpec(self.batch or None, None, self.heads or None)
        queries, rows = PartitionSpec(*keys, None), PartitionSpec(self.batch or None)

        def spread(q_BTKGH, k_BTKH, v_BTKH, segment_BT, *scalars) -> jax.Array:
            specs = (queries, keys, keys, rows, *[PartitionSpec()] * len(scalars))
            # The kernels are no collectives, and do not say how their outputs vary over the mesh.
            own = jax.shard_map(kernel, mesh=self.mesh, in_specs=specs, out_specs=queries, check_vma=False)
            return own(q_BTKGH, k_BTKH, v_BTKH, segment_BT, *scalars)

        return spread if self.heads == self.kv_heads else functools.partial(_each_head_its_own, spread)


def _each_head_its_own(kernel: Callable[..., jax.Array], q_BTKGH, k_BTKH, v_BTKH, *rest) -> jax.Array:
    """Repeats keys and values for every query head: their own heads do not divide over the devices."""
    group = q_BTKGH.shape[3]
    one_each = q_BTKGH.reshape(*q_BTKGH.shape[:2], -1, 1, q_BTKGH.shape[4])
    out = kernel(one_each, *(jnp.repeat(t, group, axis=2) for t in (k_BTKH, v_BTKH)), *rest)
    return out.reshape(q_BTKGH.shape)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def mesh_axes(axis: hax.Axis, mapping) -> tuple[str, ...]:
    """The mesh axes over which a mapping spreads an axis."""
    return _names(pspec_for_axis(axis, mapping)[0])
