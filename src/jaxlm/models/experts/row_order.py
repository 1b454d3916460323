"""Another order of rows, in which some may be left out, and others empty.

Shapes: T rows, K copies of each, N = T x K, P rows in the other order, D features.
"""

import functools
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.tracing import CustomVjp
from jaxlm.models.remat import CHOSEN


class RowOrder(eqx.Module):
    """Says where each row is in another order.

    Attributes:
        source_P: the row at each place of the other order; N for none.
        place_N: the place of each row in the other order; P for none.
    """

    source_P: jax.Array
    place_N: jax.Array

    @staticmethod
    def of(place_N: jax.Array, num_places: int) -> "RowOrder":
        """Args: place_N: no two rows have the same, apart from `num_places`, which is none."""
        rows = jnp.arange(len(place_N), dtype=jnp.int32)
        source_P = jnp.full(num_places, len(place_N), jnp.int32).at[place_N].set(rows, mode="drop")
        return RowOrder(source_P, place_N)

    def into(self, x_TD: jax.Array, copies: int = 1) -> jax.Array:
        """Rows in the other order, [P, D]; 0 where there is none. Args: copies: how many rows each of these stands for."""
        return _spread(x_TD, self.source_P, self.place_N, copies, 1)[0]

    def into_twice(self, x_TD: jax.Array, copies: int = 1) -> tuple[jax.Array, ...]:
        """As `into`, for two that read the rows: their gradients are added where they are brought back, not before."""
        return _spread(x_TD, self.source_P, self.place_N, copies, 2)

    def back(self, x_PD: jax.Array) -> jax.Array:
        """Rows in their own order, [N, D]; 0 for those that the other order leaves out."""
        return _permute(x_PD, self.place_N, self.source_P)

    def sums(self, x_PD: jax.Array, copies: int) -> jax.Array:
        """Sums of the rows that stand for the same one, [T, D]. Args: copies: as for `into`."""
        return _collect((x_PD,), self.source_P, self.place_N, copies)


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


@functools.partial(CustomVjp, nondiff_argnums=(3, 4))
def _spread(x_TD: jax.Array, source_P: jax.Array, place_N: jax.Array, copies: int, times: int) -> tuple[jax.Array, ...]:
    """`_permute` of rows that each stand for several equal ones in a row, which it does not make; returned `times` times."""
    del place_N
    return (x_TD.at[source_P // copies].get(mode="fill", fill_value=0),) * times


def _spread_forward(x_TD, source_P, place_N, copies, times):
    return _spread(x_TD, source_P, place_N, copies, times), (source_P, place_N)


def _spread_backward(copies, times, residuals, d_outs_PD):
    del times
    return _collect(d_outs_PD, *residuals, copies), None, None


_spread.defvjp(_spread_forward, _spread_backward)


@functools.partial(CustomVjp, nondiff_argnums=(3,))
def _collect(xs_PD: tuple[jax.Array, ...], source_P: jax.Array, place_N: jax.Array, copies: int) -> jax.Array:
    """The sum of those rows of all the arrays, of which `_spread` is the adjoint."""
    x_ND = functools.reduce(operator.add, (_permute(x_PD, place_N, source_P) for x_PD in xs_PD))
    return jnp.sum(x_ND.reshape(-1, copies, x_ND.shape[-1]), axis=1)


def _collect_forward(xs_PD, source_P, place_N, copies):
    # Under a name of its own: XLA would bring the gradients into the order together with rows that are computed later.
    saved = checkpoint_name(source_P, CHOSEN), place_N
    return _collect(xs_PD, source_P, place_N, copies), (saved, len(xs_PD))


def _collect_backward(copies, residuals, d_out_TD):
    order, times = residuals
    return _spread(d_out_TD, *order, copies, times), None, None


_collect.defvjp(_collect_forward, _collect_backward)
