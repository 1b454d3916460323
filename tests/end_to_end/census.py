"""A callback that counts what a run holds: memory, descriptors, threads, processes, arrays and compiled programs.

It writes a line of JSON to `census.jsonl` every `every` steps, from the first of them on.
"""

import ctypes
import gc
import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.values.logged import StepInfo
from jaxlm.observe.callbacks import Callback, CallbackConfig, CallbackContext

COMPILED = "/jax/core/compile/backend_compile_duration"
FILE = Path("census.jsonl")


class _Heap(ctypes.Structure):
    """glibc's `mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "1", "2", "3", "4", "5", "6", "used", "7", "8")]


@dataclass(frozen=True)
class CensusConfig(CallbackConfig):
    every: int = 250

    def check(self) -> None:
        pass

    def open(self, context: CallbackContext) -> Callback:
        return Census(self.every)


class Census(Callback):
    def __init__(self, every: int):
        self._every = every
        self._programs: Counter[str] = Counter()
        self._began = time.monotonic()
        self._heap = ctypes.CDLL(None).mallinfo2
        self._heap.restype = _Heap
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def on_batch_end(self, info: StepInfo) -> None:
        if info.step % self._every == 0:
            line = {"step": info.step, "seconds": time.monotonic() - self._began, **self._counted()}
            with FILE.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _count(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        self._programs[event] += 1

    def _counted(self) -> dict[str, Any]:
        children = _descendants(os.getpid())
        descriptors = Counter(_target(path) for path in Path("/proc/self/fd").iterdir())
        gc.collect()
        objects = gc.get_objects()
        heap, arrays = self._heap(), jax.live_arrays()
        return {
            "resident": _bytes(os.getpid(), "Rss:"),
            "anonymous": _anonymous(os.getpid()),
            "heap": heap.used,
            "anonymous_of_children": sum(map(_anonymous, children)),
            "children": len(children),
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": sum(descriptors.values()),
            "descriptors_by_target": descriptors,
            "arrays": len(arrays),
            "array_bytes": sum(array.nbytes for array in arrays),
            "programs": self._programs[COMPILED],
            "objects": len(objects) + gc.get_freeze_count(),
            "objects_by_type": dict(
                Counter(f"{type(o).__module__}.{type(o).__name__}" for o in objects).most_common(60)
            ),
            "uncollectable": len(gc.garbage),
        }


def _target(path: Path) -> str:
    try:
        return os.readlink(path).partition(":")[0]
    except OSError:  # closed since
        return "closed"


def _anonymous(pid: int) -> int:
    return _bytes(pid, "Anonymous:")


def _bytes(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def _descendants(pid: int) -> list[int]:
    children = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in _read(path).split()]
    return children + [further for child in children for further in _descendants(child)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""
