"""Topologies to forecast for: specifications of chips, and how many there are.

Source: the vendors' data sheets. Link bandwidths are one-way, all links of a chip together: half of what Google states for
both directions (v5p and TPU7x 1,200 GB/s, v6e 800, v5e 400, v4 600). Those to the host's memory are
what NVIDIA's nvbandwidth measures for one direction (`host_to_device_memcpy_ce`): 57 of 64 GB/s of PCIe 5 on an H100
(NVIDIA/nvbandwidth#6; others 55.6), 25 of 32 GB/s of PCIe 4 on an A100 (#42).
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.core.devices import known_device, peak_flops
from jaxlm.core.errors import ConfigError

_GB = 1e9


@dataclass(frozen=True)
class Cuda:
    """Specification of an NVIDIA GPU for the compiler.

    Attributes:
        name: as reported by the driver.
        capability: compute capability.
        processors: number of streaming multiprocessors.
        lanes: float32 units per multiprocessor.
        clock_ghz: maximum clock rate.
        shared_memory: KiB per multiprocessor.
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
    """Specification of what JAX makes a device of: a chip, or one of the chiplets of a chip.

    Attributes:
        name: name in `peak_flops`.
        platform: `tpu` or `gpu`.
        memory: bytes.
        memory_bandwidth: bytes/s.
        link_bandwidth: bytes/s to neighboring chips.
        domain: number of chips connected at `link_bandwidth`; None means all.
        outer_bandwidth: bytes/s to chips outside the domain.
        cores: cores per chip that a topology's name counts (`v5p-512` is 256 chips).
        chiplets: devices that JAX makes of a chip. `memory`, the bandwidths and `max_chips` are of and count chiplets then.
        torus: number of dimensions of the torus, whose nodes are whole chips; 0 if the network is not a torus.
        max_chips: maximum number of chips in one network. Multislice TPUs are not supported.
        compiler: name of the chip for the ahead-of-time TPU compiler.
        cuda: specification for the ahead-of-time GPU compiler.
        host_bandwidth: bytes/s between the chip and its host's memory in one direction; None if unknown.
    """

    name: str
    platform: str
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    domain: int | None = None
    outer_bandwidth: float = 0.0
    cores: int = 1
    chiplets: int = 1
    torus: int = 0
    max_chips: int = 8192
    compiler: str = ""
    cuda: Cuda | None = None
    host_bandwidth: float | None = None

    @property
    def peak(self) -> float:
        """Dense bf16 FLOP/s."""
        flops = peak_flops(f"TPU {self.name}" if self.platform == "tpu" else f"NVIDIA {self.name.upper()}")
        assert flops is not None, self.name
        return flops

    def peak_of(self, dtype: Any) -> float:
        """Dense FLOP/s of matrix products at jax's default precision: float32 is TF32 on GPUs and bf16 on TPUs."""
        halved = self.platform == "gpu" and np.dtype(dtype).itemsize == 4
        return self.peak / 2 if halved else self.peak


def _gpu(name: str, cuda: Cuda, *, memory: int, bandwidth: int, link: int, outer: int, host: int) -> Chip:
    """Eight GPUs with NVLink in a machine. Numbers in GB and GB/s."""
    sizes = (memory * _GB, bandwidth * _GB, link * _GB)
    return Chip(name, "gpu", *sizes, domain=8, outer_bandwidth=outer * _GB, cuda=cuda, host_bandwidth=host * _GB)


