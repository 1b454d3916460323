"""Machines that one does not have: what their chips can do, and how many there are.

Source: the vendors' data sheets; links are counted one way, all of a chip's together.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.hardware import peak_flops

_GB = 1e9


@dataclass(frozen=True)
class Cuda:
    """What the compiler wants to know of an NVIDIA card.

    Attributes:
        name: as the driver says it.
        capability: compute capability.
        processors: streaming multiprocessors.
        lanes: float32 units of one.
        clock_ghz: at most.
        shared_memory: KiB of one processor.
        l2_cache: MiB.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    lanes: int
    clock_ghz: float
    shared_memory: int
    l2_cache: int


@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        name: as `peak_flops` knows it.
        platform: `tpu` or `gpu`.
        memory: bytes.
        memory_bandwidth: bytes/s.
        link_bandwidth: bytes/s to its neighbours.
        domain: chips that reach each other at that rate; None means all.
        outer_bandwidth: bytes/s to chips of other domains.
        cores: that a topology's name counts for each chip (`v5p-512` is 256 chips).
        torus: dimensions of the network, for chips that have one.
        most: chips that one network joins; slices of TPUs that meet over a data center's network are not known here.
        compiler: what the ahead-of-time compiler of TPUs calls it.
        cuda: what that of NVIDIA cards wants to know.
    """

    name: str
    platform: str
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    domain: int | None = None
    outer_bandwidth: float = 0.0
    cores: int = 1
    torus: int = 0
    most: int = 8192
    compiler: str = ""
    cuda: Cuda | None = None

    @property
    def peak(self) -> float:
        """Dense bf16 FLOP/s."""
        flops = peak_flops(f"TPU {self.name}" if self.platform == "tpu" else f"NVIDIA {self.name.upper()}")
        assert flops is not None, self.name
        return flops

    def peak_of(self, dtype: Any) -> float:
        """Dense FLOP/s of matrix products as jax does them by default: float32 as TF32 on GPUs, in bf16 passes on TPUs."""
        halved = self.platform == "gpu" and np.dtype(dtype).itemsize == 4
        return self.peak / 2 if halved else self.peak


_GIB = float(1 << 30)
_A100 = Cuda("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 164, 40)
_H100 = Cuda("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 228, 50)
_H200 = Cuda("NVIDIA H200", (9, 0), 132, 128, 1.98, 228, 50)
_B200 = Cuda("NVIDIA B200", (10, 0), 148, 128, 1.965, 228, 126)
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 32 * _GIB, 1228 * _GB, 150 * _GB, cores=2, torus=3, most=4096, compiler="v4"),
        Chip("v5e", "tpu", 16 * _GIB, 819 * _GB, 100 * _GB, torus=2, most=256, compiler="v5e"),
        Chip("v5p", "tpu", 95 * _GIB, 2765 * _GB, 300 * _GB, cores=2, torus=3, compiler="v5"),
        Chip("v6e", "tpu", 32 * _GIB, 1640 * _GB, 224 * _GB, torus=2, most=256, compiler="v6e"),
        Chip("a100", "gpu", 80 * _GB, 2039 * _GB, 300 * _GB, domain=8, outer_bandwidth=25 * _GB, cuda=_A100),
        Chip("h100", "gpu", 80 * _GB, 3350 * _GB, 450 * _GB, domain=8, outer_bandwidth=50 * _GB, cuda=_H100),
        Chip("h200", "gpu", 141 * _GB, 4800 * _GB, 450 * _GB, domain=8, outer_bandwidth=50 * _GB, cuda=_H200),
        Chip("b200", "gpu", 180 * _GB, 8000 * _GB, 900 * _GB, domain=8, outer_bandwidth=50 * _GB, cuda=_B200),
    )
}


@dataclass(frozen=True)
class Topology:
    """So many chips of one kind.

    Attributes:
        name: as it was given.
    """

    name: str
    chip: Chip
    num_chips: int

    @property
    def compiler_name(self) -> str:
        """The torus as the ahead-of-time compiler wants it: `v5:4x8x8`."""
        return f"{self.chip.compiler}:{'x'.join(map(str, torus(self.num_chips, self.chip.torus)))}"

    @property
    def hosts(self) -> tuple[int, int]:
        """(machines, chips of each): as many as a domain has where they fill machines, else one machine."""
        domain = self.chip.domain or self.num_chips
        return (self.num_chips // domain, domain) if self.num_chips % domain == 0 else (1, self.num_chips)

    def bandwidth(self, num_chips: int) -> float:
        """Bytes/s that a chip exchanges in a group of so many."""
        inside = self.chip.domain is None or num_chips <= self.chip.domain
        return self.chip.link_bandwidth if inside else self.chip.outer_bandwidth


def parse_topology(text: str) -> Topology:
    """Reads `v5p-512` (cores, as the vendor counts), `v5e-256` or `h100-64` (chips).

    Raises:
        ConfigError: no such chip, or no such number of them.
    """
    named = re.fullmatch(r"([a-z0-9]+)-(\d+)", text)
    if named is None or named[1] not in CHIPS:
        raise ConfigError(f"--topology {text}: chip and number expected, as in v5p-512. Chips: {', '.join(CHIPS)}")
    chip, number = CHIPS[named[1]], int(named[2])
    if number % chip.cores or not 0 < number // chip.cores <= chip.most:
        counted = f"a multiple of {chip.cores} (cores)" if chip.cores > 1 else "a number of chips"
        raise ConfigError(f"--topology {text}: {counted} up to {chip.most * chip.cores} expected")
    return Topology(text, chip, number // chip.cores)


def torus(num_chips: int, dimensions: int) -> tuple[int, ...]:
    """The most even sides of a torus; those above 4 are multiples of 4.

    Raises:
        ConfigError: so many chips make no torus.
    """

    def sides(rest: int, left: int, least: int) -> list[tuple[int, ...]]:
        allowed = lambda side: side in (1, 2, 4) or side % 4 == 0  # noqa: E731
        if left == 1:
            return [(rest,)] if rest >= least and allowed(rest) else []
        fitting = [side for side in range(least, rest + 1) if rest % side == 0 and allowed(side)]
        return [(side, *more) for side in fitting for more in sides(rest // side, left - 1, side)]

    found = sides(num_chips, dimensions, 1)
    if not found:
        raise ConfigError(f"{num_chips} chips make no torus of {dimensions} dimensions: use a power of two")
    return min(found, key=lambda shape: shape[-1] - shape[0])
