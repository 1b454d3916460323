"""Prompts side by side: padded on the left, so that all rows end at the same slot, to one of few lengths, so that few
shapes are ever compiled. Padding is segment 0, which nothing attends to.
"""

from collections.abc import Sequence

import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.models.base import Inputs

_LENGTH_MULTIPLE = 64


def rounded_up(n: int, multiple: int) -> int:
    """To a multiple."""
    return -(-n // multiple) * multiple


def rounded_length(n: int) -> int:
    """To one of few lengths, at most a quarter more beyond the shortest."""
    return rounded_up(n, max(_LENGTH_MULTIPLE, 2 ** (n.bit_length() - 3)))


def left_padded(prompts: Sequence[Sequence[int]], rows: int, first: int = 0) -> Inputs:
    """The prompts in the first of so many rows. Args: first: the position of each prompt's first token in its text."""
    width = rounded_length(max(map(len, prompts)))
    tokens, positions, segment_ids = (np.zeros((rows, width), np.int32) for _ in range(3))
    for row, prompt in enumerate(prompts):
        start = width - len(prompt)
        tokens[row, start:] = prompt
        positions[row, start:] = np.arange(first, first + len(prompt))
        segment_ids[row, start:] = 1
    axes = (Axis(BATCH, rows), Axis(POSITION, width))
    return Inputs(*(hax.named(jnp.asarray(a), axes) for a in (tokens, positions, segment_ids)))
