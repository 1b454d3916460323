"""Products of rows with the matrices of their groups.

Source: the blocks of MegaBlocks, Gale et al. 2022 (arXiv:2211.15841), section 5: rows are sorted by group, and each group is
padded to whole blocks, so that each block is multiplied by one matrix. TPUs use `jax.lax.ragged_dot`; elsewhere XLA would
multiply every row by every matrix, so a loop runs over the blocks.

Shapes: T rows, N unsorted rows, P rows in blocks, R rows of a block, G groups, I input features, O output features.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.products.matmul import einsum, operand
from jaxlm.core.products.stored_weights import StoredArray
from jaxlm.core.sharding import current_platform
from jaxlm.core.tracing import CustomVjp

_MAX_BLOCK, _MIN_BLOCK = 512, 8


class Grouping(eqx.Module):
    """The permutation that sorts rows by group and pads each group to whole blocks.

    Attributes:
        source_P: the unsorted row at each sorted position; N for padding.
        place_N: the sorted position of each row; P for rows of no group.
        sizes_G: number of rows of each group, including padding.
        block: number of rows per block.
    """

    source_P: jax.Array
    place_N: jax.Array
    sizes_G: jax.Array
    block: int = eqx.field(static=True)

    @staticmethod
    def of(group_N: jax.Array, num_groups: int) -> "Grouping":
        """Sorts rows by group.

        Args:
            group_N: group of each row. Rows with a group outside [0, num_groups) are left out.
        """
        num_rows = group_N.shape[0]
        block = block_rows(num_rows, num_groups)
        group_N = jnp.where((group_N >= 0) & (group_N < num_groups), group_N, num_groups)
        order_N = jnp.argsort(group_N, stable=True)
        rank_N = (
            jnp.zeros(num_rows, jnp.int32).at[order_N].set(jnp.arange(num_rows, dtype=jnp.int32), unique_indices=True)
        )
        counts_G = jnp.sum(group_N[:, None] == jnp.arange(num_groups), axis=0, dtype=jnp.int32)
        sizes_G = -(-counts_G // block) * block
        shift_G = jnp.cumsum(sizes_G) - sizes_G - (jnp.cumsum(counts_G) - counts_G)
        num_positions = (-(-num_rows // block) + num_groups) * block
        place_N = jnp.where(group_N < num_groups, rank_N + shift_G[jnp.minimum(group_N, num_groups - 1)], num_positions)
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        source_P = jnp.full(num_positions, num_rows, jnp.int32).at[place_N].set(rows, mode="drop")
        return Grouping(source_P, place_N, sizes_G, block)

    def sorted(self, x_TD: jax.Array, copies: int = 1) -> jax.Array:
        """Rows in sorted order, [P, D]; padding is 0. Args: copies: how many rows of the N each of the T stands for."""
        return _spread(x_TD, self.source_P, self.place_N, copies)

    def unsorted(self, x_PD: jax.Array) -> jax.Array:
        """Rows in the original order, [N, D]; rows of no group are 0."""
        return _permute(x_PD, self.place_N, self.source_P)

    def dot(self, x_PI: jax.Array, w_GIO: jax.Array | StoredArray) -> jax.Array:
        """Multiplies each row by its group's matrix; returns [P, O] in the dtype of `operand`."""
        x_PI = operand(x_PI, w_GIO)
        if current_platform() == "tpu":
            if isinstance(w_GIO, StoredArray):
                return _stored_ragged_dot(x_PI, w_GIO, self.sizes_G)
            return jax.lax.ragged_dot(x_PI, w_GIO, self.sizes_G)
        num_blocks = x_PI.shape[0] // self.block
        group_B = self._groups(num_blocks)
        products = _stored_block_products if isinstance(w_GIO, StoredArray) else _block_products
        out_BRO = products(x_PI.reshape(num_blocks, self.block, -1), w_GIO, group_B)
        return out_BRO.reshape(x_PI.shape[0], -1)

    def shifted(self, x_PO: jax.Array, bias_GO: jax.Array | None) -> jax.Array:
        """Adds each row's bias, its group's; rows of no group get any. In the dtype of x, computed in float32."""
        if bias_GO is None:
            return x_PO
        # A product, because the derivative of a gather is a scatter-add.
        group_B = self._groups(x_PO.shape[0] // self.block)
        is_group_BG = (group_B[:, None] == jnp.arange(len(bias_GO))).astype(jnp.float32)
        bias_BO = jnp.matmul(is_group_BG, bias_GO.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        out_BRO = x_PO.reshape(len(bias_BO), self.block, -1).astype(jnp.float32) + bias_BO[:, None]
        return out_BRO.reshape(x_PO.shape).astype(x_PO.dtype)

    def _groups(self, num_blocks: int) -> jax.Array:
        """The group of each block. Blocks after the last group are 0, so any will do."""
        ends_G = jnp.cumsum(self.sizes_G) // self.block
        return jnp.minimum(jnp.searchsorted(ends_G, jnp.arange(num_blocks), side="right"), len(ends_G) - 1)


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows per block: large enough for efficient matrix products, small enough that padding adds about a quarter."""
    target = num_rows // (4 * num_groups)
    return min(_MAX_BLOCK, max(_MIN_BLOCK, 1 << max(target, 1).bit_length() - 1))


# The derivative of a gather is a scatter-add, which is slow and, on GPUs, nondeterministic. For a permutation it can be
# a gather, too.
@CustomVjp
def _permute(x_ND: jax.Array, source_P: jax.Array, place_N: jax.Array) -> jax.Array:
    del place_N
    return x_ND.at[source_P].get(mode="fill", fill_value=0)


def _permute_forward(x_ND, source_P, place_N):
    return _permute(x_ND, source_P, place_N), (source_P, place_N)


def _permute_backward(residuals, d_out):
    source_P, place_N = residuals
    return _permute(d_out, place_N, source_P), None, None


_permute.defvjp(_permute_forward, _permute_backward)


@functools.partial(CustomVjp, nondiff_argnums=(3,))
def _spread(x_TD: jax.Array, source_P: jax.Array, place_N: jax.Array, copies: int) -> jax.Array:
    """`_permute` of rows that each stand for several equal ones in a row, which it does not make."""
    del place_N
    return x_TD.at[source_P // copies].get(mode="fill", fill_value=0)


def _spread_forward(x_TD, source_P, place_N, copies):
    return _spread(x_TD, source_P, place_N, copies), (source_P, place_N)


def _spread_backward(copies, residuals, d_out_PD):
    source_P, place_N = residuals
    d_x_ND = _permute(d_out_PD, place_N, source_P)
    return jnp.sum(d_x_ND.reshape(-1, copies, d_x_ND.shape[-1]), axis=1), None, None


_spread.defvjp(_spread_forward, _spread_backward)


def _define_block_products(x_BRI: jax.Array, w_GIO: jax.Array | StoredArray, group_B: jax.Array) -> jax.Array:
    def one_block(_, block):
        x_RI, group = block
        w_IO = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, group, keepdims=False), w_GIO)
        return None, einsum("ri,io->ro", x_RI, w_IO)

    return jax.lax.scan(one_block, None, (x_BRI, group_B))[1]


# Products with stored weights save their stored form, and make the floats of an expert again in the backward pass.
# Otherwise the loops over blocks and layers would save the floats of all of them.
_stored_block_products = CustomVjp(_define_block_products)


def _stored_block_products_forward(x_BRI, w_GIO, group_B):
    return _define_block_products(x_BRI, w_GIO, group_B), (w_GIO, group_B, jnp.zeros((), x_BRI.dtype))


def _stored_block_products_backward(residuals, d_out_BRO):
    w_GIO, group_B, zero = residuals

    def one_block(_, block):
        d_out_RO, group = block
        w_IO = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, group, keepdims=False), w_GIO)
        x_RI = jax.ShapeDtypeStruct((d_out_RO.shape[0], w_IO.shape[0]), zero.dtype)
        return None, *jax.linear_transpose(lambda x_RI: einsum("ri,io->ro", x_RI, w_IO), x_RI)(d_out_RO)

    return jax.lax.scan(one_block, None, (d_out_BRO, group_B))[1], None, None


_stored_block_products.defvjp(_stored_block_products_forward, _stored_block_products_backward)


@CustomVjp
def _stored_ragged_dot(x_PI: jax.Array, w_GIO: StoredArray, sizes_G: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x_PI, w_GIO.floats(x_PI.dtype), sizes_G)


def _stored_ragged_dot_forward(x_PI, w_GIO, sizes_G):
    return _stored_ragged_dot(x_PI, w_GIO, sizes_G), (w_GIO, sizes_G, jnp.zeros((), x_PI.dtype))


def _stored_ragged_dot_backward(residuals, d_out_PO):
    (w_GIO, sizes_G, zero), d_out_PO = jax.lax.optimization_barrier((residuals, d_out_PO))
    floats_GOI = jnp.swapaxes(w_GIO.floats(zero.dtype), 1, 2)
    return jax.lax.ragged_dot(d_out_PO, floats_GOI, sizes_G).astype(zero.dtype), None, None


_stored_ragged_dot.defvjp(_stored_ragged_dot_forward, _stored_ragged_dot_backward)

_block_products = CustomVjp(_define_block_products)


def _block_products_forward(x_BRI, w_GIO, group_B):
    return _block_products(x_BRI, w_GIO, group_B), (x_BRI, w_GIO, group_B)


def _block_products_backward(residuals, d_out_BRO):
    x_BRI, w_GIO, group_B = residuals

    def one_block(d_w_GIO, block):
        x_RI, d_out_RO, group = block
        d_x_RI = d_out_RO @ jax.lax.dynamic_index_in_dim(w_GIO, group, keepdims=False).T
        piece_IO = jnp.matmul(x_RI.T, d_out_RO, preferred_element_type=jnp.float32)
        return d_w_GIO.at[group].add(piece_IO), d_x_RI

    start = jnp.zeros(w_GIO.shape, jnp.float32)
    d_w_GIO, d_x_BRI = jax.lax.scan(one_block, start, (x_BRI, d_out_BRO, group_B))
    return d_x_BRI, d_w_GIO.astype(w_GIO.dtype), None


_block_products.defvjp(_block_products_forward, _block_products_backward)