_GIB = float(1 << 30)
_A100 = Cuda("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 164, 40)
_H100 = Cuda("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 228, 50)
_H200 = Cuda("NVIDIA H200", (9, 0), 132, 128, 1.98, 228, 50)
_B200 = Cuda("NVIDIA B200", (10, 0), 148, 128, 1.965, 228, 126)
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 32 * _GIB, 1228 * _GB, 300 * _GB, cores=2, torus=3, max_chips=4096, compiler="v4"),
        Chip("v5e", "tpu", 16 * _GIB, 819 * _GB, 200 * _GB, torus=2, max_chips=256, compiler="v5e"),
        Chip("v5p", "tpu", 95 * _GIB, 2765 * _GB, 600 * _GB, cores=2, torus=3, compiler="v5"),
        Chip("v6e", "tpu", 32 * _GIB, 1638 * _GB, 400 * _GB, torus=2, max_chips=256, compiler="v6e"),
        Chip("tpu7x", "tpu", 96 * _GIB, 3690 * _GB, 300 * _GB, chiplets=2, torus=3, max_chips=18432, compiler="tpu7x"),
        _gpu("a100", _A100, memory=80, bandwidth=2039, link=300, outer=25, host=25),
        _gpu("h100", _H100, memory=80, bandwidth=3350, link=450, outer=50, host=55),
        _gpu("h200", _H200, memory=141, bandwidth=4800, link=450, outer=50, host=55),
        _gpu("b200", _B200, memory=180, bandwidth=8000, link=900, outer=50, host=55),
    )
}
_BY_KIND = {
    **{name if chip.platform == "gpu" else f"tpu {name}": chip for name, chip in CHIPS.items()},
    **{"tpu v5": CHIPS["v5p"], "tpu v5 lite": CHIPS["v5e"], "tpu v6 lite": CHIPS["v6e"], "tpu7x": CHIPS["tpu7x"]},
    **{"tpu v4 lite": None, "h100 pcie": None, "a100 pcie": None},
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip that a jax `device_kind` names; None if its links are unknown (CPUs)."""
    return known_device(device_kind, _BY_KIND)


@dataclass(frozen=True)
class Topology:
    """A number of chips of one kind.

    Attributes:
        name: as the user gave it, for example `v5p-512`.
        num_chips: number of devices, of which a chip with chiplets has several.
    """

    name: str
    chip: Chip
    num_chips: int

    @property
    def size(self) -> str:
        """Writes the number of chips, and of devices if it is another."""
        chiplets = self.chip.chiplets
        return (
            f"{self.num_chips} chips" if chiplets == 1 else f"{self.num_chips // chiplets} chips of {chiplets} devices"
        )

    @property
    def compiler_name(self) -> str:
        """The torus in the notation of the ahead-of-time compiler, for example `v5:4x8x8`."""
        sides = torus(self.num_chips // self.chip.chiplets, self.chip.torus)
        return f"{self.chip.compiler}:{'x'.join(map(str, sides))}"

    @property
    def hosts(self) -> tuple[int, int]:
        """(hosts, chips per host): one host per domain if the chips fill whole domains, else a single host."""
        domain = self.chip.domain or self.num_chips
        return (self.num_chips // domain, domain) if self.num_chips % domain == 0 else (1, self.num_chips)

    def bandwidth(self, num_chips: int) -> float:
        """Bytes/s per chip in a group of `num_chips`."""
        inside = self.chip.domain is None or num_chips <= self.chip.domain
        return self.chip.link_bandwidth if inside else self.chip.outer_bandwidth


def parse_topology(text: str) -> Topology:
    """Parses `v5p-512`, `tpu7x-128` (numbers of cores, as the vendor counts), `v5e-256` or `h100-64` (numbers of chips)."""
    match = re.fullmatch(r"([a-z0-9]+)-(\d+)", text)
    if match is None or match[1] not in CHIPS:
        raise ConfigError(
            f"--topology {text}: a chip and a number expected, as in v5p-512. Allowed chips: {', '.join(CHIPS)}"
        )
    chip, number = CHIPS[match[1]], int(match[2])
    per_chip = chip.cores * chip.chiplets
    if number % per_chip or not 0 < number // chip.cores <= chip.max_chips:
        unit = f"a multiple of {per_chip} (cores)" if per_chip > 1 else "a number of chips"
        raise ConfigError(f"--topology {text}: {unit} up to {chip.max_chips * chip.cores} expected")
    return Topology(text, chip, number // chip.cores)


def torus(num_chips: int, dimensions: int) -> tuple[int, ...]:
    """The side lengths of the most even torus. Sides above 4 are multiples of 4. Raises `ConfigError` if there is none."""

    def shapes(chips: int, num_sides: int, minimum: int) -> list[tuple[int, ...]]:
        """All torus shapes with increasing sides of at least `minimum`."""
        allowed = lambda side: side in (1, 2, 4) or side % 4 == 0  # noqa: E731
        if num_sides == 1:
            return [(chips,)] if chips >= minimum and allowed(chips) else []
        sides = [side for side in range(minimum, chips + 1) if chips % side == 0 and allowed(side)]
        return [(side, *more) for side in sides for more in shapes(chips // side, num_sides - 1, side)]

    candidates = shapes(num_chips, dimensions, 1)
    if not candidates:
        raise ConfigError(f"{num_chips} chips do not form a torus of {dimensions} dimensions. Use a power of two")
    return min(candidates, key=lambda shape: shape[-1] - shape[0])


@dataclass(frozen=True)
class Speed:
    """Throughput of a device.

    Attributes:
        products: FLOP/s of large matrix products.
        attention: FLOP/s of fused attention to at most 4,096 tokens.
        memory: bytes/s.
        long_attention: FLOP/s of fused attention to at least 16,384 tokens; None for that of short rows.
        grouped: FLOP/s of products of rows with the matrices of their groups.
    """

    products: float
    attention: float
    memory: float
    long_attention: float | None = None
    grouped: float = math.inf

    def attention_to(self, num_keys: int) -> float:
        """FLOP/s of fused attention to that many tokens."""
        if self.long_attention is None:
            return self.attention
        short, long = _SHORT_AND_LONG
        share = math.log(min(max(num_keys, short), long) / short) / math.log(long / short)
        return self.attention + share * (self.long_attention - self.attention)


# Fractions of the peak that the kernels of a training step reach: matrix products 600 to 690 of 989 TFLOP/s, cuDNN's
# attention 350 to 500, and elementwise kernels 4.0 of 4.8 TB/s (public measurements on Hopper). Attention to long rows:
# docs/benchmarks.md, "Long rows on a card". Grouped products: 550 of 989 TFLOP/s, assumed.
_PRODUCTS_SHARE, _ATTENTION_SHARE, _MEMORY_SHARE = 0.66, 0.43, 0.83
_LONG_ATTENTION_SHARE, _GROUPED_SHARE = 0.555, 0.556


def speed_of(topology: Topology, dtype: Any) -> Speed:
    """Returns what kernels reach on a chip. Args: dtype: of the matrix products."""
    chip = topology.chip
    peak, memory = chip.peak_of(dtype), chip.memory_bandwidth * _MEMORY_SHARE
    shares = (_LONG_ATTENTION_SHARE, _GROUPED_SHARE)
    return Speed(peak * _PRODUCTS_SHARE, peak * _ATTENTION_SHARE, memory, *(peak * share for share in shares))


_SHORT_AND_LONG = (4096, 16384)  # keys; between them, attention gets faster with the logarithm of their number
