"""Parameters with an update rule of their own, in the training step: the weights of the norms of a tiny model, whose gradient
is made up. The same run with them frozen is what everything else is compared with."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.guards import GRADIENT_NORM, SKIPPED, UPDATE_NORM
from jaxlm.core.parameters import Parameter, SignUpdate
from jaxlm.core.precision import parse_precision
from jaxlm.core.tracing import CustomVjp
from jaxlm.models.norms import RMSNorm
from jaxlm.optim.averaging import Ema
from jaxlm.optim.elementwise import AdamConfig
from tests.engine import helpers
from tests.engine.helpers import TinyRun, arrays, layout, one_device, phase
from tests.tiers import one_of

SIZE = 0.125
ADAM = AdamConfig(learning_rate=1e-2, warmup=0, max_grad_norm=0.1)
OTHERS = (r"^(?!.*norm).*$",)


@pytest.fixture
def gradient(monkeypatch) -> Callable[[Any], None]:
    """Gives the weights of norms a rule, and the gradient that the test sets, from each call of a norm."""
    usual = RMSNorm.__call__
    monkeypatch.setattr(RMSNorm, "parameters", lambda self: {"weight": Parameter(float32=True, rule=SignUpdate(SIZE))})
    monkeypatch.setattr(helpers, "_PROGRAMS", {})

    def gives(value: Any) -> None:
        @CustomVjp
        def probe(out, weight):
            return out

        probe.defvjp(
            lambda out, weight: (out, weight),
            lambda weight, d_out: (d_out, jnp.broadcast_to(jnp.asarray(value, weight.dtype), weight.shape)),
        )

        def call(self, x):
            out = usual(jax.lax.stop_gradient(self), x)
            return dataclasses.replace(out, array=probe(out.array, self.weight.array))

        monkeypatch.setattr(RMSNorm, "__call__", call)

    return gives


def weights(run: TinyRun) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Those of norms, and all others."""
    held = {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(run.state.model)}
    return {p: a for p, a in held.items() if "norm" in p}, {p: a for p, a in held.items() if "norm" not in p}


def signs(size: int) -> np.ndarray:
    return np.resize([1.0, -3.0, 0.0], size).astype(np.float32)


@pytest.mark.slow
def test_they_move_by_their_rule_and_nothing_else_sees_their_gradient(gradient):
    gradient(signs(helpers.MODEL.hidden_dim))
    averages = {"ema": Ema(0.5)}
    ruled = TinyRun(one_device(), phase(optimizer=ADAM, averages=averages))
    frozen = TinyRun(one_device(), phase(optimizer=ADAM, averages=averages, trainable=OTHERS))
    before, _ = weights(ruled)
    for seed in range(2):
        ours, theirs = ruled.step(arrays(seed)), frozen.step(arrays(seed))
        if seed == 0:  # later, the weights differ
            assert (ours[GRADIENT_NORM], ours[UPDATE_NORM]) == (theirs[GRADIENT_NORM], theirs[UPDATE_NORM])
            for path, array in weights(frozen)[1].items():
                np.testing.assert_array_equal(weights(ruled)[1][path], array, err_msg=path)
    after, _ = weights(ruled)
    step = SIZE * np.sign(signs(helpers.MODEL.hidden_dim))
    for path, array in before.items():
        np.testing.assert_array_equal(after[path], array - 2 * step, err_msg=path)
    average = dict(tree.leaves(ruled.state.slots["ema"].weights))
    for path, array in before.items():
        np.testing.assert_allclose(average[path].array, array - 1.25 * step, rtol=1e-6)
    shapes = [leaf.shape for leaf in jax.tree.leaves(frozen.state.opt_state)]
    assert [leaf.shape for leaf in jax.tree.leaves(ruled.state.opt_state)] == shapes


@pytest.mark.slow
def test_a_gradient_of_theirs_that_is_not_finite_skips_the_step(gradient):
    gradient(np.nan)
    run = TinyRun(one_device(), phase(optimizer=ADAM))
    before = weights(run)
    metrics = run.step(arrays(0))
    assert metrics[SKIPPED] == 1
    assert np.isfinite(metrics[GRADIENT_NORM])
    jax.tree.map(np.testing.assert_array_equal, weights(run), before)


@pytest.mark.slow
def test_a_skipped_step_does_not_move_them(gradient):
    gradient(1.0)
    run = TinyRun(one_device(), phase(optimizer=ADAM))
    before, _ = weights(run)
    columns = arrays(0)
    columns["loss_mask"] = columns["loss_mask"] * np.nan
    assert run.step(columns)[SKIPPED] == 1
    jax.tree.map(np.testing.assert_array_equal, weights(run)[0], before)


@pytest.mark.slow
@pytest.mark.parametrize(("mp", "num_microbatches"), one_of([("bf16", 4), ("f32", 4), ("p=f32,c=float16", 1)]))
def test_dtypes_loss_scaling_and_microbatches_do_not_change_the_rule(gradient, mp, num_microbatches):
    gradient(signs(helpers.MODEL.hidden_dim))
    run = TinyRun(one_device(), phase(optimizer=ADAM), parse_precision(mp))
    before, _ = weights(run)
    assert run.step(arrays(0), num_microbatches)[SKIPPED] == 0
    for path, array in weights(run)[0].items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, before[path] - SIZE * np.sign(signs(array.shape[-1])))


@pytest.mark.slow
def test_eight_devices_do_the_same(gradient):
    gradient(signs(helpers.MODEL.hidden_dim))
    runs = [TinyRun(where, phase(optimizer=ADAM)) for where in (one_device(), layout())]
    for run in runs:
        run.step(arrays(0))
    jax.tree.map(np.testing.assert_array_equal, *(weights(run)[0] for run in runs))
