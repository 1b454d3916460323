"""Steps whose activations are saved in the host's memory, against steps that save them on the device: bit for bit.

On CPUs both memories are the same, so this shows that the policy composes with sharding and accumulation, and not that XLA
for GPUs copies the right layer; `jaxlm.session.compilation.offload` tests that on the device before the first step.
"""

from dataclasses import replace

import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.models.remat import RematConfig
from tests.engine.helpers import MODEL, TinyRun, arrays, layout, one_device, phase

OFFLOADED = RematConfig(offload=["residual", "attention"])


@pytest.mark.parametrize("where", [one_device, layout], ids=["one device", "eight devices"])
def test_a_step_with_offloaded_activations_is_bitwise_the_same(where):
    runs = [
        TinyRun(where(), phase(model=model), model=model)
        for model in (replace(MODEL, gradient_checkpointing=saved) for saved in (["attention"], OFFLOADED))
    ]
    for number in range(3):
        losses = [run.step(arrays(number), 2)["train/loss"] for run in runs]
        assert losses[0] == losses[1]
    for (path, ours), (_, theirs) in zip(*(tree.leaves(run.state) for run in runs), strict=True):
        assert np.asarray(tree.raw(ours)).tobytes() == np.asarray(tree.raw(theirs)).tobytes(), path
