"""A digest of arrays by content, computed on the devices that have them."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.core import tree


def array_digest(arrays: Any) -> str:
    """The same for trees with the same paths, shapes, dtypes and bits, however they are sharded; 16 hexadecimal digits.

    Each array is summed modulo 2^32 with two odd weights by place. A change of one element always changes the sums, a change
    of several does not with a probability of about 2^-62. All processes must call it.
    """
    leaves = [(path, tree.raw(leaf)) for path, leaf in tree.leaves(arrays)]
    sums = jax.device_get(jax.jit(lambda values: [_sums(value) for value in values])([value for _, value in leaves]))
    text = [
        f"{path} {value.shape} {value.dtype} {sum_.tolist()}" for (path, value), sum_ in zip(leaves, sums, strict=True)
    ]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _sums(array: jax.Array) -> jax.Array:
    """uint32 [2]."""
    if jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    else:
        bits = jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dimension, size in enumerate(bits.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dimension)
    return jnp.stack([jnp.sum(bits * (_mixed(place + jnp.uint32(salt)) | 1), dtype=jnp.uint32) for salt in _SALTS])


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of 32-bit integers without structure (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_SALTS = (0x9E3779B9, 0x7F4A7C15)
