"""Labels for tokens: what is read, and the objective that predicts them."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import LabeledBatch
from jaxlm.data.formats.documents import LabeledFormat, PretokenizedFormat
from jaxlm.data.labeled import LabeledConfig
from jaxlm.data.tokens import TokensConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.objectives.base import check_model
from jaxlm.objectives.custom import CustomTargets
from jaxlm.objectives.next_token import score_batch

RECORDS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 8, 9]},
    {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [9, 9, -100, -100, 0, 1]},
    {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, -100, 7]},
]


def test_labels_are_used_verbatim_at_their_own_tokens(open_with):
    (examples,) = open_with(LabeledConfig, LabeledFormat)(RECORDS, seq_len=4).train.values()
    rows = examples.read(np.arange(2))
    assert rows["tokens"].tolist() == [[5, 6, 7, 0], [1, 2, 3, 4]]
    assert (rows["targets"] * rows["loss_mask"]).tolist() == [[0, 8, 9, 0], [9, 9, 0, 0]]
    assert rows["loss_mask"].tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    assert rows["segment_ids"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert rows["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert len(examples) == 2, "the third has no label within four tokens"
    assert "longer ones that were cut: 2; left out, without labels before the cut: 1" in examples.summary


@pytest.mark.parametrize(("kind", "form"), [(LabeledConfig, LabeledFormat()), (TokensConfig, PretokenizedFormat())])
def test_token_ids_have_no_text_for_the_report_to_compress(kind, form):
    assert list(kind(validation_urls=["ids.jsonl"], format=form).corpus.validation_documents()) == []


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input_ids": [1, 2], "labels": [3]}, "2 token ids and 1 labels given"),
        ({"input_ids": [1, 2], "labels": [3, 300]}, "label .* 300 given, but the tokenizer has 300 tokens"),
        ({"input_ids": [1, 2], "labels": [3, -1]}, "label .* -1 given"),
        ({"input_ids": [1, 2], "labels": None}, "under 'labels' are null. Keys of the record: input_ids, labels"),
        ({"input_ids": 3, "labels": [1]}, r"line 1: expected token ids .*, got an array of int64 \(\)"),
        ({"input_ids": [1.5], "labels": [1]}, r"expected token ids \(a list of integers\), got an array of float64"),
        ({"input_ids": [1], "labels": [-100]}, "no record has a label other than -100"),
    ],
)
def test_records_without_a_meaning_are_refused(open_with, record, message):
    with pytest.raises(ConfigError, match=message):
        open_with(LabeledConfig, LabeledFormat)([record])


@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_loss_is_the_mean_over_labels(bidirectional):
    config = LlamaConfig(
        seq_len=4,
        hidden_dim=16,
        intermediate_dim=24,
        num_layers=1,
        num_heads=2,
        use_bidirectional_attention=bidirectional,
    )
    check_model(CustomTargets(), config)
    model = jax.jit(lambda: config.build(vocab_axis(12), key=jax.random.key(0)))()
    columns = {
        "tokens": [[5, 6, 7, 0], [1, 2, 3, 4]],
        "targets": [[0, 8, 9, 0], [9, 9, 0, 0]],
        "loss_mask": [[0.0, 1, 1, 0], [1, 1, 0, 0]],
        "segment_ids": [[1, 1, 1, 0], [1, 1, 1, 1]],
        "positions": [[0, 1, 2, 0], [0, 1, 2, 3]],
    }
    axes = (Axis("batch", 2), Axis("position", 4))
    batch = LabeledBatch(**{name: hax.named(jnp.asarray(column), axes) for name, column in columns.items()})

    @jax.jit
    def computed(model, batch):
        inputs = Inputs(batch.tokens, batch.positions, batch.segment_ids)
        log_p = jax.nn.log_softmax(model.logits(model.hidden(inputs).final).array)
        terms, metrics, _ = CustomTargets().terms(model, batch, None, key=None)
        return terms, metrics, score_batch(model, batch).sums(), log_p

    terms, metrics, (nats, count), log_p = computed(model, batch)
    expected = -(log_p[0, 1, 8] + log_p[0, 2, 9] + log_p[1, 0, 9] + log_p[1, 1, 9]) / 4
    assert float(terms["loss"].mean()) == pytest.approx(float(expected), rel=1e-5)
    assert float(metrics["loss"].weight) == float(CustomTargets().weights(batch)["loss"]) == 4
    assert float(nats / count) == pytest.approx(float(expected), rel=1e-5)
