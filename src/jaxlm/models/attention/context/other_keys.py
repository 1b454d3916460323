"""Attention of a device's queries to the keys of all devices that share the row: gathered, or passed around a ring.

Source: gathered keys: Llama Team 2024 (arXiv:2407.21783), section 3.3.2; ring attention: Liu et al. 2023 (arXiv:2310.01889).
Both run inside `jax.shard_map`. The backward pass recomputes the weights from the logsumexp over all keys. Gradients of keys
and values are summed in float32, in the ring on their way.

Shapes: as in `partial`; the queries and keys of one device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.tracing import CustomVjp
from jaxlm.models.attention.backends.blockwise import ATTENTION
from jaxlm.models.attention.context.keys import Keys
from jaxlm.models.attention.context.partial import Factors, Partial, PartialAttention, Tokens
from jaxlm.models.attention.null_slot import sink_gradient

Axes = tuple[str, ...]


def attend_gathered(
    axes: Axes,
    kernel: PartialAttention,
    q,
    keys: Keys,
    tokens: Tokens,
    factors: Factors,
    sink_KG: jax.Array | None = None,
) -> jax.Array:
    """Attention to the keys of all devices along mesh axes; returns [B, K, G, T, V] in the dtype of the values.

    Args:
        tokens: of this device's queries, keys and values.
        sink_KG: a score beside those of all keys, for this device's heads; None for none.
    """
    return _attend(_gathered, _gathered_gradients, axes, kernel, q, keys, tokens, factors, sink_KG)


def attend_in_ring(
    axes: Axes,
    kernel: PartialAttention,
    q,
    keys: Keys,
    tokens: Tokens,
    factors: Factors,
    sink_KG: jax.Array | None = None,
) -> jax.Array:
    """As `attend_gathered`, with the keys of one device at a time in memory."""
    return _attend(_ring, _ring_gradients, axes, kernel, q, keys, tokens, factors, sink_KG)


@functools.partial(CustomVjp, nondiff_argnums=(0, 1, 2, 3))
def _attend(forward, backward, axes, kernel, q, keys, tokens, factors, sink_KG):
    return _attend_forward(forward, backward, axes, kernel, q, keys, tokens, factors, sink_KG)[0]


def _attend_forward(forward, backward, axes, kernel, q, keys, tokens, factors, sink_KG):
    whole: Partial = forward(axes, kernel, q, keys, tokens, factors)
    whole = whole if sink_KG is None else whole.with_sink(sink_KG)
    out = checkpoint_name(_without_padding(whole.out.astype(keys.parts[1].dtype), tokens), ATTENTION)
    lse = checkpoint_name(whole.lse, ATTENTION)
    return out, (q, keys, tokens, factors, sink_KG, Partial(out, lse))


def _attend_backward(forward, backward, axes, kernel, residuals, d_out):
    q, keys, tokens, factors, sink, whole = residuals
    d_out = _without_padding(d_out, tokens)
    gradients = backward(axes, kernel, q, keys, tokens, factors, whole, d_out)
    if sink is not None:
        delta = jnp.sum(d_out.astype(jnp.float32) * whole.out.astype(jnp.float32), axis=-1)
        sink = jnp.sum(sink_gradient(sink[..., None], whole.lse, delta), axis=(0, 3))
    return *jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, (q, keys)), None, None, sink


_attend.defvjp(_attend_forward, _attend_backward)


def _without_padding(x_BKGTV: jax.Array, tokens: Tokens) -> jax.Array:
    return jnp.where((tokens.segments != 0)[:, None, None, :, None], x_BKGTV, 0)


def _all_gathered(axes: Axes, keys: Keys, tokens: Tokens) -> tuple[Keys, Tokens]:
    gather = functools.partial(jax.lax.all_gather, axis_name=axes, tiled=True)
    return keys.of(gather(a, axis=2) for a in keys.parts), Tokens(*(gather(a, axis=1) for a in tokens))


def _gathered(axes: Axes, kernel: PartialAttention, q, keys: Keys, tokens: Tokens, factors: Factors) -> Partial:
    all_keys, key_tokens = _all_gathered(axes, keys, tokens)
    return kernel.attend(q, *all_keys.expanded(), tokens, key_tokens, factors)


def _gathered_gradients(
    axes: Axes, kernel: PartialAttention, q, keys: Keys, tokens: Tokens, factors: Factors, whole: Partial, d_out
):
    all_keys, key_tokens = _all_gathered(axes, keys, tokens)
    (k, v), gradients_of = all_keys.with_gradients()
    dq, *d_keys = kernel.gradients(q, k, v, tokens, key_tokens, factors, whole, d_out)
    found = gradients_of(*d_keys)
    return dq, found.of(jax.lax.psum_scatter(g, axes, scatter_dimension=2, tiled=True) for g in found.parts)


def _passed_on(axes: Axes, arrays: Any) -> Any:
    """The arrays of the previous device in the ring."""
    size = jax.lax.axis_size(axes)
    hops = [(device, (device + 1) % size) for device in range(size)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, axes, hops), arrays)


def _around(axes: Axes, hop, first):
    """Applies `hop(number, state)` once for each device of the ring but this one.

    In a loop, what travels in a turn can only travel beside the attention of that turn. If the hops were compiled one after
    another, XLA would send all keys before the first of them: it takes conditionals and loops for nothing.
    """
    return jax.lax.fori_loop(1, jax.lax.axis_size(axes), hop, first)


def _ring(axes: Axes, kernel: PartialAttention, q, keys: Keys, tokens: Tokens, factors: Factors) -> Partial:
    def hop(number, state):
        arrived, part = state
        following = _passed_on(axes, arrived)  # travels while the device computes
        parts, key_tokens = arrived
        here = keys.of(parts).expanded()
        return following, part.merged(kernel.attend(q, *here, tokens, key_tokens, factors, hop=number))

    first = kernel.attend(q, *keys.expanded(), tokens, tokens, factors, hop=0)
    return _around(axes, hop, (_passed_on(axes, (keys.parts, tokens)), first))[1]


def _ring_gradients(
    axes: Axes, kernel: PartialAttention, q, keys: Keys, tokens: Tokens, factors: Factors, whole: Partial, d_out
):
    def gradients(hop, parts, key_tokens):
        (k, v), gradients_of = keys.of(parts).with_gradients()
        dq, *d_keys = kernel.gradients(q, k, v, tokens, key_tokens, factors, whole, d_out, hop=hop)
        return dq, gradients_of(*d_keys)

    def hop(number, state):
        arrived, passed, dq = state
        following = _passed_on(axes, arrived)
        passed = passed.of(_passed_on(axes, passed.parts))
        dq_hop, d_keys = gradients(number, *arrived)
        return following, jax.tree.map(jnp.add, passed, d_keys), dq + dq_hop

    dq, d_keys = gradients(0, keys.parts, tokens)
    _, passed, dq = _around(axes, hop, (_passed_on(axes, (keys.parts, tokens)), d_keys, dq))
    return dq, passed.of(_passed_on(axes, passed.parts))
