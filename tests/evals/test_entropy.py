"""The entropy of predictions, against the logits in float64."""

import jax
import numpy as np
import pytest

from jaxlm.data.loader import eval_batches
from jaxlm.data.tokens import TokensConfig
from jaxlm.evals.base import EvalContext, ValidationSet
from jaxlm.evals.loss import EntropyEvalConfig
from jaxlm.models.base import Inputs
from jaxlm.objectives.next_token import score_batch
from tests.data.test_loader import layout_of
from tests.engine.helpers import F32, MODEL, VOCAB
from tests.evals.test_loss import built, windows


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, pytest.param(1, marks=pytest.mark.soak)])
def test_the_mean_entropy_of_each_source_is_that_of_its_logits(devices):
    layout = layout_of(data=devices)
    data = {"prose": windows(0, 9), "code": windows(1, 2)}
    spec = TokensConfig().batch_spec(MODEL.seq_len)

    def batches(name: str):
        return list(eval_batches(data[name], spec, batch_size=8, layout=layout, max_batches=None))

    sets = tuple(ValidationSet(name, (), lambda name=name: batches(name)) for name in data)
    with layout.use():
        model = jax.tree.map(lambda leaf: 5 * leaf, built())  # far from uniform
        found, nothing = (
            EntropyEvalConfig()
            .open(EvalContext(layout, F32, None, np.zeros(VOCAB), some, print, 8, score_batch))
            .run(model)
            for some in (sets, ())
        )
        sums = {name: np.zeros(2) for name in data}
        logits_of = jax.jit(lambda model, inputs: model.logits(model.hidden(inputs).final).array)
        for name, batch in [(source, batch) for source in data for batch in batches(source)]:
            inputs = Inputs(batch.tokens, batch.positions, batch.segment_ids)
            logits = np.asarray(logits_of(model, inputs), np.float64)
            logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            mask = np.asarray(batch.loss_mask.array)
            sums[name] += (-(np.exp(logp) * logp).sum(-1) * mask).sum(), mask.sum()
    assert nothing == {}
    total = sum(sums.values())
    expected = {"entropy": total[0] / total[1], **{f"{name}/entropy": s[0] / s[1] for name, s in sums.items()}}
    assert found == pytest.approx(expected, rel=1e-5)
    assert found["entropy"] < 0.95 * np.log(VOCAB)
