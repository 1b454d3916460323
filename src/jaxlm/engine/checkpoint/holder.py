"""Who holds a run's folder, what a second start of the run is told, and how the holder learns that it has lost it."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxlm.core.errors import ConfigError

StillHeld = Callable[[], object]
"""Raises `LeaseLostError` if another start of the run has taken the folder."""

_NOWHERE = ""


@dataclass(frozen=True)
class Holder:
    """A process that holds a run's folder.

    Attributes:
        since: when it took the folder, in UTC.
        machine: ID of the installed system; hosts may share a name.
        boot: ID of the machine's start.
        pids: ID of the numbering of processes, which containers have of their own.
        started: when the process started, in the kernel's ticks; a number of a process is used again.
    """

    pid: int
    host: str
    since: str
    machine: str
    boot: str
    pids: str
    started: str

    @classmethod
    def this_process(cls) -> "Holder":
        pid = os.getpid()
        return cls(
            pid,
            platform.node(),
            time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            _read("/etc/machine-id"),
            _read("/proc/sys/kernel/random/boot_id"),
            _pid_namespace(),
            _started(pid),
        )

    @classmethod
    def from_json(cls, text: bytes) -> "Holder | None":
        """None if the text is something else."""
        try:
            return cls(**json.loads(text)["holder"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    def to_json(self, **more: int | str) -> bytes:
        return json.dumps({"holder": asdict(self), **more}).encode()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def has_ended(self) -> bool:
        """Whether it is certain that the process has ended: it ran on this machine, and is gone."""
        this_process = Holder.this_process()
        if _NOWHERE in (self.boot, this_process.boot) or self.host != this_process.host:
            return False
        if self.boot != this_process.boot:
            return self.machine == this_process.machine != _NOWHERE
        return self.pids == this_process.pids and self.started != _started(self.pid)


class LeaseLostError(Exception):
    """Another start of the run has taken its folder, because this process did not answer for too long."""


def all_held(checks: Iterable[StillHeld]) -> StillHeld:
    """Makes one check of several."""
    checks = list(checks)
    return lambda: [still_held() for still_held in checks]


def held_by(holder: object, what: str) -> ConfigError:
    """The error of a start that finds a run at work. Args: what: both would do, such as `save to PATH`."""
    return ConfigError(
        f"this run is already being trained ({holder}): both would {what}. Wait until it ends, stop it, or set another"
        " trainer.id"
    )


def _started(pid: int) -> str:
    """When the process started; empty if there is none, or if it only waits for its parent to notice its end."""
    _, _, fields = _read(f"/proc/{pid}/stat").rpartition(")")
    state, *others = fields.split() or ["X"]
    return _NOWHERE if state in "XZ" else others[18]


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return _NOWHERE


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return _NOWHERE
