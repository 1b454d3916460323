"""Steps with different dtypes by path: optimizers keep them, and devices and microbatches agree."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, MICROBATCH
from jaxlm.core.precision import PrecisionConfig, PrecisionRuleConfig, parse_precision
from jaxlm.engine.accumulate import MicrobatchLoss, accumulate
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.step import make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.models.base import vocab_axis
from jaxlm.optim.averaging import Ema
from jaxlm.optim.base import OptimizerConfig
from tests.engine.helpers import F32, MODEL, VOCAB, TinyRun, arrays, batch, layout, one_device, phase

MIXED = parse_precision(
    PrecisionConfig(
        "p=f32,c=f32", [PrecisionRuleConfig(r"mlp\.", "bf16", "bf16"), PrecisionRuleConfig("attn", None, "bf16")]
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OptimizerConfig.get_known_choices()))
def test_a_step_keeps_the_dtype_of_every_array(name):
    """Otherwise the second step would not fit the first step's program, nor the checkpoint the run."""
    where, optimizer = one_device(), OptimizerConfig.get_known_choices()[name](learning_rate=1e-2, warmup=0)
    own = phase(optimizer=optimizer, averages={"ema": Ema(0.9)})
    state = StateBuilder(MODEL, vocab_axis(VOCAB), 0, MIXED, (own,)).abstract_state(own)
    with where.use():
        flags = FlagSync.unset(where)
        after, _ = jax.eval_shape(make_train_step(own, where, MIXED, state), state, {}, batch(arrays(0), where), flags)
    dtypes = {path: tree.raw(leaf).dtype.name for path, leaf in tree.leaves(state)}
    assert {path: tree.raw(leaf).dtype.name for path, leaf in tree.leaves(after)} == dtypes
    stored = {path: dtype for path, dtype in dtypes.items() if path.startswith("model.")}
    assert {dtype for path, dtype in stored.items() if "mlp." in path} == {"bfloat16"}
    assert {dtype for path, dtype in stored.items() if "mlp." not in path} == {"float32"}
    # Means, moments and averages are sums over steps.
    assert "bfloat16" not in {dtype for path, dtype in dtypes.items() if path not in stored}


@pytest.mark.slow
def test_the_gradient_norm_does_not_depend_on_the_number_of_microbatches():
    """In bfloat16, equal terms stop growing at 256 of them: of 2,048, an eighth was left."""
    row = {name: column[15:] for name, column in arrays(0).items()}
    repeated = lambda times: {name: column.repeat(times, 0) for name, column in row.items()}  # noqa: E731
    narrow = parse_precision("bf16")
    norms = [
        TinyRun(one_device(), precision=precision).step(repeated(times), times)["grad/norm/total"]
        for precision, times in ((F32, 1), (narrow, 1), (narrow, 512), (narrow, 2048))
    ]
    np.testing.assert_allclose(norms[1:], norms[0], rtol=2e-3)
    np.testing.assert_allclose(norms[2:], norms[1], rtol=1e-6)  # the shares of a power of 2 are exact


def test_gradients_in_bfloat16_are_summed_in_float32():
    # In bfloat16, 256 + 1 is 256.
    Embed, num_microbatches, where = Axis("embed", 1), 300, one_device()
    batch = hax.zeros((Axis(MICROBATCH, num_microbatches), Axis(BATCH, 1)))
    nothing = jnp.zeros(())
    loss = MicrobatchLoss(
        lambda slot, part: part, lambda w, *_: (hax.sum(w).scalar().astype(float), (nothing, {}, None))
    )
    with where.use():
        sums = accumulate(loss, hax.zeros(Embed, jnp.bfloat16), hax.zeros(Embed), batch, None, where)
    assert sums.gradient.array.tolist() == [num_microbatches]


@pytest.mark.soak
def test_eight_devices_and_microbatches_train_like_one_device():
    alone, sharded = TinyRun(one_device(), precision=MIXED), TinyRun(layout(), precision=MIXED)
    for number in range(3):
        expected, found = alone.step(arrays(number)), sharded.step(arrays(number), 2)
        np.testing.assert_allclose(found["train/loss"], expected["train/loss"], rtol=2e-3)


@pytest.mark.slow
def test_a_float16_rule_starts_loss_scaling():
    half = parse_precision(PrecisionConfig("f32", [PrecisionRuleConfig(r"mlp\.", compute="f16")]))
    metrics = TinyRun(one_device(), precision=half).step(arrays(0))
    assert metrics["train/loss_scale"] == 2.0**15
    plain = TinyRun(one_device()).step(arrays(0))
    assert metrics["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-3)
    assert metrics["grad/norm/total"] == pytest.approx(plain["grad/norm/total"], rel=1e-2)
