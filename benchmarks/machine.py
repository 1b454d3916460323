"""The processor that a benchmark runs on, and how much of it others use meanwhile, by what Linux says."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Instructions that decide how fast matrix products are, by their names in /proc/cpuinfo.
_VECTORS = (
    *("avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "sve2", "bf16"),
)
_NUMBERS = {"CPU family": "family", "Model": "model", "Stepping": "stepping"}
_CACHES = ("L1d", "L2", "L3")


@dataclass(frozen=True)
class Processor:
    """What `lscpu` says about the processor.

    Attributes:
        numbers: family, model and stepping. Virtual machines often shorten the name.
        caches: as `L2 2 MiB (2 instances)`; sums over the instances.
        vectors: see `_VECTORS`.
    """

    name: str
    numbers: str
    cores: str
    threads_per_core: str
    caches: tuple[str, ...]
    vectors: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> "Processor":
        """Reads the output of `lscpu` in English."""
        lines = (line.partition(":") for line in text.splitlines())
        facts = {name.strip(): value.strip() for name, _, value in lines}
        flags = facts.get("Flags", "").split()
        sizes = {
            name.removesuffix(" cache"): value for name, value in facts.items()
        }  # `L2 cache`, or `L2` below `Caches`
        return Processor(
            facts.get("Model name", facts.get("Architecture", "unknown")),
            ", ".join(f"{short} {facts[name]}" for name, short in _NUMBERS.items() if name in facts),
            facts.get("CPU(s)", "?"),
            facts.get("Thread(s) per core", "?"),
            tuple(f"{level} {sizes[level]}" for level in _CACHES if level in sizes),
            tuple(flag for flag in _VECTORS if flag in flags),
        )

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.numbers}), {self.cores} CPUs with {self.threads_per_core} thread(s) per core;"
            f" caches: {', '.join(self.caches) or 'unknown'}; {' '.join(self.vectors) or 'no known vector instructions'}"
        )


def this_processor() -> Processor:
    """The processor of this machine; of unknown caches without `lscpu`."""
    try:
        done = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=True)
    except (OSError, subprocess.CalledProcessError):
        return Processor.parse(f"Model name: unknown (no lscpu)\nCPU(s): {os.cpu_count()}")
    return Processor.parse(done.stdout)


@dataclass(frozen=True)
class CpuTicks:
    """CPU time of all cores since the start of the machine, in clock ticks.

    Attributes:
        total: including idle time.
        busy: of all processes on this machine.
        steal: in which the hypervisor ran something else, though a process was ready.
    """

    total: int
    busy: int
    steal: int

    @staticmethod
    def parse(text: str) -> "CpuTicks":
        """Reads /proc/stat. Guests' time is part of the user's time."""
        user, nice, system, idle, waiting, interrupts, soft, steal = map(int, text.split()[1:9])
        busy = user + nice + system + interrupts + soft
        return CpuTicks(busy + idle + waiting + steal, busy, steal)

    @staticmethod
    def now() -> "CpuTicks":
        return CpuTicks.parse(Path("/proc/stat").read_text(encoding="ascii"))


@dataclass(frozen=True)
class Use:
    """How the CPU time of a measurement was used, as shares of all cores.

    Attributes:
        steal: taken by the hypervisor.
        others: used by processes other than the measured one.
    """

    steal: float
    others: float

    @staticmethod
    def between(before: CpuTicks, after: CpuTicks, own_ticks: int) -> "Use":
        """Args: own_ticks: what the measured process used between them."""
        total = max(1, after.total - before.total)
        others = max(0, after.busy - before.busy - own_ticks)
        return Use((after.steal - before.steal) / total, others / total)


def ticks_of(pid: int) -> int:
    """The CPU time that a process has used in all of its threads, in clock ticks."""
    return sum(map(int, _after_name(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace"))[11:13]))


def resident_bytes(pid: int) -> int:
    """The memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _after_name(stat: str) -> list[str]:
    """The fields of /proc/PID/stat from the third on. A name may contain spaces and brackets."""
    return stat.rpartition(")")[2].split()
