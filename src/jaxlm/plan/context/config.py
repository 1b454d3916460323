"""Context parallelism: several devices share the tokens of a row. The section `trainer.context`, checked and carried out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from jaxlm.core.axes import CONTEXT, CONTEXT_HEADS, HEADS
from jaxlm.core.errors import ConfigError, divisors
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.rules import Rules, only
from jaxlm.core.sharding import ContextSharding, Layout
from jaxlm.data.row_order import Balance
from jaxlm.models.base import LanguageModel
from jaxlm.plan.context.choice import (
    ContextChoice,
    Devices,
    Method,
    Rows,
    attention_sizes,
    balance_problem,
    choose_balance,
    choose_method,
    hidden_from,
    moved_bytes,
)

AUTO = "auto"
_KEY = "trainer.context"


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
    key_rules: ClassVar[Rules] = (only("heads_size", when="method", is_="usp"),)


def plan_context(
    config: ContextConfig, layout: Layout, axes: Sequence[str], rows: Rows, devices: Sequence[Any], *, is_free: bool
) -> tuple[ContextChoice, ContextSharding, dict[str, int]]:
    """Decides how the devices along some mesh axes divide attention. Returns the choice, and what the layout says of it.

    Args:
        layout: with the mesh, and the mapping of heads.
        axes: mesh axes that share a row.
        is_free: whether the axes are those of `trainer.mesh`, whose sizes cannot be changed.

    Returns:
        Also the sizes of the axes that the default mesh has for this; empty if `is_free`.

    Raises:
        ConfigError: the keys are illegal for these rows and devices.
    """
    rows, shared = rows.on_device(layout), Devices.of(layout, axes, devices)
    size = shared.size
    for seq_len in rows.seq_lens:
        if seq_len % size:
            raise ConfigError(
                f"{_KEY}: {size} devices share a row of model.seq_len: {seq_len} tokens, which do not divide over them. Set"
                f" model.seq_len to a multiple of {size}, or let another number of devices share a row"
            )
    method, heads_size, reason = _method(config, rows, shared, layout.mesh.shape[axes[-1]] if is_free else None)
    if rows.state_heads % size:
        why = f"the {rows.state_heads} key heads of recurrent layers do not divide over {size} devices"
        rows = replace(rows, consecutive=f"{why}, so that each needs consecutive tokens")
    balance, balance_reason = _balance(config, rows, size // heads_size, method, shared)
    is_ring = method in ("ring", "usp")
    choice = ContextChoice(
        size=size,
        method=method,
        heads_size=heads_size,
        reason=reason,
        balance=balance,
        balance_reason=balance_reason,
        tokens=max(rows.seq_lens) // size,
        moved=moved_bytes(rows, size, heads_size, method),
        hidden_from=hidden_from(rows, shared) if is_ring else None,
    )
    sizes = {CONTEXT: size}
    if method == "usp":
        sizes = {CONTEXT: size // heads_size, CONTEXT_HEADS: heads_size}
    names = tuple(axes if is_free else sizes)
    sharding = {
        "gather": ContextSharding(gather=names),
        "ring": ContextSharding(ring=names),
        "ulysses": ContextSharding(heads=names),
        "usp": ContextSharding(ring=names[:-1], heads=names[-1:]),
    }[method]
    return choice, replace(sharding, balance=balance, work=rows.work), {} if is_free else sizes


def _method(config: ContextConfig, rows: Rows, devices: Devices, last_axis: int | None) -> tuple[Method, int, str]:
    """The method, the number of devices that exchange heads, and why. Args: last_axis: size of the last mesh axis that shares
    a row, if it cannot be changed."""
    if config.heads_size is not None and last_axis is not None:
        raise ConfigError(
            f"{_KEY}.heads_size: {config.heads_size} given, but the last axis that trainer.mesh maps position to has this"
            " size. Remove it"
        )
    sizes = [int(size) for size in divisors(devices.size)] if last_axis is None else [last_axis]
    sizes = [size for size in sizes if 1 < size < devices.size]
    if config.method == AUTO:
        return choose_method(rows, devices, sizes)
    if config.method != "gather" and not rows.heads:
        raise ConfigError(f"{_KEY}.method: {config.method} given, but {rows.fixed_order}. Set it to auto or gather")
    heads_size = {"gather": 1, "ring": 1, "ulysses": devices.size}.get(config.method)
    return config.method, heads_size or _group_size(config, rows, devices, sizes), f"{_KEY}.method"


def _group_size(config: ContextConfig, rows: Rows, devices: Devices, sizes: Sequence[int]) -> int:
    """The number of devices that exchange heads in `usp`."""
    if not sizes:
        raise ConfigError(
            f"{_KEY}.method: usp given, which needs groups of devices. Set {_KEY}.size to a number that is not prime, map"
            " position to two mesh axes (trainer.mesh.compute_mapping: {position: [context, context_heads]}), or set"
            " method: ring"
        )
    if config.heads_size is not None:
        if config.heads_size not in sizes:
            raise ConfigError(
                f"{_KEY}.heads_size: {config.heads_size} given, one of {', '.join(map(str, sizes))} expected: it divides the"
                f" {devices.size} devices of {_KEY}.size into several groups"
            )
        return config.heads_size
    near = [size for size in sizes if devices.near % size == 0]
    for fitting in (
        [size for size in near if rows.kv_heads % size == 0],
        [size for size in near if rows.heads % size == 0],
        [size for size in sizes if rows.heads % size == 0],
    ):
        if fitting:
            return max(fitting)
    return min(sizes)  # `check_context` says that the heads do not divide


def _balance(
    config: ContextConfig, rows: Rows, num_shards: int, method: Method, devices: Devices
) -> tuple[Balance, str]:
    """The order of tokens, and why."""
    if config.balance == AUTO:
        fused_zigzag = devices.fused == "zigzag" and method in ("ring", "usp")
        return choose_balance(rows, num_shards, fused_zigzag=fused_zigzag)
    if (problem := balance_problem(config.balance, rows, num_shards)) is not None:
        raise ConfigError(f"{_KEY}.balance: {config.balance} given, but {problem}. Set it to auto or none")
    return config.balance, f"{_KEY}.balance"


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
