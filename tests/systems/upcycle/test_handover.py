"""The controller that ends a run whose phase begins far from its teacher."""

import math

import pytest

from jaxlm.controllers.base import DoneStep, PhaseFacts, StopRunError
from jaxlm.core.errors import ConfigError
from jaxlm.objectives.distill import Distill
from jaxlm.objectives.next_token import NextToken
from jaxlm.plan.plan import plan_phases
from jaxlm.plan.run_config import PhaseConfig, RunConfig
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.systems.upcycle.handover import HandoverConfig

FIRST = DoneStep(7, is_last=False, is_skipped=False, progress=0.5, effective=11)


def after(config: HandoverConfig, loss: float, teacher: float, state: bool = False):
    return config.build(PhaseFacts(1e-3, reports_teacher_loss=True)).after(
        FIRST, {"train/loss": loss, "train/teacher_loss": teacher}, state
    )


def test_the_loss_may_be_some_times_the_teachers():
    assert after(HandoverConfig(), 4.49, 3.0) == (True, None)
    message = (
        r"step 7: .* a loss of 4\.5100 .* the teacher's is 3\.0000; at most 4\.5000 is allowed \(handover\.max_loss_i"
    )
    with pytest.raises(StopRunError, match=message):
        after(HandoverConfig(), 4.51, 3.0)
    assert after(HandoverConfig(max_loss_increase=2.0), 4.51, 3.0) == (True, None)


def test_the_loss_may_be_some_nats_above_the_teachers():
    config = HandoverConfig(max_loss_increase=None, max_loss_delta=0.5)
    assert after(config, 3.49, 3.0) == (True, None)
    with pytest.raises(StopRunError, match=r"at most 3\.5000 is allowed \(handover\.max_loss_delta: 0\.5\)"):
        after(config, 3.51, 3.0)


def test_every_violated_limit_is_named():
    with pytest.raises(StopRunError, match=r"max_loss_increase: 1\.5\) and at most 3\.5000 is allowed"):
        after(HandoverConfig(max_loss_delta=0.5), 9.0, 3.0)


@pytest.mark.parametrize("losses", [(math.nan, 3.0), (3.0, math.nan), (math.inf, 3.0)])
def test_a_loss_that_is_not_a_number_ends_the_run(losses):
    with pytest.raises(StopRunError):
        after(HandoverConfig(), *losses)


def test_only_the_first_step_counts():
    assert after(HandoverConfig(), 100.0, 3.0, state=True) == (True, None)


def phases(objective, controllers):
    config = RunConfig(trainer=TrainerConfig(controllers=controllers), phases=[PhaseConfig("one", objective=objective)])
    return plan_phases(config)[0]


def test_an_objective_that_does_not_measure_the_teacher_is_refused():
    (phase,) = phases(Distill(teacher_loss=True), [HandoverConfig()])
    assert [controller.name for controller in phase.controllers] == ["bad_streak", "handover"]
    for objective in (Distill(), NextToken()):
        with pytest.raises(ConfigError, match=r"trainer\.controllers\.0 \(phase 'one'\): handover .* does not measure"):
            phases(objective, [HandoverConfig()])


def test_a_check_that_allows_anything_is_refused():
    with pytest.raises(ConfigError, match="both null"):
        phases(Distill(teacher_loss=True), [HandoverConfig(max_loss_increase=None)])
