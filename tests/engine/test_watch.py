"""Watched norms and histograms agree with numpy on the same arrays, and watching does not change training."""

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.engine.entry import StateBuilder, enter_phase
from jaxlm.engine.step import make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.engine.watch import NUM_BINS, WatchConfig, batch_hash, split_watched
from tests.engine import helpers

WATCH = WatchConfig(["grads", "params", "updates", "opt_state"], interval=2)


@pytest.fixture(scope="module")
def watched():
    """(parameters before, numbers) of the first two steps on eight devices, and the losses of plain steps."""
    where, phase = helpers.layout(), helpers.phase()
    state_builder = StateBuilder(helpers.MODEL, helpers.vocab_axis(helpers.VOCAB), 0, helpers.F32, (phase,))
    step = make_train_step(phase, where, helpers.F32, state_builder.abstract_state(phase), WATCH)
    seen = []
    with where.use():
        state = enter_phase(state_builder, phase, where, None)()
        for number in range(2):
            model = {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(state.model)}
            columns = helpers.arrays(number)
            state, report = step(state, {}, helpers.batch(columns, where), FlagSync.unset(where))
            after = {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(state.model)}
            seen.append((model, after, jax.device_get(report.watched), float(report.metrics["grad/norm/total"])))
    return seen


@pytest.mark.slow
def test_norms_agree_with_numpy_for_each_layer(watched):
    before, after, numbers, grad_norm = watched[1]
    scalars, _ = split_watched(numbers)
    total = np.sqrt(sum(np.square(a.astype(np.float64)).sum() for a in before.values()))
    assert scalars["params/norm/total"] == pytest.approx(total, rel=1e-5)
    assert scalars["grad/norm/total"] == pytest.approx(grad_norm, rel=1e-5)
    updates = np.sqrt(sum(np.square((after[p] - before[p]).astype(np.float64)).sum() for p in before))
    assert scalars["updates/norm/total"] == pytest.approx(updates, rel=1e-3)
    path = next(path for path in before if "layers" in path and before[path].shape[0] == 2 and before[path].ndim > 2)
    for layer in range(2):
        expected = np.linalg.norm(before[path][layer].ravel().astype(np.float64))
        assert scalars[f"params/norm/{path}.{layer}"] == pytest.approx(expected, rel=1e-5)
    assert any(name.startswith("opt_state/norm/") for name in scalars)


@pytest.mark.slow
def test_histograms_agree_with_numpy(watched):
    before = {path: array for path, array in watched[0][0].items() if path.startswith("tokens")}
    watch = WatchConfig(["params"], False, False, include_histograms=True, interval=1)
    look = jax.jit(lambda arrays: watch.measure(jax.numpy.ones((), jax.numpy.int32), {"params": arrays}, None))
    scalars, histograms = split_watched(jax.device_get(look(before)))
    assert scalars == {}
    ((name, found),) = histograms.items()
    ((path, array),) = before.items()
    assert name == f"params/hist/{path}"
    array = array.ravel()
    assert (found.low, found.high) == (array.min(), array.max())
    counts, _ = np.histogram(array.astype(np.float64), bins=NUM_BINS)
    assert sum(found.counts) == array.size
    # A number on an edge may fall to either side in float32.
    assert np.abs(np.cumsum(found.counts) - np.cumsum(counts)).max() <= 2


@pytest.mark.slow
def test_nothing_is_measured_between_intervals(watched):
    assert not WATCH.due(1)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(watched[0][2]))


@pytest.mark.slow
def test_a_batchs_hash_depends_on_its_tokens_but_not_on_the_mesh():
    columns = helpers.arrays(3)
    places = [(helpers.one_device(), 1), (helpers.layout(), 1), (helpers.layout(model=2), 2)]
    hashes = {float(jax.jit(batch_hash)(helpers.batch(columns, where, micro))) for where, micro in places}
    assert len(hashes) == 1
    (first,) = hashes
    assert first == int(first) < 2**24
    columns["tokens"][3, 4] += 1
    assert float(batch_hash(helpers.batch(columns, helpers.one_device()))) != first
    swapped = helpers.arrays(3)
    swapped["tokens"][[0, 1]] = swapped["tokens"][[1, 0]]
    assert float(batch_hash(helpers.batch(swapped, helpers.one_device()))) != first


@pytest.mark.parametrize(
    "wrong", [{"interval": 0}, {"watch_targets": []}, {"include_norms": False, "include_per_parameter_norms": False}]
)
def test_watching_nothing_is_an_error(wrong):
    watch = WatchConfig(**wrong)

    def check() -> None:
        check_fields(watch, "trainer.watch")
        watch.check()

    with pytest.raises(ConfigError, match=r"trainer\.watch"):
        check()
