"""Signals at random moments of a run that samples what it trains on."""

import pytest

from tests.end_to_end.commands import Workplace
from tests.end_to_end.test_random_signals import EXPORTS, check_random_signals
from tests.systems.rl.test_rollouts_run import start

PLACES = ("import", "start", "any", "compile", "save", "rollout", "export")


@pytest.mark.soak
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_signals_at_random_moments(workplace, twice):
    def make() -> Workplace:
        place = start(workplace(), 16)
        path = place.folder / "run.yaml"
        path.write_text(path.read_text() + EXPORTS)
        return place

    check_random_signals(make, PLACES, "tests.systems.rl.signaled_in", twice)
