"""The devices that share a row: how many they are, what joins them, and which kernels they have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxlm.core.devices import memory_limit
from jaxlm.core.errors import divisors
from jaxlm.core.sharding import Layout
from jaxlm.hardware.estimate import speed_of
from jaxlm.hardware.topologies import Topology, chip_of


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
