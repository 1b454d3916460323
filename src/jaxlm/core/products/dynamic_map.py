"""The 256 numbers that dynamic tree quantization stores moments as, and the nearest of them.

Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861), sections 2.1 and 2.2, in the
version without a sign bit for numbers that are never negative; bitsandbytes 0.50.2 (`functional.create_dynamic_map`) for the
exact numbers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

NUM_CODES = 256
_NUM_DECADES = 7


@functools.cache
def dynamic_map(is_signed: bool) -> np.ndarray:
    """The numbers, ascending, in float32 [256]: 0, 1, and those of seven decades below 1.

    A decade has twice as many numbers as the one below it, at equal distances. A signed map has the same numbers with both
    signs, half as many, except -1.
    """
    numbers = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for decade in range(_NUM_DECADES):
        boundaries = _linspace(0.1, 1.0, 2 ** (decade if is_signed else decade + 1) + 1)
        middles = (boundaries[:-1] + boundaries[1:]) / np.float32(2)
        scaled = np.float32(10.0 ** (decade + 1 - _NUM_DECADES)) * middles
        numbers += [scaled, -scaled] if is_signed else [scaled]
    return np.sort(np.concatenate(numbers))


def nearest_codes(values: jax.Array, is_signed: bool) -> jax.Array:
    """The index in the map of the number nearest to each value, uint8. In the middle of two, it is the lower one.

    Args:
        values: float32, from -1 to 1; from 0 if the map has no signs. NaN has the code 0.
    """
    numbers = dynamic_map(is_signed)
    middles = (numbers[:-1] + numbers[1:]) / np.float32(2)
    # A binary search without branches for the number of middles below a value.
    half = NUM_CODES // 2
    index = jnp.where(values > middles[half - 1], half, 0)
    while half := half // 2:
        index = jnp.where(values > _at(middles, index + (half - 1)), index + half, index)
    return index.astype(jnp.uint8)


def numbers_of(codes: jax.Array, is_signed: bool) -> jax.Array:
    """The numbers with these indices in the map, float32."""
    return _at(dynamic_map(is_signed), codes.astype(jnp.int32))


def _at(table: np.ndarray, index: jax.Array) -> jax.Array:
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")


def _linspace(first: float, last: float, count: int) -> np.ndarray:
    """`torch.linspace` in float32: steps from both ends, each a product and a sum that are rounded together."""
    first32, last32 = np.float32(first), np.float32(last)
    step, index = np.float64((last32 - first32) / np.float32(count - 1)), np.arange(count)
    halves = index < count // 2
    return np.where(halves, first32 + step * index, last32 - step * (count - 1 - index)).astype(np.float32)
