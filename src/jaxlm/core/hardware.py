"""Capabilities of devices and processors: peak FLOP/s, from which MFU (model FLOPs utilization) is computed, and memory."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

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
    words = f" {device_kind.lower().replace('-', ' ').replace('nvidia', ' ')} "
    known = [name for name in _PEAK_BF16 if f" {name} " in words]
    return _PEAK_BF16[max(known, key=len)] if known else None


def cuda_capability(device: Any) -> tuple[int, int] | None:
    """CUDA compute capability of an NVIDIA device, such as (9, 0) for Hopper; None for other devices."""
    match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(match[1]), int(match[2])) if match else None


def memory_limit() -> int | None:
    """Bytes of device memory available to this process; on CPU, the device's share of host memory. None if unknown."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def processor() -> str:
    """This machine's processor and the number of its cores that this process may use, as `AMD EPYC 25/17/1, 2 cores`.

    The numbers are family, model and stepping: virtual machines often shorten the name.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:  # not Linux
        return f"{platform.processor() or platform.machine()}, {cores} cores"
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    numbers = [facts[name] for name in ("cpu family", "model", "stepping") if name in facts]
    return f"{' '.join([facts.get('model name', platform.machine()), '/'.join(numbers)]).strip()}, {cores} cores"
