"""An exchange of as many rows as each two devices have for each other (`jax.lax.ragged_all_to_all`).

XLA has none for CPUs (jax-ml/jax#34755). There, each device gathers all rows and takes its own, by the same offsets.

Shapes: D devices, S rows to send, R rows to receive, X features.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.sharding import current_platform
from jaxlm.core.tracing import CustomVjp


class Offsets(eqx.Module):
    """The rows that this device sends and receives, one number for each of the D devices.

    Attributes:
        sent_from: index of the first row that is sent to the device.
        num_sent: number of rows that are sent to it.
        sent_to: index of the first of these rows on the device.
        num_received: number of rows that come from the device.
    """

    sent_from: jax.Array
    num_sent: jax.Array
    sent_to: jax.Array
    num_received: jax.Array


class RaggedExchange(eqx.Module):
    """Rows that devices send each other, sorted by device on both sides. Rows that are not sent are 0 where they arrive.

    Attributes:
        there, back: the offsets of both ways.
        num_rows, num_received: S and R.
        axes: the mesh axes of the D devices.
    """

    there: Offsets
    back: Offsets
    num_rows: int = eqx.field(static=True)
    num_received: int = eqx.field(static=True)
    axes: tuple[str, ...] = eqx.field(static=True)

    @staticmethod
    def of(counts_D: jax.Array, num_rows: int, num_received: int, axes: tuple[str, ...]) -> "RaggedExchange":
        """Args: counts_D: number of rows for each device, whose sum is at most S; at most R arrive on a device."""
        counts_DD = jax.lax.all_gather(counts_D, axes)  # of the first for the second
        me = jax.lax.axis_index(axes)
        before_DD = (
            jnp.cumsum(counts_DD, axis=0) - counts_DD
        )  # rows on the second that come from devices before the first
        start_DD = jnp.cumsum(counts_DD, axis=1) - counts_DD  # rows of the first for devices before the second
        there = Offsets(start_DD[me], counts_D, before_DD[me], counts_DD[:, me])
        back = Offsets(before_DD[:, me], counts_DD[:, me], start_DD[:, me], counts_D)
        return RaggedExchange(there, back, num_rows, num_received, axes)

    def send(self, x_SX: jax.Array) -> jax.Array:
        """Returns the rows that arrive, [R, X]."""
        return _exchange(x_SX, self.there, self.back, (self.num_rows, self.num_received), self.axes)

    def give_back(self, x_RX: jax.Array) -> jax.Array:
        """Sends as many rows to each device as have come from it; returns those that arrive, [S, X]."""
        return _exchange(x_RX, self.back, self.there, (self.num_received, self.num_rows), self.axes)


# jax's own transpose has buffers of zeros, which XLA copies in each layer (marin-community/marin#8822).
@functools.partial(CustomVjp, nondiff_argnums=(3, 4))
def _exchange(
    x_SX: jax.Array, there: Offsets, back: Offsets, sizes: tuple[int, int], axes: tuple[str, ...]
) -> jax.Array:
    del back
    out_RX = jnp.zeros((sizes[1], *x_SX.shape[1:]), x_SX.dtype)
    if current_platform() == "cpu":
        return _emulated(x_SX, out_RX, there, axes)
    offsets = (there.sent_from, there.num_sent, there.sent_to, there.num_received)
    return jax.lax.ragged_all_to_all(x_SX, out_RX, *offsets, axis_name=axes)


def _exchange_forward(x_SX, there, back, sizes, axes):
    return _exchange(x_SX, there, back, sizes, axes), (there, back)


def _exchange_backward(sizes, axes, residuals, d_out_RX):
    there, back = residuals
    return _exchange(d_out_RX, back, there, sizes[::-1], axes), None, None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _emulated(x_SX: jax.Array, out_RX: jax.Array, there: Offsets, axes: tuple[str, ...]) -> jax.Array:
    me = jax.lax.axis_index(axes)
    x_DSX, from_DD, to_DD = (jax.lax.all_gather(a, axes) for a in (x_SX, there.sent_from, there.sent_to))
    after_RD = jnp.arange(len(out_RX))[:, None] - to_DD[:, me]
    is_from_RD = (after_RD >= 0) & (after_RD < there.num_received)
    sender_R = jnp.argmax(is_from_RD, axis=1)
    row_R = jnp.take_along_axis(from_DD[:, me] + after_RD, sender_R[:, None], axis=1)[:, 0]
    is_sent_R1 = jnp.any(is_from_RD, axis=1).reshape(-1, *[1] * (out_RX.ndim - 1))
    return jnp.where(is_sent_R1, x_DSX[sender_R, row_R], out_RX)
