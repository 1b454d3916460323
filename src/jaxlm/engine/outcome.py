"""How a phase ended. Only the engine acts on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """All steps of the phase are done."""


@dataclass(frozen=True)
class Interrupted:
    """A signal asked to stop; the state was saved first.

    Attributes:
        signal: its number; the process exits with 128 + this.
    """

    signal: int


Outcome = Done | Interrupted
