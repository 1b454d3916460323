"""Unpaired preferences: completions with labels, each beside the completion of the next record."""

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.completions import UnpairedFormat
from jaxlm.data.several_completions import UnpairedConfig, _next_with_another
from tests.data.helpers import some_text
from tests.data.test_loader import layout_of

RECORDS = [
    {"prompt": f"Q{n}: {some_text(n, 2 + n)}", "completion": f" {some_text(50 + n, 1 + n % 3)}", "label": n % 2 == 0}
    for n in range(5)
]


@pytest.fixture
def opened(open_with):
    """Opens completions made of these records."""
    return open_with(UnpairedConfig, UnpairedFormat)


@pytest.mark.parametrize("seq_len", [64, 12])
def test_a_completion_and_that_of_the_next_record_follow_each_prompt(opened, tokenizer, seq_len):
    short = [record | {"prompt": record["prompt"][:3]} for record in RECORDS] if seq_len < 64 else RECORDS
    data = opened(short, seq_len)
    columns = data.train[""].read(np.arange(5))
    assert columns["labels"].tolist() == [1, 0, 1, 0, 1]
    ids = [tokenizer.encode_batch([record["prompt"], record["completion"]]) for record in short]
    for row in range(5):
        for prefix, other in (("", row), ("mismatched_", (row + 1) % 5)):
            prompt, completion = [tokenizer.bos_id, *ids[row][0]], [*ids[other][1], tokenizer.eos_id]
            whole = [*prompt, *completion][: seq_len + 1]
            size = min(len(whole), seq_len)
            found = {name: columns[prefix + name][row] for name in ("tokens", "targets", "loss_mask", "segment_ids")}
            assert found["tokens"][:size].tolist() == whole[:size]
            assert found["targets"][: len(whole) - 1].tolist() == whole[1:]
            assert np.flatnonzero(found["loss_mask"]).tolist() == list(range(len(prompt) - 1, len(whole) - 1))
            assert found["segment_ids"].tolist() == [1] * size + [0] * (seq_len - size)
    batch = next(iter(data.validation[0].batches(batch_size=8, layout=layout_of(data=2), max_batches=None)))
    np.testing.assert_array_equal(np.asarray(batch.mismatched.tokens.array)[:5], columns["mismatched_tokens"])
    np.testing.assert_array_equal(np.asarray(batch.completions.tokens.array)[:5], columns["tokens"])
    assert not np.asarray(batch.completions.loss_mask.array)[5:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "true"}, r"line 1: expected true or false under 'label', got 'true'"),
        ({"label": None}, r"expected true or false under 'label', got None"),
        ({"completion": 3}, r"no text and no list of messages under 'completion': it is 3"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, "'prompt' is a list of messages, and a completion is a text"),
    ],
)
def test_records_that_are_refused(opened, change, message):
    with pytest.raises(ConfigError, match=message):
        opened([{**RECORDS[0], **change}])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([1, 2, 3], [1, 2, 0]),
        ([1, 1, 2, 2, 2, 3, 1], [2, 2, 5, 5, 5, 6, 2]),  # the last one's run goes on at the beginning
        ([4, 4, 4], [1, 2, 0]),
        ([4], [0]),
    ],
)
def test_mismatched_completions_are_of_another_prompt(keys, expected):
    assert _next_with_another(np.array(keys, np.uint64)).tolist() == expected
