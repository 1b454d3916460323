"""Pads the prompts that fill a cache on the left.

All rows then end at the same slot. Prompts are padded to one of few lengths, so that few shapes are compiled. Padding has
segment id 0, which nothing attends to.
"""

from collections.abc import Sequence

import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.sharding import current_layout
from jaxlm.models.base import Inputs

_LENGTH_MULTIPLE = 64


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def program_rows(num_rows: int) -> int:
    """Rows of a program: a multiple of the devices that they are divided over."""
    layout = current_layout()
    return round_up(num_rows, 1 if layout is None else layout.num_shards(BATCH))


def padded_length(n: int) -> int:
    """Rounds up to one of few lengths: at least 64, and at most a quarter more than n beyond that."""
    return round_up(n, max(_LENGTH_MULTIPLE, 2 ** (n.bit_length() - 3)))


def left_padded(prompts: Sequence[Sequence[int]], rows: int, first: int = 0) -> Inputs:
    """Puts the prompts into the first of `rows` rows.

    Args:
        first: position of each prompt's first token in its document.
    """
    width = padded_length(max(map(len, prompts)))
    tokens, positions, segment_ids = (np.zeros((rows, width), np.int32) for _ in range(3))
    for row, prompt in enumerate(prompts):
        start = width - len(prompt)
        tokens[row, start:] = prompt
        positions[row, start:] = np.arange(first, first + len(prompt))
        segment_ids[row, start:] = 1
    axes = (Axis(BATCH, rows), Axis(POSITION, width))
    return Inputs(*(hax.named(jnp.asarray(a), axes) for a in (tokens, positions, segment_ids)))
