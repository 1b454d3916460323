"""The preference evaluation against log-likelihoods computed from the model's logits, one pair at a time."""

import functools

import jax
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.axes import BATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import parse_precision
from jaxlm.data.batch import random_tokens
from jaxlm.data.several_completions import PairsConfig
from jaxlm.data.tokens import TokensConfig
from jaxlm.evals.base import EvalContext, ValidationSet
from jaxlm.evals.preference import PreferenceEvalConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.objectives.next_token import score_batch
from tests.data.test_loader import layout_of
from tests.tiers import one_of

VOCAB, SEQ_LEN, NUM_PAIRS = 31, 12, 6
MODEL = LlamaConfig(seq_len=SEQ_LEN, hidden_dim=16, intermediate_dim=24, num_layers=1, num_heads=2, num_kv_heads=1)


def built():
    return jax.jit(lambda: MODEL.build(vocab_axis(VOCAB), key=jax.random.key(0)))()


def context(layout, batches):
    sets, token_bytes = (ValidationSet("", (), batches),), np.zeros(VOCAB, np.int32)
    return EvalContext(layout, parse_precision("f32"), None, token_bytes, sets, print, SEQ_LEN, score_batch)


def columns_of_pairs():
    columns = random_tokens((8, 2, SEQ_LEN), VOCAB, seed=1)
    rng = np.random.default_rng(0)
    columns["loss_mask"] = (np.arange(SEQ_LEN) >= rng.integers(1, 9, (8, 2, 1))).astype(np.float32)
    return {name: np.where(np.arange(8)[:, None, None] < NUM_PAIRS, column, 0) for name, column in columns.items()}


@pytest.mark.slow
@pytest.mark.parametrize("devices", one_of([8, 1]))
def test_accuracy_and_margin_are_those_of_each_pair(devices):
    layout, columns = layout_of(data=devices), columns_of_pairs()
    spec = PairsConfig().batch_spec(SEQ_LEN)
    Batch = Axis(BATCH, 8)

    def batches():
        yield spec.assemble(lambda rows: {name: column[rows] for name, column in columns.items()}, (Batch,), layout)

    with layout.use():
        model = built()
        found = PreferenceEvalConfig().open(context(layout, batches)).run(model)
        batch = next(batches()).sequences()
        inputs = Inputs(batch.tokens, batch.positions, batch.segment_ids)
        logits = jax.jit(lambda model, inputs: model.logits(model.hidden(inputs).final).array)(model, inputs)
    logits = np.asarray(logits, np.float64)
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets, mask = np.asarray(batch.targets.array), np.asarray(batch.loss_mask.array)
    sums = (np.take_along_axis(logps, targets[..., None], -1)[..., 0] * mask).sum(-1).reshape(8, 2)[:NUM_PAIRS]
    expected = {
        "preference/accuracy": (sums[:, 0] > sums[:, 1]).mean(),
        "preference/margin": (sums[:, 0] - sums[:, 1]).mean(),
        "logps/chosen": sums[:, 0].mean(),
        "logps/rejected": sums[:, 1].mean(),
    }
    assert found == pytest.approx(expected, rel=1e-5)
    assert 0 < found["preference/accuracy"] < 1, "the test would not notice swapped halves"


@pytest.mark.slow
def test_other_data_is_refused_and_none_gives_no_metrics():
    layout, spec = layout_of(), TokensConfig().batch_spec(SEQ_LEN)
    columns = random_tokens((2, SEQ_LEN), VOCAB, seed=0)
    Batch = Axis(BATCH, 2)
    tokens = functools.partial(spec.assemble, lambda rows: {k: c[rows] for k, c in columns.items()}, (Batch,), layout)
    model = built()
    with layout.use():
        assert PreferenceEvalConfig().open(context(layout, lambda: iter(()))).run(model) == {}
        with pytest.raises(ConfigError, match="type preference needs pairs to validate on"):
            PreferenceEvalConfig().open(context(layout, lambda: iter([tokens()]))).run(model)
