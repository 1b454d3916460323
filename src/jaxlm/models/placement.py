"""How the tokens of a batch and the head lie on the mesh, and the sums over both."""

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
from jaxlm.core.sharding import Layout, current_layout


@dataclass(frozen=True)
class TokenPlacement:
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
    def of(hidden: NamedArray, head: NamedArray) -> "TokenPlacement":
        """Under the current layout, of hidden states {batch, position, embed} and a head {vocab, embed}."""
        layout: Layout | None = current_layout()
        if layout is None or layout.mesh.size == 1:
            return TokenPlacement(None, (), (), PartitionSpec(), PartitionSpec())
        batch, position = (_mesh_axes(hidden.resolve_axis(a), layout.compute) for a in (BATCH, POSITION))
        vocab_axis, embed_axis = head.resolve_axis(VOCAB), head.resolve_axis(EMBED)
        vocab = _mesh_axes(vocab_axis, layout.compute)
        rest = []
        for axis, kept in ((vocab_axis, vocab), (embed_axis, ())):
            spread = (a for a in _mesh_axes(axis, layout.parameter) if a in batch + position and a not in kept)
            rest.append((*kept, *spread))
        return TokenPlacement(
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


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _mesh_axes(axis: hax.Axis, mapping) -> tuple[str, ...]:
    return _names(pspec_for_axis(axis, mapping)[0])
