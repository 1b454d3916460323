"""Capabilities of devices and processors: peak FLOP/s for MFU (model FLOPs utilization), memory and caches."""

import functools
import importlib.metadata
import os
import platform
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.install import install_command

T = TypeVar("T")

# The distributions that bring a platform to jax.
_BACKENDS = re.compile(r"jaxlib|libtpu|jax-(cuda|rocm)\d+-plugin")

HOST_MEMORY = "pinned_host"
"""The kind of the host's memory that devices copy to and from."""
# Dense bf16 FLOP/s per device, from the vendors' data sheets (SXM parts; no sparsity). The longest match wins.
_PEAK_BF16 = {
    "tpu v2": 22.5e12,
    "tpu v3": 61.5e12,
    "tpu v4": 275e12,
    "tpu v4 lite": 138e12,
    "tpu v5 lite": 197e12,
    "tpu v5e": 197e12,
    "tpu v5": 459e12,
    "tpu v5p": 459e12,
    "tpu v6 lite": 918e12,
    "tpu v6e": 918e12,
    "tpu7x": 2307e12 / 2,  # a device is one of a chip's two chiplets
    "v100": 125e12,
    "a100": 312e12,
    "a10": 125e12,
    "l4": 121e12,
    "l40": 181e12,
    "h100": 989.4e12,
    "h100 pcie": 756e12,
    "h200": 989.4e12,
    "gh200": 989.4e12,
    "b200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s for a jax `device_kind`; None if unknown (CPUs)."""
    return known_device(device_kind, _PEAK_BF16)


def known_device(device_kind: str, facts: Mapping[str, T]) -> T | None:
    """Returns what is known of a jax `device_kind`, or None. Args: facts: by lower-case name. The longest match wins."""
    words = f" {device_kind.lower().replace('-', ' ').replace('nvidia', ' ')} "
    known = [name for name in facts if f" {name} " in words]
    return facts[max(known, key=len)] if known else None


def cuda_capability(device: Any) -> tuple[int, int] | None:
    """CUDA compute capability of an NVIDIA device, such as (9, 0) for Hopper; None for other devices."""
    match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(match[1]), int(match[2])) if match else None


def open_devices() -> list[Any]:
    """Returns all devices of the run. Every command that computes asks jax for its devices here first.

    Raises:
        ConfigError: jax cannot open the platform that the environment or the configuration asks for.
    """
    try:
        return jax.devices()
    except Exception as error:  # each backend raises its own types; jax itself may raise a bare AssertionError
        wanted = {
            "JAX_PLATFORMS": jax.config.values["jax_platforms"],
            "JAX_PLATFORM_NAME": os.environ.get("JAX_PLATFORM_NAME"),
        }
        asked = [f"{name}={value}" for name, value in wanted.items() if value]
        found = {d.name: d.version for d in importlib.metadata.distributions() if _BACKENDS.fullmatch(d.name)}
        raise ConfigError(
            f"jax {jax.__version__} cannot open its devices: {str(error) or 'it found no such platform'}."
            f" Asked for: {', '.join(asked) or 'any platform'}. Installed:"
            f" {', '.join(f'{name} {version}' for name, version in sorted(found.items()))}. For NVIDIA GPUs, run"
            f" `{install_command('gpu')}`; for TPUs, `{install_command('tpu')}`; or unset"
            f" {' and '.join(name for name in wanted if wanted[name]) or 'what restricts jax'} to use what is installed"
        ) from error


def memory_limit() -> int | None:
    """Bytes of device memory available to this process; on CPU, the device's share of host memory. None if unknown."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return host_memory() // jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes_in_use() -> int | None:
    """Most bytes of memory that this process has had on a device so far; None if the device does not count (CPUs)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def processor_facts() -> dict[str, str]:
    """Returns what Linux says about the first core, such as `flags`; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def processor() -> str:
    """This machine's processor and the number of its cores that this process may use, as `AMD EPYC 25/17/1, 2 cores`.

    The numbers are family, model and stepping: virtual machines often shorten the name.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = processor_facts()
    if not facts:
        return f"{platform.processor() or platform.machine()}, {cores} cores"
    numbers = [facts[name] for name in ("cpu family", "model", "stepping") if name in facts]
    return f"{' '.join([facts.get('model name', platform.machine()), '/'.join(numbers)]).strip()}, {cores} cores"


@dataclass(frozen=True)
class Caches:
    """Bytes of a processor's caches; None where unknown.

    Attributes:
        level2: what a thread of this process has of the level-2 cache.
        last_level: the cache of level 3 or higher that all cores of a group share.
    """

    level2: int | None = None
    last_level: int | None = None

    def __str__(self) -> str:
        named = (("level 2", self.level2), ("last level", self.last_level))
        return ", ".join(f"{name} {'unknown' if size is None else f'{size / 2**20:g} MiB'}" for name, size in named)


def caches() -> Caches:
    """The caches of the first core that this process may use. Unknown to several processes: they must trace the same
    program, and may run on different processors.
    """
    return _own_caches() if jax.process_count() == 1 else Caches()


@functools.cache
def _own_caches() -> Caches:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    return read_caches(Path("/sys/devices/system/cpu"), cores)


def read_caches(root: Path, cores: Collection[int]) -> Caches:
    """The caches that Linux lists below `root`, for the first of the cores that a process may use."""
    by_level: dict[int, tuple[int, int]] = {}  # level -> bytes, how many of the cores share it
    for folder in root.glob(f"cpu{min(cores)}/cache/index*"):
        try:
            level, kind, size, shared = (
                (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
            if kind != "Instruction":
                by_level[int(level)] = _parse_size(size), len(_parse_cores(shared).intersection(cores))
        except (OSError, ValueError):  # a container may hide files
            continue
    size, sharing = by_level.get(2, (0, 1))
    last = max(by_level, default=0)
    return Caches(size // max(1, sharing) or _level2_of_sysconf(), (by_level[last][0] or None) if last > 2 else None)


def _level2_of_sysconf() -> int | None:
    # Not its level 3: on an AMD EPYC it is that of the whole package, 384 MiB where a group of cores shares 32.
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (AttributeError, OSError, ValueError):  # not Linux, or another C library
        return None
    return size if size > 0 else None


def _parse_size(text: str) -> int:
    """Bytes of a size such as `1024K`."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text.rstrip("KMG")) * units.get(text[-1:], 1)


def _parse_cores(text: str) -> set[int]:
    """The numbers in a list such as `0-3,8`."""
    ranges = (part.partition("-") for part in text.split(","))
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def rows_in_half(cache: int, bytes_per_row: int) -> int:
    """The largest power of two of rows that take at most half of a cache; at least 1."""
    return 1 << max(1, cache // 2 // bytes_per_row).bit_length() - 1
