"""The order of the tokens of a row over the devices that share it, so that they have the same work.

In the order of the text, of two devices the second has three times the attention of the first, because its tokens come later.

zigzag    twice as many chunks as shards; shard i has chunks i and 2 S - 1 - i. Even for rows of one document.
blocks    blocks of a few hundred tokens, given out by the work that the row's documents cause (longest processing time
          first: Graham 1969, doi:10.1137/0117039). Even for packed documents too.

An order is int32 [seq_len], the index of each token in its row. Shards are equal parts of it, one after another.
"""

import heapq
from typing import Literal

import numpy as np

from jaxlm.core.sharding import AttentionWork

Balance = Literal["none", "zigzag", "blocks"]
_BLOCK_TOKENS = 512
_MIN_BLOCKS = 8  # of a shard, so that a row shorter than that has smaller blocks


def row_orders(balance: str, segment_ids: np.ndarray, num_shards: int, work: AttentionWork) -> np.ndarray:
    """The orders of rows, int32 [..., seq_len]. Args: segment_ids: int [..., seq_len], as in `TokenBatch`."""
    if balance == "zigzag":
        return np.broadcast_to(zigzag(segment_ids.shape[-1], num_shards), segment_ids.shape)
    assert balance == "blocks", balance
    rows = segment_ids.reshape(-1, segment_ids.shape[-1])
    orders = [by_blocks(row, num_shards, work) for row in rows]
    return np.reshape(orders, segment_ids.shape)


def zigzag(seq_len: int, num_shards: int) -> np.ndarray:
    """The order of chunks 0, 2 S - 1, 1, 2 S - 2, ..."""
    assert seq_len % (2 * num_shards) == 0, "the plan has checked it"
    chunks = np.arange(seq_len, dtype=np.int32).reshape(2 * num_shards, -1)
    return np.concatenate([chunks[:num_shards], chunks[num_shards:][::-1]], axis=1).reshape(-1)


def block_tokens(seq_len: int, num_shards: int) -> int:
    """Tokens of a block: 512, or so few, a power of two, that each shard has at least 8 blocks."""
    block = _BLOCK_TOKENS
    while block > 1 and block * _MIN_BLOCKS * num_shards > seq_len:
        block //= 2
    return block


def token_work(segment_ids: np.ndarray, work: AttentionWork) -> np.ndarray:
    """Counts the keys that each token of a row attends to, over all layers, int64 [seq_len]. Padding attends to none."""
    size = len(segment_ids)
    places = np.arange(size)
    is_first = np.diff(segment_ids, prepend=segment_ids[:1] - 1) != 0
    starts = np.maximum.accumulate(np.where(is_first, places, 0))
    is_last = np.append(is_first[1:], True)
    ends = np.minimum.accumulate(np.where(is_last, places, size)[::-1])[::-1]
    total = np.zeros(size, np.int64)
    for window, num_layers in work.windows:
        reach = size if window is None else window - 1
        later = 0 if work.causal else np.minimum(ends - places, reach)
        total += num_layers * (np.minimum(places - starts, reach) + later + 1)
    return total * (segment_ids != 0)


def by_blocks(segment_ids: np.ndarray, num_shards: int, work: AttentionWork) -> np.ndarray:
    """The order of blocks: the one with the most work goes to the shard with the least that has room, and so on."""
    size = len(segment_ids)
    block = block_tokens(size, num_shards)
    assert size % (block * num_shards) == 0, "the plan has checked it"
    loads = token_work(segment_ids, work).reshape(-1, block).sum(axis=1)
    room = len(loads) // num_shards
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    waiting = [(0, shard) for shard in range(num_shards)]
    for number in np.argsort(-loads, kind="stable").tolist():
        load, shard = heapq.heappop(waiting)
        shards[shard].append(number)
        if len(shards[shard]) < room:
            heapq.heappush(waiting, (load + int(loads[number]), shard))
    blocks = np.arange(size, dtype=np.int32).reshape(-1, block)
    return blocks[np.concatenate([sorted(numbers) for numbers in shards])].reshape(-1)


def imbalance(order: np.ndarray, segment_ids: np.ndarray, num_shards: int, work: AttentionWork) -> float:
    """The work of the shard that has the most, relative to the mean; 1 for a row without work."""
    loads = token_work(segment_ids, work)[order].reshape(num_shards, -1).sum(axis=1)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def imbalances(segment_ids: np.ndarray, num_shards: int, work: AttentionWork) -> dict[Balance, float]:
    """The imbalance of a row in each order that divides it over the shards. Args: segment_ids: int [seq_len]."""
    size = len(segment_ids)
    orders: dict[Balance, np.ndarray] = {"none": np.arange(size)}
    if size % (2 * num_shards) == 0:
        orders["zigzag"] = zigzag(size, num_shards)
    if size % (block_tokens(size, num_shards) * num_shards) == 0:
        orders["blocks"] = by_blocks(segment_ids, num_shards, work)
    return {name: imbalance(order, segment_ids, num_shards, work) for name, order in orders.items()}
