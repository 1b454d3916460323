"""Entering a phase: what happens to the previous phase's state."""

import jax
import pytest

from jaxlm.engine.entry import StateBuilder, enter_phase
from jaxlm.models.base import vocab_axis
from jaxlm.optim.averaging import Ema
from tests.engine.helpers import F32, MODEL, VOCAB, one_device, phase


@pytest.mark.slow
def test_nothing_of_the_previous_phase_stays_on_the_devices():
    """Adam's moments and an average take three times the model's memory, and later phases do not need them."""
    first = phase(averages={"ema": Ema()})
    second = phase(index=1, name="second", start=20, end=40, trainable=("head",))
    state_builder, where = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (first, second)), one_device()
    with where.use():
        before = enter_phase(state_builder, first, where, None)()
        state = enter_phase(state_builder, second, where, before)()
    for array in jax.tree.leaves((before.model, before.opt_state, before.slots)):
        assert array.is_deleted()
    assert not any(array.is_deleted() for array in jax.tree.leaves(state))
