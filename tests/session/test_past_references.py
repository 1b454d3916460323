"""Runs whose teacher is gone. Runs the trainer in this process, on eight devices."""

import pytest

from jaxlm.core.errors import ConfigError
from tests.session.test_gates import DISTILL, Verified


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    return Verified(tmp_path_factory.mktemp("past"))


@pytest.mark.slow
def test_a_teacher_that_a_phase_still_reads_must_be_there(trainings):
    with pytest.raises(ConfigError, match=r"refs\.teacher\.path: "):
        trainings.run("none", 2, refs=trainings.ref("nowhere"), objective=DISTILL)
