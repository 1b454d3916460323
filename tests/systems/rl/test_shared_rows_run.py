"""Rollouts whose rows eight devices share."""

import pytest

from tests.end_to_end.test_context import METHODS, RUN
from tests.systems.rl.test_rollouts_run import start, steps_of


@pytest.mark.soak
def test_the_policy_finds_its_own_samples_where_it_wrote_them(workplace):
    place = start(workplace(devices=8), 4)
    place.finish(*RUN, *METHODS["ring"])
    records = steps_of(place)
    assert len(records) == 4
    assert max(record["train/sampling/logp_diff_max"] for record in records) < 1e-5
