"""Chooses how devices that share the tokens of a row divide its attention, from the rows and the devices alone.

With P devices, T tokens in a row, and h query and g key/value heads of size H on a device (after tensor parallelism):

| method | moves in each layer | needs |
|---|---|---|
| `ulysses` | tokens to the device that has their head, and back | h divisible by P |
| `gather` | keys and values to all devices | 12 g H T bytes for them and their gradients |
| `ring` | keys and values around a ring, while attention computes | T / P tokens that compute longer than a hop takes |
| `usp` | both: a ring of groups that exchange heads | h divisible by the size of a group |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import HEADS, KV_HEADS, STATE_HEADS, axes_of
from jaxlm.core.devices import memory_limit
from jaxlm.core.errors import divisors
from jaxlm.core.sharding import AttentionWork, Layout
from jaxlm.data.config import DataConfig
from jaxlm.data.row_order import Balance, block_tokens
from jaxlm.engine.entry import StateBuilder
from jaxlm.hardware.topologies import Topology, chip_of, speed_of
from jaxlm.models.base import LanguageModel
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import Attention
from jaxlm.models.mixers.base import Mixer
from jaxlm.models.stacks import HeterogeneousBody, Stack
from jaxlm.reading.decode import choice_name


@dataclass(frozen=True)
class Devices:
    """The devices that share a row.

    Attributes:
        size: how many they are.
        near: how many neighbors are in one node (a slice of TPUs), in groups of this size.
        memory: bytes of each; None if unknown.
        attention: FLOP/s of attention; None if unknown.
        bandwidth: bytes/s from one to the next, where they are farthest apart; None if unknown.
        fused: what the platform's fused attention kernels take: any part of a row (CPUs, which have one kernel for all),
            whole rows, or also the parts of a ring in zigzag order.
    """

    size: int
    near: int
    memory: float | None = None
    attention: float | None = None
    bandwidth: float | None = None
    fused: Literal["parts", "rows", "zigzag"] = "parts"

    @staticmethod
    def of(layout: Layout, axes: Sequence[str], devices: Sequence[Any]) -> "Devices":
        """Args: axes: mesh axes that share a row; devices: all, in the order of jax."""
        chip, names = chip_of(layout.device.device_kind), list(layout.mesh.axis_names)
        size = math.prod(layout.mesh.shape[name] for name in axes)
        if chip is None:
            nodes = [device.process_index for device in devices]
        elif chip.domain is None:
            nodes = [getattr(device, "slice_index", None) or 0 for device in devices]
        else:
            nodes = [number // chip.domain for number in range(len(devices))]
        node_of = dict(zip(map(id, devices), nodes, strict=True))
        grid = np.vectorize(lambda device: node_of[id(device)], otypes=[int])(layout.mesh.devices)
        rows = np.moveaxis(grid, [names.index(name) for name in axes], range(-len(axes), 0)).reshape(-1, size)
        groups = {part: rows.reshape(-1, part) for part in map(int, divisors(size))}
        near = max(part for part, group in groups.items() if (group == group[:, :1]).all())
        if chip is None:
            return Devices(size, near, memory_limit())
        bandwidth = chip.link_bandwidth if near == size or chip.domain is None else chip.outer_bandwidth
        speed = speed_of(Topology(chip.name, chip, len(devices)), np.dtype(np.float16))
        fused = "zigzag" if layout.platform == "gpu" else "rows"
        return Devices(size, near, chip.memory, speed.attention, bandwidth, fused)


@dataclass(frozen=True)
class Rows:
    """The rows that a run reads, and the attention that its models compute of them.

    Attributes:
        seq_lens: tokens of a row, in each phase.
        heads, kv_heads: the greatest numbers that divide those of all layers; 0 if the model computes attention by itself.
        kv_features: numbers in a token's keys and values, of the layer that has the most.
        work: the attention of all layers.
        is_packed: whether a row may have several documents.
        fixed_order: why tokens have to be in the order of the text; None if they need not.
        state_heads: the greatest number that divides the key heads of all recurrent layers; 0 if there are none.
        consecutive: why each device needs consecutive tokens; None if it does not.
    """

    seq_lens: tuple[int, ...]
    heads: int
    kv_heads: int
    kv_features: float
    work: AttentionWork = field(default_factory=AttentionWork)
    is_packed: bool = False
    fixed_order: str | None = None
    state_heads: int = 0
    consecutive: str | None = None

    @staticmethod
    def of(state_builder: StateBuilder, data: Sequence[DataConfig]) -> "Rows":
        """The rows that the phases read. Args: data: section of each phase."""
        models = [state_builder.abstract_state(phase).model for phase in state_builder.phases]
        seq_lens = [phase.model.seq_len for phase in state_builder.phases]
        layers = [layer for model in models for layer in attention_sizes(model)]
        windows: dict[int | None, int] = {}
        for kind in (kind for model in models for kind in _kinds(model)):
            windows[kind.window] = windows.get(kind.window, 0) + 1
        unordered = [
            f"the batches of data.type: {choice_name(type(section))} have no column `order`"
            for section, seq_len in zip(data, seq_lens, strict=True)
            if not section.batch_spec(seq_len).takes_order
        ]
        axes = {axis for model in models for _, leaf in tree.leaves(model) if tree.is_named(leaf) for axis in leaf.axes}
        unordered += [
            f"{type(mixer).__name__} layers read tokens in the order of the text"
            for model in models
            for mixer in tree.modules(model, Mixer)
            if not mixer.takes_order
        ]
        opaque = [
            f"a model of type {type(model).__name__} computes attention by the index of each token in its row"
            for model in models
            if not attention_sizes(model)
        ]
        return Rows(
            seq_lens=tuple(dict.fromkeys(seq_lens)),
            heads=0 if opaque else math.gcd(*(layer.heads for layer in layers)),
            kv_heads=0 if opaque else math.gcd(*(layer.kv_heads for layer in layers)),
            kv_features=max((layer.kv_features for layer in layers), default=0),
            work=AttentionWork(tuple(windows.items()) or ((None, 1),), all(model.is_causal for model in models)),
            is_packed=any(section.corpus.packs_documents for section in data),
            fixed_order=next(iter([*opaque, *unordered]), None),
            state_heads=math.gcd(*(axis.size for axis in axes if axis.name == STATE_HEADS)),
        )

    def on_device(self, layout: Layout) -> "Rows":
        """The rows with the heads that tensor parallelism leaves on a device. Where it divides only the query heads, each of
        them gets a copy of its key and value."""
        on_device = replace(self, state_heads=self.state_heads // layout.num_shards(STATE_HEADS))
        if not self.heads:
            return on_device
        num_shards = layout.num_shards(HEADS)
        heads = self.heads // num_shards
        kv_heads = self.kv_heads // num_shards if layout.num_shards(KV_HEADS) == num_shards else heads
        return replace(
            on_device, heads=heads, kv_heads=kv_heads, kv_features=self.kv_features * kv_heads / self.kv_heads
        )


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer's attention. Attributes: kv_features: numbers in a token's keys and values."""

    heads: int
    kv_heads: int
    kv_features: int


