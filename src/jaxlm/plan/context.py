"""Context parallelism: how devices that share the tokens of a row divide its attention, chosen and checked before a start.

With P devices, T tokens in a row, and h query and g key/value heads of size H on a device (after tensor parallelism):

| method | moves in each layer | needs |
|---|---|---|
| `ulysses` | tokens to the device that has their head, and back | h divisible by P |
| `gather` | keys and values to all devices | 12 g H T bytes for them and their gradients |
| `ring` | keys and values around a ring, while attention computes | T / P tokens that compute longer than a hop takes |
| `usp` | both: a ring of groups that exchange heads | h divisible by the size of a group |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import CONTEXT, CONTEXT_HEADS, HEADS, KV_HEADS, POSITION, axes_of, axis_names
from jaxlm.core.devices import memory_limit
from jaxlm.core.errors import ConfigError, divisors
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.sharding import AttentionWork, ContextSharding, Layout
from jaxlm.data.config import DataConfig
from jaxlm.data.row_order import Balance, block_tokens
from jaxlm.engine.entry import StateBuilder
from jaxlm.hardware.estimate import speed_of
from jaxlm.hardware.topologies import Topology, chip_of
from jaxlm.models.base import LanguageModel
from jaxlm.models.layers import Attention
from jaxlm.models.linear import Linear
from jaxlm.models.stacks import HeterogeneousBody, Stack
from jaxlm.reading.decode import choice_name

AUTO = "auto"
Method = Literal["gather", "ulysses", "ring", "usp"]
_BYTES = 2  # of a number: bfloat16
_MEMORY_SHARE = 0.1  # of a device, that `gather` may take for the keys and values of a row


@dataclass(frozen=True)
class ContextConfig:
    """Context parallelism: several devices share each row, so that it may be longer than fits on one.

    Attributes:
        size: number of devices that share the tokens of a row; null is 1. Parameters are sharded over them too. With a
            `trainer.mesh` that maps `position`, leave it out.
        method: how they divide attention. `ulysses` exchanges tokens for heads, `gather` gathers all keys and values, `ring`
            passes them around, and `usp` exchanges heads in groups of `heads_size` devices and passes keys and values around
            the groups. `auto` selects one for the model and the devices, and logs which and why.
        balance: the order of the tokens of a row over the devices, so that all have the same work: that of the text
            (`none`), two chunks for each, an early and a late one (`zigzag`), or blocks by the work that the row's documents
            cause (`blocks`). With `ulysses` there is none. `auto` is `blocks` for packed documents and otherwise `zigzag`, or
            the one that fused kernels take, and logs why.
        heads_size: number of devices in a group of `usp`; null for the most that the key/value heads divide over.
    """

    size: PositiveInt | None = None
    method: Literal["auto", "gather", "ulysses", "ring", "usp"] = AUTO
    balance: Literal["auto", "none", "zigzag", "blocks"] = AUTO
    heads_size: PositiveInt | None = None


@dataclass(frozen=True)
class Rows:
    """The rows that a run reads, and the attention that its models compute of them.

    Attributes:
        seq_lens: tokens of a row, in each phase.
        heads, kv_heads: numbers that divide those of all layers; 0 if the model computes attention by itself.
        kv_features: numbers that a layer's keys and values of a token have, at most.
        work: the attention of all layers.
        is_packed: whether a row may have several documents.
        fixed_order: why tokens have to be in the order of the text; None if they need not.
    """

    seq_lens: tuple[int, ...]
    heads: int
    kv_heads: int
    kv_features: int
    work: AttentionWork = field(default_factory=AttentionWork)
    is_packed: bool = False
    fixed_order: str | None = None

    @staticmethod
    def of(
        models: Sequence[LanguageModel], seq_lens: Sequence[int], *, is_packed: bool, fixed_order: str | None
    ) -> "Rows":
        """The rows of phases. Args: models: of shapes; fixed_order: why the data does not allow another order."""
        layers = [layer for model in models for layer in attention_sizes(model)]
        windows: dict[int | None, int] = {}
        for model in models:
            for kind in (kind for stack in _stacks(model) for kind in _kinds(stack)):
                windows[kind.window] = windows.get(kind.window, 0) + 1
        own = [type(model).__name__ for model in models if not attention_sizes(model)]
        if own:
            fixed_order = f"a model of type {own[0]} computes attention by the index of each token in its row"
        return Rows(
            seq_lens=tuple(dict.fromkeys(seq_lens)),
            heads=0 if own else math.gcd(*(layer.heads for layer in layers)),
            kv_heads=0 if own else math.gcd(*(layer.kv_heads for layer in layers)),
            kv_features=max((layer.kv_features for layer in layers), default=0),
            work=AttentionWork(tuple(windows.items()) or ((None, 1),), all(model.is_causal for model in models)),
            is_packed=is_packed,
            fixed_order=fixed_order,
        )


def rows_of(state_builder: StateBuilder, data: Sequence[DataConfig]) -> Rows:
    """The rows that the phases read. Args: data: section of each phase."""
    models = [state_builder.abstract_state(phase).model for phase in state_builder.phases]
    seq_lens = [phase.model.seq_len for phase in state_builder.phases]
    specs = [section.batch_spec(seq_len) for section, seq_len in zip(data, seq_lens, strict=True)]
    own = [choice_name(type(section)) for section, spec in zip(data, specs, strict=True) if not spec.takes_order]
    fixed = f"the batches of data.type: {own[0]} have no column `order`" if own else None
    return Rows.of(models, seq_lens, is_packed=any(one.packs_documents for one in data), fixed_order=fixed)


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer's attention: its heads, and what keys and values of a token have."""

    heads: int
    kv_heads: int
    kv_features: int


