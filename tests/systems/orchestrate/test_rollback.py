"""Going back restores the state of a portfolio of strategies too."""

import pytest

from jaxlm.systems.orchestrate.portfolio import PortfolioConfig
from tests.engine.test_rollback import check_rollback
from tests.tiers import one_of


@pytest.mark.soak
@pytest.mark.parametrize("devices", one_of(["eight", "one"]))
def test_a_rollback_restores_every_bit_and_the_next_steps_repeat(tmp_path, devices):
    check_rollback(tmp_path, devices, PortfolioConfig(learning_rate=1e-2, warmup=0, telemetry=True))
