"""Steps whose objective holds a reference: the same numbers on every mesh, also when the reference follows the model."""

import haliax as hax
import jax
import numpy as np
import pytest

from jaxlm.core.values.batch_types import PairBatch
from jaxlm.objectives.dpo import Dpo
from tests.engine.helpers import MODEL, TinyRun, arrays, layout, one_device, phase

MESHES = {"fsdp 8": (layout, 1), "two microbatches": (one_device, 2)}
SYNCED = Dpo(beta=0.5, sync_interval=2, sync_mixup=0.6, sft_weight=0.1)


def side_by_side(number, name, make):
    """Makes batches {microbatch, batch, name, position} of rows that follow each other."""

    def batch(columns, where, num_microbatches):
        rows = len(columns["tokens"]) // number
        axes = (hax.Axis("microbatch", num_microbatches), hax.Axis("batch", rows // num_microbatches))

        def placed(column, *inner):
            shape = tuple(axis.size for axis in (*axes, *inner))
            sharding = where.compute_sharding((*axes, *inner))
            return hax.named(jax.device_put(column.reshape(shape), sharding), (*axes, *inner))

        Side = hax.Axis(name, number)
        rewards = {"rewards": placed(columns["rewards"], Side)} if "rewards" in columns else {}
        named = {k: placed(v, Side, MODEL.Pos) for k, v in columns.items() if k not in rewards}
        return make(**named, **rewards)

    return batch


PAIRS = side_by_side(2, "pair", PairBatch.of)


def columns(seed):
    return arrays(seed, 32)


def trained(where, objective, num_microbatches=1, batch=PAIRS, columns=columns):
    run = TinyRun(where, phase(objective=objective), batch=batch)
    return [run.step(columns(seed), num_microbatches) for seed in range(4)], run


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp 8", pytest.param("two microbatches", marks=pytest.mark.soak)])
def test_every_mesh_gives_the_numbers_of_one_device(mesh):
    check_mesh(mesh, SYNCED)


def check_mesh(mesh, objective, **data):
    """Trains on the mesh as on one device. Args: data: of `trained`, if batches are not pairs."""
    where, num_microbatches = MESHES[mesh]
    expected, _ = trained(one_device(), objective, **data)
    found, run = trained(where(), objective, num_microbatches, **data)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for metric in ours:
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-5), (step, metric)
    held = jax.tree.leaves(run.state.slots["objective"].weights)
    assert len(held) == len(jax.tree.leaves(run.state.model))


@pytest.mark.slow
def test_the_first_step_is_at_ln_2_and_the_reference_moves_only_at_a_sync():
    metrics, run = trained(one_device(), SYNCED)
    assert metrics[0]["train/loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert metrics[0]["train/rewards/margins"] == pytest.approx(0, abs=1e-5)
    held = jax.tree.map(np.asarray, run.state.slots["objective"].weights)  # after a sync at step 4
    run.step(columns(4))
    for before, after in zip(jax.tree.leaves(held), jax.tree.leaves(run.state.slots["objective"].weights), strict=True):
        np.testing.assert_array_equal(before, after)
    run.step(columns(5))
    differ = [
        np.any(a != b)
        for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(run.state.slots["objective"].weights), strict=True)
    ]
    assert all(differ)
