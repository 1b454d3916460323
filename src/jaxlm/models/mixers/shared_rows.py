"""How devices that share the tokens of a row run a recurrence over it (context parallelism).

If the heads divide over the devices, they exchange tokens for heads: each has whole rows of some heads, in the order of the
text. Otherwise each runs over its own tokens, after the devices have told each other what their tokens do to a state.

Source: the exchange: DeepSpeed-Ulysses, Jacobs et al. 2023 (arXiv:2309.14509).

Shapes: P devices that share rows, B batch, T position, K heads; a piece is what a device has of consecutive tokens: all its
tokens, or one of the two chunks of a zigzag.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from haliax import Axis
from jax.sharding import Mesh, PartitionSpec

from jaxlm.core.axes import POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import current_layout
from jaxlm.models.token_sharding import mesh_axes

T = TypeVar("T")


@dataclass(frozen=True)
class SharedRows:
    """The devices of a recurrence. Methods that say so run inside of `shard_map`.

    Attributes:
        mesh: None for a single device.
        batch, heads: mesh axes that shard these axes.
        position: mesh axes that share the tokens of a row, in the order of the text.
        exchanged: those of them over which tokens are exchanged for heads.
        passed: those over which devices keep their tokens.
        zigzag: each device has two chunks of consecutive tokens, of which the second ones are in reverse order.
    """

    mesh: Mesh | None = None
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    position: tuple[str, ...] = ()
    exchanged: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    zigzag: bool = False

    @staticmethod
    def of(Batch: Axis, Pos: Axis, Heads: Axis, *, num_before: int, ordered: bool, continued: bool) -> "SharedRows":
        """The devices of the current layout.

        Args:
            num_before: number of tokens before a token that it reads besides the state. Pieces are not shorter than that.
            ordered: tokens are in the order of `trainer.context.balance`, not in that of the text.
            continued: a cache has earlier tokens, so that these tokens are few.

        Raises:
            ConfigError: the tokens are in an order in which no device has consecutive tokens.
        """
        layout = current_layout()
        if layout is None or layout.mesh.size == 1:
            return SharedRows()
        batch, heads = mesh_axes(Batch, layout.compute), mesh_axes(Heads, layout.compute)
        context, size = layout.context, layout.num_shards(POSITION)
        if continued or size == 1 or Pos.size % size:
            return SharedRows(layout.mesh, batch, heads)
        num_heads = Heads.size // math.prod(layout.mesh.shape[name] for name in heads)
        balance = context.balance if ordered else "none"
        if num_heads % size == 0:
            return SharedRows(layout.mesh, batch, heads, context.axes, exchanged=context.axes)
        num_pieces = size if balance == "none" else 2 * size
        if Pos.size // num_pieces < num_before:
            return SharedRows(layout.mesh, batch, heads)
        if balance == "none":
            return SharedRows(layout.mesh, batch, heads, context.axes, passed=context.axes)
        num_groups = math.prod(layout.mesh.shape[name] for name in context.heads)
        if balance == "zigzag" and num_heads % num_groups == 0:
            rest = context.gather + context.ring
            return SharedRows(layout.mesh, batch, heads, context.axes, context.heads, rest, zigzag=True)
        raise ConfigError(
            f"trainer.context.balance: {balance} given, but the {num_heads} key heads of a recurrent layer on a device do not"
            f" divide over the {size} devices that share a row, so that each has to have consecutive tokens. Set balance:"
            f" {'none' if balance == 'zigzag' else 'zigzag'}, or share rows among fewer devices"
        )

    def run(self, function: Callable[..., Any], tokens: Any, by_head: Any, order: Any, earlier: Any, later: Any) -> Any:
        """`function(tokens, by_head, order, earlier)` on each device's rows, tokens and heads.

        Args:
            tokens: arrays [B, T, K, ..] or [B, T]. The first result is [B, T, K, ..].
            by_head: arrays [K, ..].
            order: int32 [B, T], the index of each token in the text; None for that order.
            earlier: arrays of a state of each row; None for none.
            later: the dimension of the heads in each array of the second result, a state of each row; None without heads. Of
                `earlier` too.
        """
        if self.mesh is None:
            return function(tokens, by_head, order, earlier)
        rows = PartitionSpec(self.batch or None, self.position or None)
        of_token = lambda x: rows if x.ndim == 2 else PartitionSpec(*rows, self.heads or None)  # noqa: E731

        def of_state(heads: tuple[str, ...], dim: int) -> PartitionSpec:
            return PartitionSpec(self.batch or None, *[None] * (dim - 1), *((heads or None,) if dim else ()))

        specs = (
            jax.tree.map(of_token, tokens),
            jax.tree.map(lambda _: PartitionSpec(self.heads or None), by_head),
            jax.tree.map(of_token, order),
            None if earlier is None else jax.tree.map(functools.partial(of_state, self.heads), later),
        )
        after = jax.tree.map(functools.partial(of_state, self.heads + self.exchanged), later)
        out = (PartitionSpec(*rows, self.heads or None), after)
        # Custom backward passes do not declare how their outputs vary over the mesh.
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)(
            tokens, by_head, order, earlier
        )

    def whole_rows(self, x: jax.Array) -> jax.Array:
        """The tokens of all devices that exchange heads: [B, T, K, ..] with some heads, [B, T] as it is. In `shard_map`."""
        if not self.exchanged:
            return x
        if x.ndim == 2:
            return jax.lax.all_gather(x, self.exchanged, axis=1, tiled=True)
        return jax.lax.all_to_all(x, self.exchanged, split_axis=2, concat_axis=1, tiled=True)

    def own_tokens(self, x: jax.Array) -> jax.Array:
        """The inverse of `whole_rows`, for [B, T, K, ..]. In `shard_map`."""
        return jax.lax.all_to_all(x, self.exchanged, split_axis=1, concat_axis=2, tiled=True) if self.exchanged else x

    def own_heads(self, x: jax.Array) -> jax.Array:
        """Those of [K, ..] that a device has in `whole_rows`. In `shard_map`."""
        if not self.exchanged:
            return x
        num_own = x.shape[0] // jax.lax.axis_size(self.exchanged)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.exchanged) * num_own, num_own)

    def pieces(self, x: jax.Array) -> jax.Array:
        """[B, T, ..] to [pieces of the device * B, tokens of a piece, ..]."""
        return jnp.concatenate(jnp.split(x, 2, axis=1)) if self.zigzag else x

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `pieces`."""
        return jnp.concatenate(jnp.split(x, 2), axis=1) if self.zigzag else x

    def in_text(self, x: jax.Array) -> jax.Array:
        """[pieces of the device * B, ..] of all devices, [pieces, B, ..] in the order of the text. In `shard_map`."""
        if not self.passed:
            return x[None]
        if not self.zigzag:
            return jax.lax.all_gather(x, self.passed)
        first, second = (jax.lax.all_gather(one, self.passed) for one in jnp.split(x, 2))
        return jnp.concatenate([first, second[::-1]])

    def own_pieces(self, x: jax.Array) -> jax.Array:
        """The inverse of `in_text`. In `shard_map`."""
        if not self.passed:
            return x[0]
        place = jax.lax.axis_index(self.passed)
        own = [place, x.shape[0] - 1 - place] if self.zigzag else [place]
        return jnp.concatenate([jax.lax.dynamic_index_in_dim(x, one, keepdims=False) for one in own])

    def before(self, x: jax.Array, first: jax.Array) -> jax.Array:
        """What the piece before each of the device's has, [pieces of the device * B, ..]. In `shard_map`.

        Args:
            first: what the first piece of the text gets, [B, ..].
        """
        return self.own_pieces(jnp.concatenate([first[None], self.in_text(x)[:-1]]))
