"""How a phase ends. Only `engine/conductor.py` acts on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """The phase ran to its end."""


@dataclass(frozen=True)
class Interrupted:
    """A signal stopped the run after the state was saved.

    Attributes:
        signal: signal number; the process exits with 128 + `signal`.
    """

    signal: int


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
