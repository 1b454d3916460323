"""Ends a phase whose objective has nothing left to train."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxlm.controllers.base import Controller, Decision, DoneStep, Json, Next


@dataclass(frozen=True)
class Finished(Controller):
    """It has no state.

    Attributes:
        metric: of training steps; 0 once nothing is left.
    """

    metric: str

    name: ClassVar[str] = "finished"

    @property
    def metrics(self) -> Mapping[str, str]:
        return {"objective": self.metric}

    def controls(self) -> Mapping[str, float]:
        return {}

    def init(self) -> Json:
        return None

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Json) -> tuple[Json, Decision | None]:
        return state, Next(f"{self.metric} is 0") if metrics[self.metric] == 0 else None
