"""A ring over rows in zigzag order, with cuDNN's fused kernel for each hop.

Device i of P has the chunks i and 2P - 1 - i of the row's 2P. So each hop needs half of the scores of its queries and keys,
in one of three shapes that no mask has to describe: its own keys (causal), those of an earlier device (all queries to the
first chunk), those of a later one (the second chunk of queries to both).

Rows of several documents take `InBlocks`. The choice is made on the device, from the tokens.

Shapes: as in `partial`; N = K G.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.models.attention.backends.cudnn import CudnnOptions, single_backward, single_forward
from jaxlm.models.attention.context.partial import MASKED, InBlocks, Partial, PartialAttention, Tokens


@dataclass(frozen=True)
class CudnnHops(PartialAttention):
    """Causal attention in bfloat16 or float16 within a ring.

    Attributes:
        axes: mesh axes of the ring.
        scale: of the scores.
        in_blocks: for rows of several documents.
    """

    axes: tuple[str, ...]
    scale: float
    in_blocks: InBlocks

    def attend(self, q_BKGTH, k_BKSH, v_BKSV, queries, keys, factors, *, hop=None) -> Partial:
        arrays = (q_BKGTH, k_BKSH, v_BKSV)
        blocks = functools.partial(self.in_blocks.attend, queries=queries, keys=keys, factors=factors)
        return self._select(queries, keys, hop, _hop_forward, blocks, *arrays)

    def gradients(self, q_BKGTH, k_BKSH, v_BKSV, queries, keys, factors, whole, d_out_BKGTV, *, hop=None):
        def blocks(q, k, v, whole: Partial, d_out):
            return self.in_blocks.gradients(q, k, v, queries, keys, factors, whole, d_out)

        return self._select(queries, keys, hop, _hop_backward, blocks, q_BKGTH, k_BKSH, v_BKSV, whole, d_out_BKGTV)

    def _select(self, queries: Tokens, keys: Tokens, hop: Any, fused, blocks, *arrays):
        """Runs `fused(options, first query, last key, *arrays)` of the hop's shape, or `blocks`."""
        size = jax.lax.axis_size(self.axes)
        device = jax.lax.axis_index(self.axes)
        owner = (device - hop) % size
        chunk = queries.positions.shape[-1] // 2
        suits = _are_single_documents(queries, device, size) & _are_single_documents(keys, owner, size)
        own = functools.partial(fused, CudnnOptions(self.scale), 0, 2 * chunk)
        earlier = functools.partial(fused, CudnnOptions(self.scale, causal=False), 0, chunk)
        later = functools.partial(fused, CudnnOptions(self.scale, causal=False), chunk, 2 * chunk)
        if isinstance(hop, int) and hop == 0:
            return jax.lax.cond(suits, own, blocks, *arrays)
        shape = jnp.where(suits, jnp.where(owner < device, 0, 1), 2)
        return jax.lax.switch(shape, (earlier, later, blocks), *arrays)


def _are_single_documents(tokens: Tokens, device: jax.Array, num_devices: int) -> jax.Array:
    """Tells whether the tokens of a device in zigzag order are those of rows with one document followed only by padding."""
    chunk = tokens.positions.shape[-1] // 2
    starts = jnp.stack([device * chunk, (2 * num_devices - 1 - device) * chunk])
    index_T = (starts[:, None] + jnp.arange(chunk)).reshape(-1)
    return jnp.all((tokens.segments == 0) | ((tokens.segments == 1) & (tokens.positions == index_T)))


def _merged_heads(x_BKGTH: jax.Array) -> jax.Array:
    """[B, K, G, T, H] to [B, T, N, H]."""
    batch, kv_heads, group, length, size = x_BKGTH.shape
    return jnp.swapaxes(x_BKGTH.reshape(batch, kv_heads * group, length, size), 1, 2)


def _parted_heads(x_BTNH: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, N, H] to float32 [B, K, G, T, H]."""
    batch, length, heads, size = x_BTNH.shape
    x_BNTH = jnp.swapaxes(x_BTNH, 1, 2).astype(jnp.float32)
    return x_BNTH.reshape(batch, kv_heads, heads // kv_heads, length, size)


def _arguments(first: int, stop: int, q_BKGTH, k_BKSH, v_BKSV) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries from `first` on, and keys and values up to `stop`, as the kernel reads them."""
    k, v = (jnp.swapaxes(a[:, :, :stop], 1, 2) for a in (k_BKSH, v_BKSV))
    return _merged_heads(q_BKGTH[:, :, :, first:]), k, v


def _hop_forward(options: CudnnOptions, first: int, stop: int, q_BKGTH, k_BKSH, v_BKSV) -> Partial:
    out_BTNH, lse_BNT = single_forward(options, None, *_arguments(first, stop, q_BKGTH, k_BKSH, v_BKSV))
    batch, kv_heads, group = q_BKGTH.shape[:3]
    out = _parted_heads(out_BTNH, kv_heads)
    lse = lse_BNT.reshape(batch, kv_heads, group, -1)
    before = [(0, 0)] * 3 + [(first, 0)]
    return Partial(jnp.pad(out, [*before, (0, 0)]), jnp.pad(lse, before, constant_values=MASKED))


def _hop_backward(options: CudnnOptions, first: int, stop: int, q_BKGTH, k_BKSH, v_BKSV, whole: Partial, d_out_BKGTV):
    batch, kv_heads, group, length, _ = q_BKGTH.shape
    out_BTNH, d_out_BTNH = (_merged_heads(a[:, :, :, first:]) for a in (whole.out, d_out_BKGTV))
    lse_BNT = whole.lse[..., first:].reshape(batch, kv_heads * group, -1)
    arguments = _arguments(first, stop, q_BKGTH, k_BKSH, v_BKSV)
    dq, *d_keys = single_backward(options, None, *arguments, out_BTNH, lse_BNT, d_out_BTNH)
    dq = jnp.pad(_parted_heads(dq, kv_heads), [(0, 0)] * 3 + [(first, 0), (0, 0)])
    dk, dv = (jnp.swapaxes(a, 1, 2).astype(jnp.float32) for a in d_keys)
    return dq, *(jnp.pad(a, [(0, 0)] * 2 + [(0, length - stop), (0, 0)]) for a in (dk, dv))