def attention_sizes(model: LanguageModel) -> list[LayerSizes]:
    """The sizes of the attention of a model's layers, each once; none if it computes attention by itself."""
    sizes_by_layer = {}
    for layer in tree.modules(model, Attention):
        # Of the axes, not of the weights: an adapted layer computes its weight.
        axes = [axis for one in tree.modules(layer, Linear) for spec in (one.Out, one.In) for axis in axes_of(spec)]
        sizes = {axis.name: axis.size for axis in axes}
        task = layer.task("cpu", None, np.dtype(np.float32), model.Pos.size, None)
        kv_heads = sizes.get(KV_HEADS, sizes[HEADS])
        value_size = task.head_size if task.value_size is None else task.value_size
        sizes_by_layer[LayerSizes(sizes[HEADS], kv_heads, kv_heads * (task.head_size + value_size))] = None
    return list(sizes_by_layer)


def _kinds(model: LanguageModel) -> list[Any]:
    """The kind of each layer with attention."""
    stacks = [stack for stack in tree.modules(model, Stack) if tree.modules(stack, Attention)]
    return [
        *(kind for stack in stacks for kind in stack.kinds_between(0, stack.Layers.size)),
        *(kind for body in tree.modules(model, HeterogeneousBody) for kind in body.kinds),
    ]


Method = Literal["gather", "ulysses", "ring", "usp"]
_BYTES = 2  # of a number: bfloat16
_MEMORY_SHARE = 0.1  # of a device, that `gather` may take for the keys and values of a row


@dataclass(frozen=True)
class ContextChoice:
    """Describes how a run divides attention.

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
    """Explains why tokens cannot be in this order; None if they can."""
    if balance == "none":
        return None
    if num_shards == 1:
        return "with method: ulysses each device computes whole rows"
    if rows.fixed_order is not None:
        return rows.fixed_order
    if balance == "blocks" and rows.consecutive is not None:
        return rows.consecutive
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
