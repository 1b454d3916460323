"""A hand-over to a worse model ends the run."""

import pytest

from jaxlm.systems.upcycle.handover import HandoverError
from tests.session.test_gates import (
    DISTILL,
    _from,
    trainings,  # noqa: F401 - a fixture
)


@pytest.mark.soak
def test_a_hand_over_to_a_worse_model_ends_the_run_at_its_first_step(trainings):  # noqa: F811
    keys = {"refs": trainings.ref(), "objective": DISTILL}
    strict = {"controllers": [{"type": "handover", "max_loss_increase": 1.01}]}
    with pytest.raises(HandoverError, match=r"step 1: the model begins the phase with a loss of"):
        trainings.run("handed", 6, trainer=strict, **keys)
    assert [path.name for path in trainings.place("handed").glob("step-*")] == ["step-0"]
    still = {"learning_rate": 0.0, "warmup": 0, "lr_schedule": "constant"}
    trainings.run("equal", 2, trainer=strict, optimizer=still, **keys, **_from(trainings))
    own, theirs = (trainings.measured("equal", f"train/{name}") for name in ("loss", "teacher_loss"))
    assert own == pytest.approx(theirs, rel=1e-5)
    assert trainings.measured("equal", "train/divergence")[0] == pytest.approx(0.0, abs=1e-6)
