"""The random keys of the rows of a batch. They do not depend on the other rows."""

import zlib
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def row_keys(prompts: Sequence[Sequence[int]], rows: int, seed: int) -> jax.Array:
    """One key per row, from the seed, the prompt, and the number of earlier rows with the same prompt."""
    num_earlier: Counter[int] = Counter()
    words = np.zeros((rows, 2), np.uint32)
    for row, prompt in enumerate(prompts):
        checksum = zlib.crc32(np.asarray(prompt, np.int32).tobytes())
        words[row] = checksum, num_earlier[checksum]
        num_earlier[checksum] += 1
    key = jax.random.key(seed)
    return jax.vmap(lambda w: jax.random.fold_in(jax.random.fold_in(key, w[0]), w[1]))(jnp.asarray(words))
