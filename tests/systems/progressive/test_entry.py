"""What a phase takes over when layers are cut: moments go with their layers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.values.logged import LEARNING_RATE
from jaxlm.engine.entry import StateBuilder, enter_phase
from jaxlm.engine.step import make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.models.base import vocab_axis
from jaxlm.optim.averaging import Ema
from jaxlm.optim.stored_state import EightBit
from jaxlm.systems.progressive.surgery import GrowConfig, SplitAtConfig
from tests.engine.helpers import F32, MODEL, VOCAB, TinyRun, arrays, batch, layout, phase
from tests.engine.test_entry import ADAM, entered, models
from tests.optim.test_adagc import check_moved_norms

IN_8_BITS = replace(ADAM, state=EightBit(min_size=256))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "optimizer"),
    [(MODEL, ADAM), (MODEL, IN_8_BITS), (replace(MODEL, num_layers=3), ADAM)],
    ids=["two layers", "in 8 bits", "three layers"],
)
def test_moments_of_a_cut_model_are_the_cut_moments(config, optimizer):
    cut = SplitAtConfig(1)
    before, after = entered(config=config, before=optimizer, surgeries=(cut,), schedule_start=0, scheduled_steps=20)
    for theirs, ours in zip(models(before.opt_state), models(after.opt_state), strict=True):
        expected = dict(tree.leaves(cut.apply(theirs, key=jax.random.key(0))))
        found = dict(tree.leaves(ours))
        assert found.keys() == expected.keys()
        assert any(path.startswith("body.1.") for path in found)
        for path, leaf in found.items():
            np.testing.assert_array_equal(leaf.array, expected[path].array, err_msg=path)


@pytest.mark.slow
def test_a_cut_model_with_carried_moments_trains_on_as_before():
    """On eight devices, with an average of the weights. Only where the layers are stored has changed."""
    where, average = layout(), {"ema": Ema(beta=0.5)}
    first = phase(optimizer=ADAM, averages=average)
    run = TinyRun(where, first)
    for seed in range(3):
        run.step(arrays(seed))
    cut = SplitAtConfig(1)
    shared = {"carries_optimizer": True, "schedule_start": 0, "scheduled_steps": 20}
    second = replace(first, index=1, name="second", start=3, surgeries=(cut,), **shared)
    builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (first, second))
    previous = jax.tree.map(jnp.copy, run.state)
    with where.use():
        state = enter_phase(builder, second, where, previous)()
        step = make_train_step(second, where, F32, builder.abstract_state(second))
        flags = FlagSync.unset(where)
        for seed in range(3, 6):
            state, report = step(state, {}, batch(arrays(seed), where), flags)
            metrics = run.step(arrays(seed))
            assert float(report.metrics["train/loss"]) == pytest.approx(metrics["train/loss"], rel=1e-6)
            assert float(report.metrics[LEARNING_RATE]) == metrics[LEARNING_RATE]
    for found, whole in ((state.model, run.state.model), (state.slots["ema"].weights, run.state.slots["ema"].weights)):
        for (path, a), (_, b) in zip(*(tree.leaves(jax.device_get(m)) for m in (cut.merge(found), whole)), strict=True):
            np.testing.assert_allclose(a.array, b.array, rtol=1e-5, atol=1e-6, err_msg=path)


def test_norms_of_adagc_go_where_the_layers_of_a_model_go():
    grown = GrowConfig(num_layers=2), {"body.0.": [1, 2, 3]}
    check_moved_norms([grown, (SplitAtConfig(layer=1), {"body.0.": [1], "body.1.": [2, 3]})])
