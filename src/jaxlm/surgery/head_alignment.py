"""Rotations of key/value heads that make the heads of a group alike without a change of what the model computes.

Source: Jin et al. 2024, "Align Attention Heads Before Merging Them" (arXiv:2412.20677), section 3.2: averaging heads loses
less after each of them has been turned towards the others, since a head's features may be turned as a whole:

* Values by any orthogonal matrix, whose inverse the output projection applies.
* Keys by one that commutes with the rotary embedding: a rotation of the two features of each pair, and any orthogonal matrix
  of the features that are not rotated. Queries turn with their keys.

With W_r the projection of head r of a group, R_r its rotation, and C the second moment of the inputs, the mean of the heads
loses the least for the data where

    sum_rs tr(R_r W_r C W_s^T R_s^T)

is largest. Starting without rotations, each head in turn gets the best one for the sum of the others, so that the sum only
grows: the mean of turned heads never loses more on the measured data than the mean of the heads as they are.

Shapes: G groups, R heads of a group, D features of a head, I inputs (the last is the constant 1, with the biases, if any).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxlm.surgery.bottleneck import HeadFeatures

_NUM_ROUNDS = 10

Rule = Callable[[jax.Array], jax.Array]
"""Of the allowed matrices R [D, D], the one with the largest tr(R A). Args: A [D, D]."""


def aligned(heads_GRDI: jax.Array, moment_II: jax.Array, best: Rule) -> jax.Array:
    """The rotations of the heads of each group, [G, R, D, D]."""
    num_heads, size = heads_GRDI.shape[1:3]

    def of_group(heads_RDI: jax.Array) -> jax.Array:
        products_RDSE = jnp.einsum("rdi,ij,sej->rdse", heads_RDI, moment_II, heads_RDI)

        def turn(number: jax.Array, turns_RDD: jax.Array) -> jax.Array:
            head = number % num_heads
            others_RDD = turns_RDD.at[head].set(0.0)
            return turns_RDD.at[head].set(best(jnp.einsum("dse,sfe->df", products_RDSE[head], others_RDD)))

        unturned = jnp.broadcast_to(jnp.eye(size), (num_heads, size, size))
        return jax.lax.fori_loop(0, _NUM_ROUNDS * num_heads, turn, unturned)

    return jax.vmap(of_group)(heads_GRDI)


def any_rotation(a_DD: jax.Array) -> jax.Array:
    """The `Rule` for values: all orthogonal matrices."""
    u, _, vh = jnp.linalg.svd(a_DD)
    return vh.T @ u.T


def rotation_of_pairs(features: HeadFeatures) -> Rule:
    """The `Rule` for keys: orthogonal matrices that commute with the rotary embedding."""
    first, second, unrotated = (jnp.asarray(f, int) for f in (features.first, features.second, features.unrotated))

    def best(a_DD: jax.Array) -> jax.Array:
        cos, sin = a_DD[first, first] + a_DD[second, second], a_DD[first, second] - a_DD[second, first]
        length = jnp.hypot(cos, sin)
        is_zero = length == 0
        cos, sin = jnp.where(is_zero, 1.0, cos / length), jnp.where(is_zero, 0.0, sin / length)
        turn = jnp.zeros_like(a_DD)
        turn = turn.at[first, first].set(cos).at[second, second].set(cos)
        turn = turn.at[first, second].set(-sin).at[second, first].set(sin)
        if not len(unrotated):
            return turn
        rows, columns = jnp.meshgrid(unrotated, unrotated, indexing="ij")
        return turn.at[rows, columns].set(any_rotation(a_DD[rows, columns]))

    return best


def loss_of_mean(heads_GRDI: jax.Array, moment_II: jax.Array) -> jax.Array:
    """What heads differ by from the mean of their group, relative to them; root mean square over heads and inputs."""
    sizes = lambda w: jnp.einsum("grdi,ij,grdj->", w, moment_II, w)  # noqa: E731
    difference = heads_GRDI - heads_GRDI.mean(axis=1, keepdims=True)
    return jnp.sqrt(jnp.maximum(sizes(difference) / sizes(heads_GRDI), 0.0))
