"""Steps on groups of responses, whose objective holds a reference: the same numbers on every mesh."""

import numpy as np
import pytest

from jaxlm.core.values.batch_types import GroupBatch
from jaxlm.systems.rl.grpo import Grpo
from jaxlm.systems.rl.policy_losses import KlInLoss, SeqMeanTokenMean
from tests.engine.helpers import arrays
from tests.engine.test_preferences import check_mesh, side_by_side

GROUPED = Grpo(loss_agg=SeqMeanTokenMean(), kl=KlInLoss(0.1, "squared"), sync_interval=2)
GROUPS = side_by_side(4, "group", GroupBatch.of)


def columns(seed):
    rewards = np.random.default_rng(seed).integers(0, 3, 64).astype(np.float32)
    return {**arrays(seed, 64), "rewards": rewards}


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [pytest.param("fsdp 8", marks=pytest.mark.soak), "two microbatches"])
def test_every_mesh_gives_the_numbers_of_one_device(mesh):
    check_mesh(mesh, GROUPED, batch=GROUPS, columns=columns)