def attention_sizes(model: LanguageModel) -> list[LayerSizes]:
    """The sizes of the attention of a model's layers, each once; none if it computes attention by itself."""
    found = {}
    for layer in tree.modules(model, Attention):
        # Of the axes, not of the weights: an adapted layer computes its weight.
        axes = [axis for one in tree.modules(layer, Linear) for spec in (one.Out, one.In) for axis in axes_of(spec)]
        sizes = {axis.name: axis.size for axis in axes}
        task = layer.task("cpu", None, np.dtype(np.float32), model.Pos.size, None)
        kv_heads = sizes.get(KV_HEADS, sizes[HEADS])
        value_size = task.head_size if task.value_size is None else task.value_size
        found[LayerSizes(sizes[HEADS], kv_heads, kv_heads * (task.head_size + value_size))] = None
    return list(found)


def _stacks(model: LanguageModel) -> list[Stack | HeterogeneousBody]:
    return [*tree.modules(model, Stack), *tree.modules(model, HeterogeneousBody)]


def _kinds(stack: Stack | HeterogeneousBody) -> Sequence[Any]:
    return stack.kinds if isinstance(stack, HeterogeneousBody) else stack.kinds_between(0, stack.Layers.size)


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

    @property
    def num_shards(self) -> int:
        """Shards of a row that have queries of their own."""
        return self.size // self.heads_size

    def describe(self) -> str:
        """The choice and its numbers, for the table at the start."""
        groups = f" ({self.num_shards} groups of {self.heads_size})" if self.method == "usp" else ""
        hidden = "" if self.hidden_from is None else f", hidden from {self.hidden_from:,.0f} tokens of a shard on"
        return (
            f"{self.method} over {self.size} devices{groups}: {self.reason}; order of tokens {self.balance}:"
            f" {self.balance_reason}; {self.tokens:,} tokens of a row on a device;"
            f" {self.moved / 1e6:,.3g} MB move to it in each layer's forward pass{hidden}"
        )


def hidden_from(rows: Rows, devices: Devices, heads: int, kv_heads: int) -> float | None:
    """Tokens of a ring's shard from which on attention takes as long as the next keys and values: 2 (g / h) R / W."""
    if devices.attention is None or devices.bandwidth is None:
        return None
    # Work of a hop, causal: 2 n^2 h H; bytes: 4 n g H.
    return 2 * kv_heads / heads * devices.attention / devices.bandwidth


