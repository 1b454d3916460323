"""Steps whose activations, or whose optimizer state, are in the host's memory, against steps on the device: bit for bit.

On CPUs both memories are the same, so this shows that the policy composes with sharding and accumulation, and not that XLA
for GPUs copies the right layer; `jaxlm.session.compilation.options` tests that on the device before the first step.
"""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.devices import HOST_MEMORY
from jaxlm.engine.entry import StateBuilder, enter_phase
from jaxlm.models.base import vocab_axis
from jaxlm.models.remat import RematConfig
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.stored_state import EightBit, Full
from tests.engine.helpers import F32, MODEL, VOCAB, TinyRun, arrays, layout, one_device, phase
from tests.tiers import one_of

OFFLOADED = RematConfig(offload=["residual", "attention"])


@pytest.mark.slow
@pytest.mark.parametrize("where", one_of([layout, one_device]), ids=["eight devices", "one device"])
def test_a_step_with_offloaded_activations_is_bitwise_the_same(where):
    runs = [
        TinyRun(where(), phase(model=model), model=model)
        for model in (replace(MODEL, gradient_checkpointing=saved) for saved in (["attention"], OFFLOADED))
    ]
    for number in range(3):
        losses = [run.step(arrays(number), 2)["train/loss"] for run in runs]
        assert losses[0] == losses[1]
    assert_same_bits(*(run.state for run in runs))


def assert_same_bits(ours, theirs):
    for (path, one), (_, other) in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
        assert np.asarray(tree.raw(one)).tobytes() == np.asarray(tree.raw(other)).tobytes(), path


def memory_kinds(state):
    """Of the moments, and of everything else."""
    moments, others = set(), set()
    for path, leaf in tree.leaves(state):
        is_moment = path.startswith("opt_state.") and tree.is_named(leaf)
        (moments if is_moment else others).add(tree.raw(leaf).sharding.memory_kind)
    return moments, others


def offloaded(where):
    return replace(where, optimizer_memory=HOST_MEMORY)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    one_of([layout, one_device, lambda: layout(model=2)]),
    ids=["fsdp", "1", "tp"],
)
@pytest.mark.parametrize("state", one_of(["8bit", "full"]))
def test_a_step_with_an_offloaded_optimizer_is_bitwise_the_same(where, state):
    """Its moments are on the host before and after the step, and nothing else is. The donated state is gone."""
    optimizer = AdamConfig(learning_rate=1e-2, warmup=0, state=EightBit(min_size=256) if state == "8bit" else Full())
    runs = [TinyRun(each, phase(optimizer=optimizer)) for each in (where(), offloaded(where()))]
    for number in range(3):
        before = runs[1].state
        metrics = [run.step(arrays(number), 2) for run in runs]
        assert metrics[0] == metrics[1]
        assert all(array.is_deleted() for array in jax.tree.leaves(before.opt_state))
    assert memory_kinds(runs[1].state) == ({HOST_MEMORY}, {"device"})
    assert_same_bits(*(run.state for run in runs))


@pytest.mark.soak
def test_a_skipped_step_leaves_the_offloaded_moments_as_they_were():
    run = TinyRun(offloaded(layout()))
    run.step(arrays(0))
    before = jax.tree.map(np.asarray, run.state.opt_state)
    poisoned = arrays(1)
    poisoned["loss_mask"][:] = np.nan
    assert run.step(poisoned)["train/skipped_steps"] == 1
    assert_same_bits(run.state.opt_state, before)


@pytest.mark.soak
def test_a_phase_carries_the_offloaded_moments_of_the_one_before():
    """The program that enters a phase reads them, and puts them back."""
    first = phase(end=3)
    second = replace(first, index=1, name="second", start=3, end=20, carries_optimizer=True)
    states = []
    for where in (layout(), offloaded(layout())):
        run = TinyRun(where, first)
        run.step(arrays(0))
        builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (first, second))
        with where.use():
            states.append(enter_phase(builder, second, where, run.state)())
    assert memory_kinds(states[1]) == ({HOST_MEMORY}, {"device"})
    assert_same_bits(*states)


@pytest.mark.slow
def test_the_copies_to_the_devices_wait_for_the_gradients():
    """In the program for CUDA. Otherwise moments are on the devices while activations are."""
    run = TinyRun(offloaded(one_device()))
    text = run.lowered_text(arrays(0), "cuda")
    waited = re.findall(r"(%\d+):2 = stablehlo.optimization_barrier %arg\d+, (%\d+) ", text)
    num_moments = sum(tree.is_named(leaf) for _, leaf in tree.leaves(run.state.opt_state))
    assert len(waited) == num_moments
    assert len({objective for _, objective in waited}) == 1
    for name, _ in waited:
        assert re.search(rf'@annotate_device_placement\({name}#0\) .*_xla_buffer_placement = "device"', text)
    assert text.count('_xla_buffer_placement = "pinned_host"') == num_moments
