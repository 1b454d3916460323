"""What the orchestrator remembers between steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxlm.controllers.base import Json


@dataclass(frozen=True)
class Memory:
    """What the orchestrator remembers. Steps are those of the run.

    Attributes:
        strategy: the current one.
        made_for: the keys that it was made for: `Orchestrator.signature`.
        bandit: of `Bandit`.
        begun: before the first step of the phase; None before it is known.
        decided: the last boundary.
        loss: mean loss there; None if it is not known.
        stage: early, middle or late.
        switched: the last switch; None before the first.
        on_plateau: whether the loss had stopped falling already.
        planned_until: the step up to which `switch_at` is done.
        trying: why a branch is under way; None if there is none.
        branched_until: the last step of the last branch.
        extra: what branches have cost, in steps.
        snapshots: purpose -> step of a checkpoint to go back to.
        next_snapshot: step of the next one.
        trusted: step of the checkpoint to which the run last went back; -1 if it never did.
        rollbacks: how often the run has gone back in a row.
        healthy: good steps since it last did.
        skipped: updates skipped in a row.
        extrapolated: the last try to extrapolate; None before the first.
        rejections: tries to extrapolate that failed in a row.
    """

    strategy: str
    made_for: Json
    bandit: Json
    begun: int | None = None
    decided: int = 0
    loss: float | None = None
    stage: str = "early"
    switched: int | None = None
    on_plateau: bool = False
    planned_until: int = 0
    trying: str | None = None
    branched_until: int = 0
    extra: int = 0
    snapshots: Mapping[str, int] = field(default_factory=dict)
    next_snapshot: int = 0
    trusted: int = -1
    rollbacks: int = 0
    healthy: int = 0
    skipped: int = 0
    extrapolated: int | None = None
    rejections: int = 0

    def is_branching(self, step: int) -> bool:
        """Returns whether a branch is to begin, or had this step."""
        return self.trying is not None or step <= self.branched_until
