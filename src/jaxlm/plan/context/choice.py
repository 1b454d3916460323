"""Chooses how devices that share the tokens of a row divide its attention, from the rows and the devices alone.

With P devices, T tokens in a row, and h query and g key/value heads of size H on a device (after tensor parallelism):

| method | moves in each layer | needs |
|---|---|---|
| `ulysses` | tokens to the device that has their head, and back | h divisible by P |
| `gather` | keys and values to all devices | 12 g H T bytes for them and their gradients |
| `ring` | keys and values around a ring, while attention computes | T / P tokens that compute longer than a hop takes |
| `usp` | both: a ring of groups that exchange heads | h divisible by the size of a group |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxlm.data.row_order import Balance, block_tokens
from jaxlm.plan.context.devices import Devices
from jaxlm.plan.context.rows import Rows

Method = Literal["gather", "ulysses", "ring", "usp"]
_BYTES = 2  # of a number: bfloat16
_MEMORY_SHARE = 0.1  # of a device, that `gather` may take for the keys and values of a row


@dataclass(frozen=True)
class ContextChoice:
    """How a run divides attention.

    Attributes:
        size: devices that share a row.
        method, heads_size: as in `ContextConfig`; `heads_size` is the number of devices that exchange heads, or 1.
        reason: why this method.
        balance, balance_reason: the order of tokens, and why.
        tokens: of a row on a device.
        moved: bytes that a device receives in a layer's forward pass, of each row.
        hidden_from: tokens of a ring's shard from which on a hop is hidden behind attention; None if unknown, or there is no
            ring.
    """

    size: int
    method: Method
    heads_size: int
    reason: str
    balance: Balance
    balance_reason: str
    tokens: int
    moved: float
    hidden_from: float | None = None

    def describe(self) -> str:
        """The choice and its numbers, for the table at the start."""
        groups = f" ({self.size // self.heads_size} groups of {self.heads_size})" if self.method == "usp" else ""
        hidden = "" if self.hidden_from is None else f", hidden from {self.hidden_from:,.0f} tokens of a shard on"
        return (
            f"{self.method} over {self.size} devices{groups}: {self.reason}; order of tokens {self.balance}:"
            f" {self.balance_reason}; {self.tokens:,} tokens of a row on a device;"
            f" {self.moved / 1e6:,.3g} MB move to it in each layer's forward pass{hidden}"
        )


def hidden_from(rows: Rows, devices: Devices) -> float | None:
    """Tokens of a ring's shard from which on attention takes as long as the next keys and values: 2 (g / h) R / W."""
    if devices.attention is None or devices.bandwidth is None:
        return None
    # Work of a hop, causal: 2 n^2 h H; bytes: 4 n g H.
    return 2 * rows.kv_heads / rows.heads * devices.attention / devices.bandwidth


def choose_method(rows: Rows, devices: Devices, group_sizes: Sequence[int]) -> tuple[Method, int, str]:
    """The method, the number of devices that exchange heads, and why.

    Args:
        rows: with the heads of a device.
        group_sizes: numbers of devices that may exchange heads, if others do not.
    """
    size, seq_len, kv_heads = devices.size, max(rows.seq_lens), rows.kv_heads
    if not rows.heads:
        return "gather", 1, "the model computes attention by itself"
    if kv_heads % size == 0 and devices.near == size:
        return "ulysses", size, f"{kv_heads} key/value heads divide over {size} devices of one node"
    if devices.fused != "parts" and rows.heads % size == 0 and devices.near == size:
        repeated = f"{kv_heads} key/value heads are repeated, so that they divide over {size} devices of one node"
        return "ulysses", size, f"{repeated}: fused kernels take whole rows"
    far = f"{kv_heads} key/value heads do not divide over {size} devices"
    if kv_heads % size == 0:
        far = "the devices are in several nodes"
    fitting = [part for part in group_sizes if kv_heads % part == 0 and devices.near % part == 0]
    heads_size = max(fitting, default=1)
    ring: Method = "usp" if heads_size > 1 else "ring"
    if devices.fused == "zigzag":
        return ring, heads_size, f"{far}, and fused kernels take the parts of a ring"
    # Of keys and values in bfloat16, and of their gradients in float32; 4 g H = 2 bytes x `kv_features`.
    needed = 3 * _BYTES * rows.kv_features * seq_len
    taken = f"keys, values and their gradients take {needed / 1e9:,.3g} GB"
    if devices.memory is None or needed < _MEMORY_SHARE * devices.memory:
        of_memory = "" if devices.memory is None else f" of {devices.memory / 1e9:,.3g}"
        return "gather", 1, f"{far}, and {taken}{of_memory}"
    tokens, enough = seq_len // (size // heads_size), hidden_from(rows, devices)
    if enough is not None and tokens < enough:
        return (
            "gather",
            1,
            f"{far}, and a ring with {tokens:,} tokens a shard would wait for its links (below {enough:,.0f})",
        )
    return ring, heads_size, f"{far}, and {taken}, more than a tenth of the memory"


def choose_balance(rows: Rows, num_shards: int, *, fused_zigzag: bool = False) -> tuple[Balance, str]:
    """The order of tokens, and why. Args: fused_zigzag: the devices have fused kernels for parts in zigzag order only."""
    if num_shards == 1:
        return "none", "each device computes whole rows"
    if rows.fixed_order is not None:
        return "none", rows.fixed_order
    if all(window is not None and window < min(rows.seq_lens) for window, _ in rows.work.windows):
        return "none", "all layers have windows, whose work is even"
    tried: list[tuple[Balance, str]] = [("zigzag", "each row has one document")]
    if fused_zigzag:
        tried = [("zigzag", "fused kernels need it"), ("blocks", "")]
    elif rows.is_packed:
        tried = [("blocks", "rows have several documents"), ("zigzag", "")]
    problems = []
    for balance, reason in tried:
        problem = balance_problem(balance, rows, num_shards)
        if problem is None:
            return balance, "; ".join([*filter(None, [reason]), *problems])
        problems.append(f"not {balance}: {problem}")
    return "none", "; ".join(problems)


def balance_problem(balance: Balance, rows: Rows, num_shards: int) -> str | None:
    """Why tokens cannot be in this order; None if they can."""
    if balance == "none":
        return None
    if num_shards == 1:
        return "with method: ulysses each device computes whole rows"
    if rows.fixed_order is not None:
        return rows.fixed_order
    if balance == "zigzag" and not rows.work.causal:
        return "tokens attend to later ones, so that equal shards of a document have equal work"
    for seq_len in rows.seq_lens:
        unit = 2 if balance == "zigzag" else block_tokens(seq_len, num_shards)
        if seq_len % (unit * num_shards):
            what = "two chunks" if balance == "zigzag" else f"blocks of {unit} tokens"
            return (
                f"model.seq_len ({seq_len}) does not divide into {what} for each of {num_shards} shards: it has to be a"
                f" multiple of {unit * num_shards}"
            )
    return None


def moved_bytes(rows: Rows, size: int, heads_size: int, method: Method) -> float:
    """Bytes that a device receives in the forward pass of a layer, of each row."""
    if not rows.heads:
        return 0.0
    row = _BYTES * rows.kv_features * max(rows.seq_lens)
    if method == "gather":
        return row * (size - 1) / size
    exchanged = (rows.heads + rows.kv_heads) / rows.kv_heads * (heads_size - 1) / heads_size
    return row / size * (exchanged + size // heads_size - 1)
