"""How a phase ends, and how all processes decide it at the same step.

A signal reaches one process, and only process 0 reads the clock, yet all processes must save and stop at the same step.
Each process passes its flags into the compiled step, which reduces them over all devices. The result comes back with the
metrics that are fetched anyway, so no process waits for another. A single process acts on its own flags at once.
"""

import signal
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.controllers.base import Next as Next
from jaxlm.controllers.base import Rewind as Rewind
from jaxlm.core.runtime import largest_of_processes
from jaxlm.core.sharding import Layout
from jaxlm.engine.preemption import PREEMPTED, StopRequest


@dataclass(frozen=True)
class Done:
    """The phase ran to its end."""


@dataclass(frozen=True)
class Interrupted:
    """A signal, or a notice that a machine will stop, stopped the run after the state was saved.

    Attributes:
        signal: signal number, or `PREEMPTED`.
    """

    signal: int

    @property
    def exit_code(self) -> int:
        """That of the signal; for a notice, that of SIGTERM, so that every launcher restarts the run."""
        return 128 + (signal.SIGTERM if self.signal == PREEMPTED else self.signal)

    @property
    def cause(self) -> str:
        """The name of what stopped the run, for messages."""
        return "a preemption notice" if self.signal == PREEMPTED else signal.Signals(self.signal).name


class StoppedError(Exception):
    """A signal, or a notice that a machine will stop, ended work between two steps, whose state is saved already."""

    def __init__(self, number: int):
        super().__init__(f"stopped by signal {number}")
        self.outcome = Interrupted(number)


Outcome = Done | Interrupted | Rewind | Next


@dataclass(frozen=True)
class SyncFlags:
    """Requests of a process.

    Attributes:
        stop: number of the signal that requests a stop, or `PREEMPTED`; 0 means none.
        save: whether a time-based checkpoint is due.
    """

    stop: int = 0
    save: bool = False


class FlagSync:
    """Passes a process's flags to the compiled step and reads back the flags that all processes agree on."""

    def __init__(self, layout: Layout, stop: StopRequest):
        self._stop = stop
        self._single_process = jax.process_count() == 1
        self._abstract = FlagSync.abstract(layout)
        self._unset = self._make_array(SyncFlags())

    @staticmethod
    def unset(layout: Layout) -> jax.Array:
        """Returns what a step is called with when nothing is requested."""
        return FlagSync(layout, StopRequest())._unset

    @staticmethod
    def abstract(layout: Layout) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of what `raised` returns."""
        sharding = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
        return jax.ShapeDtypeStruct((layout.mesh.size, 2), np.int32, sharding=sharding)

    def raised(self, *, save: bool) -> jax.Array:
        """int32 {device, flag}, for the next step: every local device holds this process's flags.

        From here on, a signal to stop saves first.
        """
        flags = SyncFlags(stop=self._stop.signal, save=save)
        self._stop.is_training = True
        return self._unset if self._single_process or flags == SyncFlags() else self._make_array(flags)

    def agreed(self, reduced: np.ndarray | None, *, save: bool) -> SyncFlags:
        """The flags that every process acts on after this step.

        A single process acts on its own, several on the newest fetched maximum of each flag, if there is one.
        """
        if self._single_process:
            return SyncFlags(stop=self._stop.signal, save=save)
        return SyncFlags() if reduced is None else SyncFlags(stop=int(reduced[0]), save=bool(reduced[1]))

    def check_stop(self) -> None:
        """In long work between two steps: raises `StoppedError` on all processes if one is asked to stop.

        Every process must call this.
        """
        if number := largest_of_processes(self._stop.signal):
            raise StoppedError(number)

    def _make_array(self, flags: SyncFlags) -> jax.Array:
        shape, sharding = self._abstract.shape, self._abstract.sharding
        rows = np.broadcast_to(np.array([flags.stop, flags.save], np.int32), shape)
        return jax.make_array_from_callback(shape, sharding, lambda index: rows[index])
