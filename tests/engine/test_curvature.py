"""The curvature that the step offers to optimizers, which costs nothing unless the optimizer uses it."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.precision import parse_precision
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.state import step_key
from jaxlm.engine.step import make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.models.base import vocab_axis
from jaxlm.objectives.next_token import NextToken
from jaxlm.optim.curvature import Curvature
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.sophia_h import SophiaHConfig
from tests.engine.helpers import F32, MODEL, VOCAB, TinyRun, arrays, batch, layout, one_device, phase

SOPHIA = SophiaHConfig(learning_rate=3e-3, warmup=0, update_interval=3)


def memory(run: TinyRun) -> Any:
    """Sophia's part of the optimizer state."""
    return next(part for part in run.state.opt_state if hasattr(part, "diagonal"))


def flat(params: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(params)}


def first_estimate(run: TinyRun, columns: dict[str, np.ndarray], num_microbatches: int) -> dict[str, np.ndarray]:
    """u * (H u), with H u from finite differences of the kernels' gradients, in float32, at the run's parameters."""
    seed, h = run.phase.optimizer.rng_seed, 1e-3

    @jax.jit
    def estimate(state: Any, rows: Any) -> Any:
        trainable, frozen = run.phase.split(state.model)
        u = Curvature(lambda params: params, lambda: step_key(state)).direction(trainable, seed)

        def loss(trainable: Any) -> jax.Array:
            model = eqx.combine(trainable, frozen, is_leaf=tree.is_named)
            terms, _, _ = NextToken().terms(model, rows, None, key=None)
            return sum((term.mean() for term in terms.values()), jnp.zeros(()))

        def side(h: jax.Array) -> Any:
            return jax.grad(loss)(jax.tree.map(lambda w, d: w + h * d, trainable, u))

        both = jax.lax.map(side, jnp.asarray([h, -h]))
        return jax.tree.map(lambda g, d: d * (g[0] - g[1]) / (2 * h), both, u)

    with run.where.use():
        rows = batch(columns, run.where, num_microbatches)
        first = jax.tree.map(lambda column: column["microbatch", 0], rows, is_leaf=tree.is_named)
        return flat(estimate(run.state, first))


def assert_is_the_first_estimate(run: TinyRun, expected: dict[str, np.ndarray], near: float = 0.02):
    found = flat(memory(run).diagonal)
    assert found.keys() == expected.keys()
    for path, theirs in expected.items():
        ours = found[path] / (1 - run.phase.optimizer.beta2)
        assert np.linalg.norm(ours - theirs) < near * np.linalg.norm(theirs), path


@pytest.mark.slow
def test_the_estimate_uses_the_first_microbatch_at_its_interval_and_resumes():
    run = TinyRun(one_device(), phase(optimizer=SOPHIA))
    expected = first_estimate(run, arrays(0), 2)
    diagonals, saved = [], None
    for number in range(5):
        run.step(arrays(number), 2)
        if number == 0:
            assert_is_the_first_estimate(run, expected)
        if number == 2:
            saved = jax.tree.map(np.asarray, run.state)
        diagonals.append(flat(memory(run).diagonal)["body.final_norm.weight"].copy())
    changed = [not np.array_equal(a, b) for a, b in itertools.pairwise(diagonals)]
    assert changed == [False, False, True, False]

    resumed = TinyRun(one_device(), phase(optimizer=SOPHIA))
    resumed.state = jax.tree.map(lambda a, place: jax.device_put(a, place.sharding), saved, resumed.state)
    for number in (3, 4):
        resumed.step(arrays(number), 2)
    for (path, ours), (_, theirs) in zip(tree.leaves(resumed.state), tree.leaves(run.state), strict=True):
        assert np.asarray(tree.raw(ours)).tobytes() == np.asarray(tree.raw(theirs)).tobytes(), path


@pytest.mark.soak
def test_the_estimate_works_in_float16_with_frozen_leaves_and_unrolled_layers():
    model = dataclasses.replace(MODEL, scan_layers=False, gradient_checkpointing="none", initializer_range=0.1)
    own = phase(optimizer=SOPHIA, trainable=("mlp", "norm"))
    run = TinyRun(one_device(), own, parse_precision("p=f32,c=float16"), model)
    expected = first_estimate(run, arrays(0), 1)
    losses = [run.step(arrays(0))["train/loss"]]
    assert all("mlp" in path or "norm" in path for path in expected)
    assert_is_the_first_estimate(run, expected)
    losses += [run.step(arrays(number % 4))["train/loss"] for number in range(1, 13)]
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.slow
def test_frozen_leaves_beside_trained_ones_are_sharded():
    """A layer is gathered as a whole. jax refuses second derivatives of one call for leaves with and without tangents."""
    where, own = layout(), phase(optimizer=SOPHIA, trainable=("mlp",))
    abstract = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (own,)).abstract_state(own)
    with where.use():
        flag_sync = FlagSync.unset(where)
        after, _ = jax.eval_shape(
            make_train_step(own, where, F32, abstract), abstract, {}, batch(arrays(0), where), flag_sync
        )
    assert jax.tree.structure(after) == jax.tree.structure(abstract)


@dataclass(frozen=True)
class Counted(NextToken):
    """Counts how often it is traced."""

    traced: ClassVar[list[bool]] = []

    def terms(self, model: Any, batch: Any, slot: Any, *, key: jax.Array | None) -> Any:
        self.traced.append(True)
        return super().terms(model, batch, slot, key=key)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "times"), [(AdamConfig(), 1), (SOPHIA, 2)])
def test_only_optimizers_that_use_curvature_compile_it(optimizer, times):
    where, own = one_device(), phase(objective=Counted(), optimizer=optimizer)
    abstract = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (own,)).abstract_state(own)
    Counted.traced.clear()
    with where.use():
        flag_sync = FlagSync.unset(where)
        jax.eval_shape(make_train_step(own, where, F32, abstract), abstract, {}, batch(arrays(0), where), flag_sync)
    assert len(Counted.traced) == times