def choose_method(
    rows: Rows, devices: Devices, heads: int, kv_heads: int, group_sizes: Sequence[int]
) -> tuple[Method, int, str]:
    """The method, the number of devices that exchange heads, and why.

    Args:
        heads, kv_heads: on a device, after tensor parallelism.
        group_sizes: numbers of devices that may exchange heads, if others do not.
    """
    size, seq_len = devices.size, max(rows.seq_lens)
    if not heads:
        return "gather", 1, "the model computes attention by itself"
    if kv_heads % size == 0 and devices.near == size:
        return "ulysses", size, f"{kv_heads} key/value heads divide over {size} devices of one node"
    if devices.fused != "parts" and heads % size == 0 and devices.near == size:
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
    needed = 3 * _BYTES * rows.kv_features * (kv_heads / rows.kv_heads) * seq_len
    taken = f"keys, values and their gradients take {needed / 1e9:,.3g} GB"
    if devices.memory is None or needed < _MEMORY_SHARE * devices.memory:
        of_memory = "" if devices.memory is None else f" of {devices.memory / 1e9:,.3g}"
        return "gather", 1, f"{far}, and {taken}{of_memory}"
    tokens, enough = seq_len // (size // heads_size), hidden_from(rows, devices, heads, kv_heads)
    if enough is not None and tokens < enough:
        return "gather", 1, f"{far}, and with {tokens:,} tokens, a ring waits for its links (from {enough:,.0f} on not)"
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


def plan_context(
    config: ContextConfig, layout: Layout, axes: Sequence[str], rows: Rows, devices: Sequence[Any], *, is_free: bool
) -> tuple[ContextChoice, ContextSharding, Mapping[str, int]]:
    """How the devices along some mesh axes divide attention: the choice, and what the layout says of it.

    Args:
        layout: with the mesh, and the mapping of heads.
        axes: mesh axes that share a row.
        is_free: whether the axes are those of `trainer.mesh`, whose sizes cannot be changed.

    Returns:
        Also the size of each mesh axis that `axes` become.

    Raises:
        ConfigError: the keys are illegal for these rows and devices.
    """
    shape = {name: layout.mesh.shape[name] for name in axes}
    size = math.prod(shape.values())
    key = "trainer.context"
    for seq_len in rows.seq_lens:
        if seq_len % size:
            raise ConfigError(
                f"{key}: {size} devices share a row of model.seq_len: {seq_len} tokens, which do not divide over them. Set"
                f" model.seq_len to a multiple of {size}, or let another number of devices share a row"
            )
    tensor, kv_tensor = layout.num_shards(HEADS), layout.num_shards(KV_HEADS)
    heads = rows.heads // tensor
    # Where tensor parallelism shards only the query heads, each of them gets a copy of its key and value.
    kv_heads = rows.kv_heads // kv_tensor if kv_tensor == tensor else heads
    near = Devices.of(layout, axes, devices)
    sizes = [shape[axes[-1]]] if is_free else [int(part) for part in divisors(size)]
    sizes = [part for part in sizes if 1 < part < size]
    if config.heads_size is not None and (config.method != "usp" or is_free):
        why = (
            f"which only method: usp reads, and it is {config.method}"
            if config.method != "usp"
            else "but the last axis that trainer.mesh maps position to has this size"
        )
        raise ConfigError(f"{key}.heads_size: {config.heads_size} given, {why}. Remove it")
    if config.method == AUTO:
        method, heads_size, reason = choose_method(rows, near, heads, kv_heads, sizes)
    else:
        method, reason = config.method, f"{key}.method"
        heads_size = {"ulysses": size, "usp": 0}.get(method, 1) or _group_size(config, heads, kv_heads, near, sizes)
    if method != "gather" and not heads:
        raise ConfigError(f"{key}.method: {method} given, but {rows.fixed_order}. Set it to auto or gather")
    num_shards = size // heads_size
    if config.balance == AUTO:
        fused_zigzag = near.fused == "zigzag" and method in ("ring", "usp")
        balance, balance_reason = choose_balance(rows, num_shards, fused_zigzag=fused_zigzag)
    else:
        balance, balance_reason = config.balance, f"{key}.balance"
        problem = "with method: ulysses each device computes whole rows" if num_shards == 1 else None
        if balance != "none" and (problem := problem or balance_problem(balance, rows, num_shards)) is not None:
            raise ConfigError(f"{key}.balance: {balance} given, but {problem}. Set it to auto or none")
    choice = ContextChoice(
        size=size,
        method=method,
        heads_size=heads_size,
        reason=reason,
        balance=balance,
        balance_reason=balance_reason,
        tokens=max(rows.seq_lens) // size,
        moved=_moved(rows, size, heads_size, method, heads, kv_heads),
        hidden_from=hidden_from(rows, near, heads, kv_heads) if method in ("ring", "usp") else None,
    )
    if method == "usp" and not is_free:
        shape = {CONTEXT: num_shards, CONTEXT_HEADS: heads_size}
    names = tuple(shape)
    sharding = {
        "gather": ContextSharding(gather=names),
        "ring": ContextSharding(ring=names),
        "ulysses": ContextSharding(heads=names),
        "usp": ContextSharding(ring=names[:-1], heads=names[-1:]),
    }[method]
    return choice, replace(sharding, balance=balance, work=rows.work), shape


