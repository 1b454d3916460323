"""Layers that transformer families share: embedding, dropout, MLPs.

Layers take and return named arrays. Parameters are initialized in float32; layers compute in the dtype of their
arguments unless they say otherwise.
"""

import abc
import functools
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, EMBED, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.parameters import TABLE, DeclaresParameters, Parameter
from jaxlm.core.products.float32_sums import rows_of
from jaxlm.core.sharding import current_layout
from jaxlm.core.tracing import CustomVjp
from jaxlm.core.values.permutation import in_row_order
from jaxlm.models.activations import activated, gated
from jaxlm.models.base import Inputs
from jaxlm.models.linear import Linear
from jaxlm.models.remat import MLP, checkpoint_name
from jaxlm.models.token_sharding import mesh_axes


class Embedding(DeclaresParameters):
    """An embedding table.

    Attributes:
        weight: {vocab, embed}.
    """

    weight: NamedArray
    Vocab: Axis = eqx.field(static=True)
    Embed: Axis = eqx.field(static=True)

    @staticmethod
    def init(Vocab: Axis, Embed: Axis, *, std: float, key: jax.Array) -> "Embedding":
        """Initializes N(0, std) entries."""
        return Embedding(hax.random.normal(key, (Vocab, Embed)) * std, Vocab, Embed)

    def __call__(self, ids: NamedArray) -> NamedArray:
        """{..} to {.., embed}."""
        return rows_of(self.weight, self.Vocab.name, ids)

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": TABLE}


def activation_dtype(model: Any) -> jnp.dtype:
    """Returns the dtype of the residual stream, and so of keys and values: that of the embeddings, or of other parameters."""
    tables = [embedding.weight for embedding in tree.modules(model, Embedding)]
    arrays = [leaf for _, leaf in tree.leaves(model) if tree.is_inexact(leaf)]
    return jnp.result_type(*(one.dtype for one in tables or arrays[:1]))


T = TypeVar("T")
_GENERATOR = "threefry2x32"  # whose keys are two words


def token_embeddings(table: Callable[[NamedArray], NamedArray], inputs: Inputs) -> NamedArray:
    """The embeddings of the input tokens, {batch, position, embed}, with the inputs' noise if they have any.

    Source: Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (arXiv:2310.05914), algorithm 1:
    alpha / sqrt(L d) times a number that is uniform in [-1, 1), for d features and the L tokens of an example. An example
    is a document of the row, so the size of the noise does not depend on what it is packed with.
    """
    x = table(inputs.tokens)
    if inputs.noise is None:
        return x
    ids_BS = inputs.segment_ids.rearrange((BATCH, POSITION)).array
    Batch, Pos, Embed = (x.resolve_axis(name) for name in (BATCH, POSITION, EMBED))
    # Another generator may give other numbers under `vmap`.
    keys_B = jax.random.wrap_key_data(inputs.noise.keys.rearrange((BATCH, ...)).array, impl=_GENERATOR)
    uniform = functools.partial(jax.random.uniform, shape=(Pos.size, Embed.size), minval=-1.0, maxval=1.0)
    lengths_BS = jax.vmap(lambda ids: jnp.bincount(ids, length=Pos.size + 1)[ids])(ids_BS)
    size_BS = jnp.where(ids_BS == 0, 0.0, inputs.noise.alpha * jax.lax.rsqrt(jnp.float32(Embed.size) * lengths_BS))
    noise = in_row_order(NamedArray(jax.vmap(uniform)(keys_B), (Batch, Pos, Embed)), inputs.order)
    noise = NamedArray(noise.array * size_BS[..., None], noise.axes)
    return (x + noise).rearrange(x.axes).astype(x.dtype)


def dropout(x: NamedArray, probability: float, key: jax.Array | None) -> NamedArray:
    """Zeroes entries with `probability` and scales the others up. Without a key, returns x."""
    return hnn.dropout(x, probability, inference=key is None, key=key)


class Mlp(eqx.Module):
    """An MLP without a gate: embed to mlp, activation, mlp to embed (Vaswani et al. 2017, equation 2)."""

    up_proj: Linear
    down_proj: Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        up = checkpoint_name(self.up_proj(x), MLP)
        return self.down_proj(NamedArray(activated(self.activation, up.array), up.axes))


