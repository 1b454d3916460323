"""Matrix products of rows in groups, each group with a matrix of its own, and none left out.

Source: the blocks of Gale et al. 2022, MegaBlocks (arXiv:2211.15841), section 5: rows are sorted by group, and each group is
filled up to whole blocks, so that a block meets one matrix. `jax.lax.ragged_dot` is what TPUs have for this; elsewhere XLA
computes it as if every row met every matrix, so here a loop walks over the blocks.

Shapes: N rows as they come, P rows in blocks, R rows of a block, G groups, I features in, O features out.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.derivatives import OwnBackward
from jaxlm.core.sharding import current_platform

_LARGEST_BLOCK, _SMALLEST_BLOCK = 512, 8


class Grouping(eqx.Module):
    """Where rows lie once they are sorted by group.

    Attributes:
        source_P: which of the rows lies there; N where none does.
        place_N: where each row lies; P for those of no group.
        sizes_G: rows of each group, those that fill its blocks up included.
        block: rows of a block.
    """

    source_P: jax.Array
    place_N: jax.Array
    sizes_G: jax.Array
    block: int = eqx.field(static=True)

    @staticmethod
    def of(group_N: jax.Array, num_groups: int) -> "Grouping":
        """Args: group_N: of each row; anything outside of [0, num_groups) belongs to none."""
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
        num_places = (-(-num_rows // block) + num_groups) * block
        place_N = jnp.where(group_N < num_groups, rank_N + shift_G[jnp.minimum(group_N, num_groups - 1)], num_places)
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        source_P = jnp.full(num_places, num_rows, jnp.int32).at[place_N].set(rows, mode="drop")
        return Grouping(source_P, place_N, sizes_G, block)

    def sorted(self, x_ND: jax.Array) -> jax.Array:
        """[P, D]; zeros where no row lies."""
        return _moved(x_ND, self.source_P, self.place_N)

    def unsorted(self, x_PD: jax.Array) -> jax.Array:
        """[N, D]; zeros for rows of no group."""
        return _moved(x_PD, self.place_N, self.source_P)

    def dot(self, x_PI: jax.Array, w_GIO: jax.Array) -> jax.Array:
        """[P, O]: each row times its group's matrix."""
        if current_platform() == "tpu":
            return jax.lax.ragged_dot(x_PI, w_GIO, self.sizes_G)
        num_blocks = x_PI.shape[0] // self.block
        ends_G = jnp.cumsum(self.sizes_G) // self.block
        # Blocks behind the last group hold zeros, whichever matrix they meet.
        group_B = jnp.minimum(jnp.searchsorted(ends_G, jnp.arange(num_blocks), side="right"), len(ends_G) - 1)
        out_BRO = _by_block(x_PI.reshape(num_blocks, self.block, -1), w_GIO, group_B)
        return out_BRO.reshape(x_PI.shape[0], -1)


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows of a block: large enough for full-speed products, small enough that filling up adds about a quarter."""
    wanted = num_rows // (4 * num_groups)
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 1 << max(wanted, 1).bit_length() - 1))


# A gather's derivative would be a scatter, which is slow and, on GPUs, adds in any order. Here it is a gather, too.
@OwnBackward
def _moved(x_ND: jax.Array, source_P: jax.Array, place_N: jax.Array) -> jax.Array:
    del place_N
    return x_ND.at[source_P].get(mode="fill", fill_value=0)


def _moved_forward(x_ND, source_P, place_N):
    return _moved(x_ND, source_P, place_N), (source_P, place_N)


def _moved_backward(kept, d_out):
    source_P, place_N = kept
    return _moved(d_out, place_N, source_P), None, None


_moved.defvjp(_moved_forward, _moved_backward)


@OwnBackward
def _by_block(x_BRI: jax.Array, w_GIO: jax.Array, group_B: jax.Array) -> jax.Array:
    def one(_, block):
        x_RI, group = block
        return None, x_RI @ jax.lax.dynamic_index_in_dim(w_GIO, group, keepdims=False)

    return jax.lax.scan(one, None, (x_BRI, group_B))[1]


def _by_block_forward(x_BRI, w_GIO, group_B):
    return _by_block(x_BRI, w_GIO, group_B), (x_BRI, w_GIO, group_B)


def _by_block_backward(kept, d_out_BRO):
    x_BRI, w_GIO, group_B = kept

    def one(d_w_GIO, block):
        x_RI, d_out_RO, group = block
        d_x_RI = d_out_RO @ jax.lax.dynamic_index_in_dim(w_GIO, group, keepdims=False).T
        piece_IO = jnp.matmul(x_RI.T, d_out_RO, preferred_element_type=jnp.float32)
        return d_w_GIO.at[group].add(piece_IO), d_x_RI

    start = jnp.zeros(w_GIO.shape, jnp.float32)
    d_w_GIO, d_x_BRI = jax.lax.scan(one, start, (x_BRI, d_out_BRO, group_B))
    return d_x_BRI, d_w_GIO.astype(w_GIO.dtype), None


_by_block.defvjp(_by_block_forward, _by_block_backward)
