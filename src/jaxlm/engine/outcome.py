"""How a phase ends. Only `engine/conductor.py` acts on it."""

import signal
from dataclasses import dataclass

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
        """That of the signal; for a notice, that of SIGTERM, so that every launcher begins again."""
        return 128 + (signal.SIGTERM if self.signal == PREEMPTED else self.signal)

    @property
    def cause(self) -> str:
        """What stopped the run, for messages."""
        return "a preemption notice" if self.signal == PREEMPTED else signal.Signals(self.signal).name


@dataclass(frozen=True)
class Rewind:
    """Several updates in a row were skipped: the run goes back to before the first of them.

    Attributes:
        first, last: the first and the last step whose update was skipped (`step-N` = N).
    """

    first: int
    last: int


@dataclass(frozen=True)
class Next:
    """The phase ends at this step, possibly before its last one: the run goes on with the next phase, or ends.

    Attributes:
        step: steps done.
        weights: name of the pinned checkpoint whose weights the run goes on with; None keeps the current ones.
        reason: why the phase ends, for messages.
    """

    step: int
    weights: str | None
    reason: str


Outcome = Done | Interrupted | Rewind | Next
