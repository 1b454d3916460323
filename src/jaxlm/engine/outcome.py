"""How a phase ends. Only `engine/conductor.py` acts on it."""

import signal
from dataclasses import dataclass

from jaxlm.controllers.base import Next as Next
from jaxlm.controllers.base import Rewind as Rewind
from jaxlm.engine.signals import PREEMPTED


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
        """What stopped the run, for messages."""
        return "a preemption notice" if self.signal == PREEMPTED else signal.Signals(self.signal).name


class StoppedError(Exception):
    """A signal, or a notice that a machine will stop, ended work between two steps, whose state is saved already.

    Attributes:
        outcome: how the phase ends.
    """

    def __init__(self, number: int):
        super().__init__(f"stopped by signal {number}")
        self.outcome = Interrupted(number)


Outcome = Done | Interrupted | Rewind | Next