class GatedMlp(eqx.Module):
    """A gated MLP (Shazeer 2020, arXiv:2002.05202, equation 6): SwiGLU if the activation is silu."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        gate, up = checkpoint_name(self.gate_proj(x), MLP), checkpoint_name(self.up_proj(x), MLP)
        out = gated(self.activation, gate.array, up.rearrange(gate.axes).array)
        return self.down_proj(NamedArray(out, gate.axes))


@dataclass(frozen=True)
class Tiles:
    """Divides the tokens of an activation {batch, position, embed}: each device's own into groups of equal size.

    Shapes: N tiles, Q groups of devices that hold different tokens, T tokens of a tile, L tokens of a group, D embed.

    Attributes:
        rows, positions: number of groups that divide the rows, and the positions of a row.
        mesh_axes: the axes of the mesh along which these groups are.
        size: T.
    """

    rows: int
    positions: int
    mesh_axes: tuple[str, ...]
    size: int

    @staticmethod
    def of(x: NamedArray, size: int) -> "Tiles | None":
        """None if the tokens of a device are a single tile, or if devices do not divide them."""
        Batch, Pos = x.resolve_axis(BATCH), x.resolve_axis(POSITION)
        layout = current_layout()
        axes = () if layout is None else mesh_axes(Batch, layout.compute) + mesh_axes(Pos, layout.compute)
        rows, positions = (1, 1) if layout is None else map(layout.num_shards, (BATCH, POSITION))
        divides = Batch.size % rows == 0 and Pos.size % positions == 0
        num_tokens = Batch.size * Pos.size // (rows * positions)
        return Tiles(rows, positions, axes, size) if divides and num_tokens > size else None

    def split(self, x_BSD: jax.Array) -> jax.Array:
        """[N, Q, T, D]. The last tile is filled up with zeros."""
        batch, length, width = x_BSD.shape
        x = x_BSD.reshape(self.rows, batch // self.rows, self.positions, length // self.positions, width)
        x_QLD = x.transpose(0, 2, 1, 3, 4).reshape(self.rows * self.positions, -1, width)
        x_QLD = jnp.pad(x_QLD, ((0, 0), (0, -x_QLD.shape[1] % self.size), (0, 0)))
        return self._sharded(x_QLD.reshape(x_QLD.shape[0], -1, self.size, width).swapaxes(0, 1), 1)

    def join(self, x_NQTD: jax.Array, batch: int, length: int) -> jax.Array:
        """The inverse of `split`."""
        num_groups, width = x_NQTD.shape[1], x_NQTD.shape[-1]
        num_tokens = batch * length // num_groups
        x_QLD = x_NQTD.swapaxes(0, 1).reshape(num_groups, -1, width)[:, :num_tokens]
        x = x_QLD.reshape(self.rows, self.positions, batch // self.rows, length // self.positions, width)
        return x.transpose(0, 2, 1, 3, 4).reshape(batch, length, width)

    def numbers(self, num_tiles: int) -> jax.Array:
        """[N, Q], a different number for each tile of each group."""
        return jnp.arange(num_tiles * self.rows * self.positions).reshape(num_tiles, -1)

    def for_each_group(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """A function of arrays [Q, ...], of which each group computes its own."""
        return jax.vmap(compute, spmd_axis_name=self.mesh_axes or None)

    def zeros(self, like: jax.Array) -> jax.Array:
        """float32 [Q, ...], sums of each group."""
        return self._sharded(jnp.zeros((self.rows * self.positions, *like.shape), jnp.float32), 0)

    def _sharded(self, x: jax.Array, dim: int) -> jax.Array:
        layout = current_layout()
        if layout is None or not self.mesh_axes:
            return x
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        entries[dim] = self.mesh_axes
        return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, PartitionSpec(*entries)))


class TiledMlp(eqx.Module):
    """An MLP that is computed for a few tokens at a time, in both passes: no array of all tokens has its hidden features.

    The backward pass computes each tile again, whatever a remat policy says. It adds up the gradients of the weights in
    float32, on each device for its own tokens, and sums over devices once.

    Attributes:
        tile_tokens: tokens that a device computes at a time.
    """

    mlp: Mlp | GatedMlp
    tile_tokens: int = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        tiles = Tiles.of(x, self.tile_tokens)
        if tiles is None:
            return self.mlp(x)
        Batch, Pos, Embed = axes = tuple(x.resolve_axis(name) for name in (BATCH, POSITION, EMBED))
        arrays, rest = eqx.partition(self.mlp, eqx.is_inexact_array)
        out: Any = _in_tiles((tiles, Embed), arrays, rest, tiles.split(x.rearrange(axes).array))
        joined = NamedArray(tiles.join(out, Batch.size, Pos.size), axes)
        return hax.auto_sharded(joined.rearrange(x.axes))


def tiled_mlps(block: T, tile_tokens: int | None) -> T:
    """A block whose MLPs compute this many tokens at a time; None changes nothing."""
    if tile_tokens is None:
        return block
    tiled = lambda node: TiledMlp(node, tile_tokens) if isinstance(node, Mlp | GatedMlp) else node  # noqa: E731
    return jax.tree.map(tiled, block, is_leaf=lambda node: isinstance(node, Mlp | GatedMlp))


def check_tiles(tile_tokens: int | None, body: Any) -> None:
    """Raises `ConfigError` if the key is set, but no layer of a body has an MLP of its own."""
    if tile_tokens is not None and not any(tree.modules(body, kind) for kind in (Mlp, GatedMlp)):
        raise ConfigError(
            f"model.mlp_tile_tokens: {tile_tokens} given, but no layer of this model has an MLP that all tokens go through."
            " Those of experts are not divided. Remove it"
        )


def _tile_of(Embed: Axis, arrays: Any, rest: Any, number: jax.Array, x_TD: jax.Array) -> jax.Array:
    """One tile of one group. Dropout differs between tiles."""
    mlp = eqx.combine(arrays, rest)
    if tree.modules(mlp, DropoutLayer):
        mlp = tree.map_modules(mlp, DropoutLayer, ".*", lambda layer: layer.for_part(number))
    Tile = Axis("tile", x_TD.shape[0])
    return mlp(NamedArray(x_TD, (Tile, Embed))).rearrange((Tile, Embed)).array


@functools.partial(CustomVjp, nondiff_argnums=(0,))
def _in_tiles(static: tuple[Tiles, Axis], arrays: Any, rest: Any, x_NQTD: jax.Array) -> jax.Array:
    """The outputs of an MLP, which is given as its floating-point arrays and the rest of it."""
    tiles, Embed = static
    tile = tiles.for_each_group(functools.partial(_tile_of, Embed, arrays, rest))
    return jax.lax.map(lambda part: tile(*part), (tiles.numbers(x_NQTD.shape[0]), x_NQTD))


def _tiles_forward(static, arrays, rest, x_NQTD):
    return _in_tiles(static, arrays, rest, x_NQTD), (arrays, rest, x_NQTD)


def _tiles_backward(static, residuals, d_out_NQTD):
    (tiles, Embed), (arrays, rest, x_NQTD) = static, residuals

    def gradients(number, x_TD, d_out_TD):
        _, vjp = jax.vjp(lambda arrays, x_TD: _tile_of(Embed, arrays, rest, number, x_TD), arrays, x_TD)
        return vjp(d_out_TD)

    def one_tile(sums, part):
        d_arrays, d_x_QTD = tiles.for_each_group(gradients)(*part)
        return jax.tree.map(lambda total, d: total + d.astype(total.dtype), sums, d_arrays), d_x_QTD

    def over_groups(total, array):  # in the dtype in which devices exchange gradients without tiles
        return jax.lax.reduce(total.astype(array.dtype), jnp.zeros((), array.dtype), jax.lax.add, (0,))

    parts = (tiles.numbers(x_NQTD.shape[0]), x_NQTD, d_out_NQTD)
    sums, d_x_NQTD = jax.lax.scan(one_tile, jax.tree.map(tiles.zeros, arrays), parts)
    return jax.tree.map(over_groups, sums, arrays), None, d_x_NQTD


_in_tiles.defvjp(_tiles_forward, _tiles_backward)


# Blocks split their key for their own dropout. Folding this in gives keys that differ from those.
_DROPOUT_SALT = zlib.crc32(b"layers that drop")


class DropoutLayer(eqx.Module):
    """A layer with dropout that is called without a key, so that it can replace a layer without dropout.

    The model's body gives each of them its own key before it runs a block. Without a key there is no dropout.
    """

    @abc.abstractmethod
    def with_key(self, key: jax.Array) -> "DropoutLayer":
        """The same layer with dropout by this key."""

    @abc.abstractmethod
    def for_part(self, number: jax.Array) -> "DropoutLayer":
        """The same layer for one of several parts of the tokens, which differ in their dropout."""


def with_dropout_keys(block: T, key: jax.Array | None) -> T:
    """The block with a separate key in every `DropoutLayer`. Without a key, returns the block."""
    if key is None or not tree.modules(block, DropoutLayer):
        return block
    dropout_key, number = jax.random.fold_in(key, _DROPOUT_SALT), itertools.count()
    return tree.map_modules(
        block, DropoutLayer, ".*", lambda layer: layer.with_key(jax.random.fold_in(dropout_key, next(number)))
    )
