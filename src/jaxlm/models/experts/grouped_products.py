"""Products of rows with the matrices of their groups.

Source: the blocks of MegaBlocks, Gale et al. 2022 (arXiv:2211.15841), section 5: rows are sorted by group, and each group is
padded to whole blocks, so that each block is multiplied by one matrix. TPUs use `jax.lax.ragged_dot`, NVIDIA's Hopper
`mosaic_products`; elsewhere XLA would multiply every row by every matrix, so a loop runs over the blocks.

Shapes: N unsorted rows, P rows in blocks, R rows of a block, G groups, I input features, O output features.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.core.products.matmul import einsum, operand
from jaxlm.core.products.stored_weights import StoredArray, StoredWeight
from jaxlm.core.sharding import current_platform
from jaxlm.core.tracing import CustomVjp
from jaxlm.models.experts.mosaic_products import LARGEST_BLOCK, mosaic_problem, mosaic_products
from jaxlm.models.experts.row_order import RowOrder

MAX_BLOCK, _MIN_BLOCK = 512, 8


AUTO = "auto"


class Grouping(eqx.Module):
    """Rows sorted by group, each of which is padded to whole blocks.

    Attributes:
        order: the sorted order.
        sizes_G: number of rows of each group, including padding.
        block: number of rows per block.
    """

    order: RowOrder
    sizes_G: jax.Array
    block: int = eqx.field(static=True)

    @staticmethod
    def of(group_N: jax.Array, num_groups: int, most: int | None = None, largest_block: int = MAX_BLOCK) -> "Grouping":
        """Sorts rows by group.

        Args:
            group_N: group of each row. Rows with a group outside [0, num_groups) are left out.
            most: number of rows in groups; None for up to all.
            largest_block: rows of a block.
        """
        num_rows = group_N.shape[0]
        most = num_rows if most is None else min(most, num_rows)
        block = min(block_rows(most, num_groups), largest_block)
        group_N = jnp.where((group_N >= 0) & (group_N < num_groups), group_N, num_groups)
        order_N = jnp.argsort(group_N, stable=True)
        rank_N = (
            jnp.zeros(num_rows, jnp.int32).at[order_N].set(jnp.arange(num_rows, dtype=jnp.int32), unique_indices=True)
        )
        counts_G = jnp.sum(group_N[:, None] == jnp.arange(num_groups), axis=0, dtype=jnp.int32)
        sizes_G = -(-counts_G // block) * block
        shift_G = jnp.cumsum(sizes_G) - sizes_G - (jnp.cumsum(counts_G) - counts_G)
        num_positions = (-(-most // block) + num_groups) * block
        place_N = jnp.where(group_N < num_groups, rank_N + shift_G[jnp.minimum(group_N, num_groups - 1)], num_positions)
        return Grouping(RowOrder.of(place_N, num_positions), sizes_G, block)

    def dot(
        self,
        x_PI: jax.Array,
        w_GIO: jax.Array | StoredArray,
        backend: str = AUTO,
        *,
        any_rest: bool = False,
        any_gradient: bool = False,
    ) -> jax.Array:
        """Multiplies each row by its group's matrix; returns [P, O] in the dtype of `operand`.

        Args:
            any_rest: rows after the last group may be anything; otherwise they are 0.
            any_gradient: the same for the gradient of the rows.
        """
        x_PI = operand(x_PI, w_GIO)
        name, _ = choose_products(x_PI.dtype, w_GIO, w_GIO.shape, backend, self.block)
        if name == "mosaic":
            return mosaic_products(x_PI, w_GIO, self.sizes_G, self.block, any_rest, any_gradient)
        if name == "ragged_dot":
            if isinstance(w_GIO, StoredArray):
                return _stored_ragged_dot(x_PI, w_GIO, self.sizes_G)
            return jax.lax.ragged_dot(x_PI, w_GIO, self.sizes_G)
        num_blocks = x_PI.shape[0] // self.block
        group_B = self._groups(num_blocks)
        products = _stored_block_products if isinstance(w_GIO, StoredArray) else _block_products
        out_BRO = products(x_PI.reshape(num_blocks, self.block, -1), w_GIO, group_B)
        return out_BRO.reshape(x_PI.shape[0], -1)

    def shifted(self, x_PO: jax.Array, bias_GO: jax.Array | None, share_P1: jax.Array | None = None) -> jax.Array:
        """Adds each row's bias, its group's; rows of no group get any. In the dtype of x, computed in float32.

        Args:
            share_P1: factors of the biases of rows; None for 1.
        """
        if bias_GO is None:
            return x_PO
        # A product, because the derivative of a gather is a scatter-add.
        group_B = self._groups(x_PO.shape[0] // self.block)
        is_group_BG = (group_B[:, None] == jnp.arange(len(bias_GO))).astype(jnp.float32)
        bias_BO = jnp.matmul(is_group_BG, bias_GO.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        bias_BRO = bias_BO[:, None]
        if share_P1 is not None:
            bias_BRO = bias_BRO * share_P1.astype(jnp.float32).reshape(len(bias_BO), self.block, 1)
        out_BRO = x_PO.reshape(len(bias_BO), self.block, -1).astype(jnp.float32) + bias_BRO
        return out_BRO.reshape(x_PO.shape).astype(x_PO.dtype)

    def _groups(self, num_blocks: int) -> jax.Array:
        """The group of each block. Blocks after the last group are 0, so any will do."""
        ends_G = jnp.cumsum(self.sizes_G) // self.block
        return jnp.minimum(jnp.searchsorted(ends_G, jnp.arange(num_blocks), side="right"), len(ends_G) - 1)


# Name -> description. Fastest first.
_BACKENDS = {
    "mosaic": "jax's Mosaic kernels, forward and backward",
    "ragged_dot": "jax.lax.ragged_dot",
    "blocks": "a loop over blocks of rows",
}
_BY_PLATFORM = {"cpu": ("blocks", "ragged_dot"), "gpu": ("mosaic", "blocks"), "tpu": ("ragged_dot", "blocks")}


def choose_products(
    dtype: Any, weight: Any, shape: Sequence[int], backend: str = AUTO, block: int | None = None
) -> tuple[str, str]:
    """Selects how rows are multiplied with the matrices of their groups; returns the name and the reason.

    Args:
        dtype: of the rows.
        weight: of which only the type counts: whether it is stored in another form.
        shape: [G, I, O] of the matrices.
        block: rows per block; None for enough of them.
        backend: a name, or `auto` for the fastest of the platform that supports this.

    Raises:
        ConfigError: the named one does not run on this platform, or does not support this.
    """
    allowed, rejected = _BY_PLATFORM[current_platform()], []
    if backend not in (AUTO, *allowed):
        raise ConfigError(
            f"model.expert_products: '{backend}' does not run on {current_platform()}. Allowed: {', '.join([AUTO, *allowed])}"
        )
    for name in allowed if backend == AUTO else (backend,):
        problem = None
        if name == "mosaic":
            is_stored = isinstance(weight, StoredArray | StoredWeight)
            problem = "weights are stored in another form" if is_stored else mosaic_problem(dtype, shape, block)
        if problem is None:
            return name, "; ".join([_BACKENDS[name], *rejected])
        rejected.append(f"not {name}: {problem}")
    raise ConfigError(f"model.expert_products: '{backend}' given, but {rejected[0].partition(': ')[2]}. Use {AUTO}")


def largest_block(name: str) -> int:
    """The most rows per block for the way of multiplying of this name. Whole blocks are filled up, so fewer are better."""
    return LARGEST_BLOCK if name == "mosaic" else MAX_BLOCK


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows per block: large enough for efficient matrix products, small enough that padding adds about a quarter."""
    target = num_rows // (4 * num_groups)
    return min(MAX_BLOCK, max(_MIN_BLOCK, 1 << max(target, 1).bit_length() - 1))


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