def _group_size(config: ContextConfig, heads: int, kv_heads: int, devices: Devices, sizes: Sequence[int]) -> int:
    """The number of devices that exchange heads in `usp`."""
    key = "trainer.context"
    if not sizes:
        raise ConfigError(
            f"{key}.method: usp given, which needs groups of devices. Set {key}.size to a number that is not prime, map"
            " position to two mesh axes (trainer.mesh.compute_mapping: {position: [context, context_heads]}), or set"
            " method: ring"
        )
    if config.heads_size is not None:
        if config.heads_size not in sizes:
            raise ConfigError(
                f"{key}.heads_size: {config.heads_size} given, one of {', '.join(map(str, sizes))} expected: it divides the"
                f" {devices.size} devices of {key}.size into several groups"
            )
        return config.heads_size
    near = [size for size in sizes if devices.near % size == 0]
    for fitting in (
        [size for size in near if kv_heads % size == 0],
        [size for size in near if heads % size == 0],
        [size for size in sizes if heads % size == 0],
    ):
        if fitting:
            return max(fitting)
    return min(sizes)  # `check_context` says that the heads do not divide


def _moved(rows: Rows, size: int, heads_size: int, method: Method, heads: int, kv_heads: int) -> float:
    """Bytes that a device receives in the forward pass of a layer, of each row."""
    if not kv_heads:
        return 0.0
    kv = _BYTES * rows.kv_features * kv_heads / rows.kv_heads  # of a token
    seq_len, num_shards = max(rows.seq_lens), size // heads_size
    if method == "gather":
        return kv * seq_len * (size - 1) / size
    exchanged = kv * (heads + kv_heads) / kv_heads * seq_len / size * (heads_size - 1) / heads_size
    return exchanged + kv * seq_len / size * (num_shards - 1)


def check_context(model: LanguageModel, layout: Layout, what: str) -> None:
    """Raises `ConfigError` if a model cannot compute attention as the layout divides it.

    Args:
        model: of shapes.
        what: names it, for messages.
    """
    context, sizes = layout.context, attention_sizes(model)
    if not context.axes:
        return
    if not sizes and (context.balance != "none" or not context.gather):
        raise ConfigError(
            f"{what}: a model of type {type(model).__name__} computes attention by the index of each token in its row. Set"
            " trainer.context: {method: gather, balance: none}"
        )
    num_devices = math.prod(layout.mesh.shape[name] for name in context.heads)
    for layer in sizes:
        heads = layer.heads // layout.num_shards(HEADS)
        if heads % num_devices:
            other = (
                "set method: gather, ring or usp" if not context.ring else "set a heads_size that divides them, or ring"
            )
            raise ConfigError(
                f"{what}: trainer.context.method: {num_devices} devices exchange tokens for heads, but the model has"
                f" {heads} query heads on a device, which do not divide over them. Change the size, or {other}"
            )


def position_axes(layout: Layout) -> tuple[str, ...]:
    """The mesh axes, with more than one device, that share the tokens of a row."""
    return tuple(name for name in axis_names(layout.compute.get(POSITION)) if layout.mesh.shape[name] > 1)
