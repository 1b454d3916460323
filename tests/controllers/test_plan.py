"""Which controllers a phase has, and which do not go together."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest

from jaxlm.controllers.base import Controller, ControllerConfig, PhaseFacts
from jaxlm.controllers.early_stopping import BadStreak, EarlyStopping
from jaxlm.controllers.reduce_on_plateau import ReduceOnPlateauConfig
from jaxlm.core.errors import ConfigError
from jaxlm.plan.plan import plan_phases
from jaxlm.plan.run_config import PhaseConfig, RunConfig
from jaxlm.plan.trainer_config import TrainerConfig

PLATEAU = ReduceOnPlateauConfig("train/loss")


@dataclass(frozen=True)
class Sets(ControllerConfig, Controller):
    """A controller that sets one control."""

    control: str
    name = "sets"
    metrics = MappingProxyType({})

    def build(self, phase):
        return self

    def controls(self):
        return {self.control: 1.0}

    def init(self):
        return None

    def after(self, step, metrics, state):
        return None, None


def names(*controllers: ControllerConfig, **phase: Any) -> list[str]:
    phases = [PhaseConfig("one", **phase)]
    planned, _ = plan_phases(RunConfig(trainer=TrainerConfig(controllers=list(controllers)), phases=phases))
    return [controller.name for controller in planned[0].controllers]


def test_a_phase_inherits_controllers_and_may_have_its_own():
    assert names() == ["bad_streak"]
    assert names(PLATEAU) == ["bad_streak", "reduce_on_plateau"]
    assert names(PLATEAU, controllers=[]) == ["bad_streak"]
    assert names(controllers=[PLATEAU]) == ["bad_streak", "reduce_on_plateau"]


def test_a_plateau_knows_the_learning_rate_of_its_phase():
    phases, _ = plan_phases(RunConfig(trainer=TrainerConfig(controllers=[PLATEAU])))
    assert phases[0].controllers[1] == PLATEAU.build(PhaseFacts(phases[0].optimizer.learning_rate))
    assert phases[0].controls == {"lr_scale": 1.0}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([PLATEAU, PLATEAU], r"trainer\.controllers\.1: another controller is called 'reduce_on_plateau' too"),
        (
            [PLATEAU, Sets("lr_scale")],
            r"controllers\.1: sets sets the control 'lr_scale', and so does reduce_on_plateau",
        ),
        (
            [Sets("depth")],
            r"controllers\.0: sets sets the control 'depth', which no step reads. The controls are: lr_scale",
        ),
        (
            [ReduceOnPlateauConfig("eval/loss")],
            r"controllers\.0\.metric: 'eval/loss' given, but there is no validation",
        ),
    ],
)
def test_controllers_that_do_not_go_together_are_refused(given, named):
    with pytest.raises(ConfigError, match=named):
        names(*given)


def test_those_with_keys_of_their_own_survive_a_rewind():
    assert None not in (BadStreak.persistence.rewound, EarlyStopping.persistence.rewound)
    assert PLATEAU.build(PhaseFacts(1.0)).persistence.rewound is None
