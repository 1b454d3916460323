"""What every format has in common: the sequences of a record, their masks, its keys, and the kinds of files that hold it."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.chat import ChatFormat, ShareGptFormat
from jaxlm.data.formats.completions import GroupsFormat, PairsFormat, PromptsFormat, SupervisedFormat, UnpairedFormat
from jaxlm.data.formats.documents import LabeledFormat, PretokenizedFormat, TextFormat
from tests.data.helpers import CHATML, find_files, small_tokenizer, write_records

BOS, EOS = "bos", "eos"
USER, ANSWER = {"role": "user", "content": "value"}, {"role": "assistant", "content": "42 self"}
WRONG = {"role": "assistant", "content": "x"}
ASKED, CHAT = "<|user|>value<|end|><|assistant|>", {"chat_template": CHATML}
# Name of the format -> it, a record, and its tokens: text, ids, BOS or EOS, each with whether it is trained.
ROWS = {
    "text": (TextFormat("text"), {"text": "value 42"}, [(BOS, True), ("value 42", True), (EOS, True)]),
    "pretokenized": (PretokenizedFormat(), {"input_ids": [7, 0, 9]}, [([7, 0, 9], True)]),
    "labeled": (
        LabeledFormat(),
        {"input_ids": [7, 8, 9], "labels": [5, -100, 0]},
        [([7, 8, 9], False), ([5], True), ([0], False), ([0], True)],
    ),
    "supervised": (
        SupervisedFormat(context_field="context", separate_with="=>"),
        {"prompt": "value", "context": "x", "response": " 42"},
        [(BOS, False), ("value\nx=>", False), (" 42", True), (EOS, True)],
    ),
    "supervised, with its prompt": (
        SupervisedFormat(mask_inputs=False),
        {"prompt": "value", "response": " 42"},
        [(BOS, True), ("value", True), (" 42", True), (EOS, True)],
    ),
    "supervised, messages": (
        SupervisedFormat(**CHAT),
        {"prompt": [USER], "response": [ANSWER]},
        [(ASKED, False), ("42 self<|end|>", True)],
    ),
    "pairs": (
        PairsFormat(),
        {"prompt": "value", "chosen": " 42", "rejected": ""},
        [(BOS, False), ("value", False), (" 42", True), (EOS, True), (BOS, False), ("value", False), (EOS, True)],
    ),
    "pairs, messages": (
        PairsFormat(**CHAT),
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
        [(ASKED, False), ("42 self<|end|>", True), (ASKED, False), ("x<|end|>", True)],
    ),
    "groups": (
        GroupsFormat(group_size=2),
        {"prompt": "value", "responses": [" 42", "x"], "rewards": [0.5, -1]},
        [
            *[(BOS, False), ("value", False), (" 42", True), (EOS, True)],
            *[(BOS, False), ("value", False), ("x", True), (EOS, True)],
        ],
    ),
    "groups, messages": (
        GroupsFormat(group_size=2, **CHAT),
        {"prompt": [USER], "responses": ["42 self", "x"], "rewards": [0.5, -1]},
        [(ASKED, False), ("42 self<|end|>", True), (ASKED, False), ("x<|end|>", True)],
    ),
    "unpaired": (
        UnpairedFormat(),
        {"prompt": "value", "completion": " 42", "label": True},
        [(BOS, False), ("value", False), (" 42", True), (EOS, True)],
    ),
    "unpaired, messages": (
        UnpairedFormat(**CHAT),
        {"prompt": [USER], "completion": [ANSWER], "label": False},
        [(ASKED, False), ("42 self<|end|>", True)],
    ),
    "prompts": (PromptsFormat(), {"prompt": "value"}, [(BOS, True), ("value", True)]),
    "prompts, messages": (PromptsFormat(**CHAT), {"prompt": [USER]}, [(ASKED, True)]),
    "chat": (
        ChatFormat(**CHAT),
        {"messages": [USER, ANSWER, USER, WRONG]},
        [(ASKED, False), ("42 self<|end|>", True), (ASKED, False), ("x<|end|>", True)],
    ),
    "chat, every turn": (
        ChatFormat(**CHAT, mask_user_turns=False),
        {"messages": [USER, ANSWER]},
        [(ASKED, True), ("42 self<|end|>", True)],
    ),
    "sharegpt": (
        ShareGptFormat(**CHAT),
        {"conversations": [{"from": "human", "value": "value"}, {"from": "gpt", "value": "42 self"}], "system": "x"},
        [(f"<|system|>x<|end|>{ASKED}", False), ("42 self<|end|>", True)],
    ),
}
NUMBERS = {"groups": [0.5, -1], "unpaired": [1], "unpaired, messages": [0], "groups, messages": [0.5, -1]}
KEEP_NO_MASK = ("text", "pretokenized", "prompts", "prompts, messages")


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer(300)


@pytest.fixture
def encoded(tokenizer, tmp_path):
    """The documents of some records."""

    def encode(record_format, records, suffix="jsonl"):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.{suffix}"
        if suffix == "jsonl":
            write_records(path, records)
        else:
            pq.write_table(pa.Table.from_pylist(records), path)
        encoder = record_format.encoder(tokenizer, bos=True, eos=True, key="data.format")
        (file,) = find_files([str(path)], "data.train_urls", record_format.key_of_text("text") or "text")
        return encoder.encode([raw.content for raw in encoder.read(file)])

    return encode


def assert_equal(one, other):
    for first, second in zip(one, other, strict=True):
        assert (first is None) == (second is None)
        np.testing.assert_array_equal(first, second)


def test_every_format_has_a_row_and_every_option_a_test():
    formats = FormatConfig.get_known_choices()
    assert {name.partition(",")[0] for name in ROWS} == set(formats)
    fields = {field.name for kind in formats.values() for field in dataclasses.fields(kind)}
    assert {name for name in fields if not name.endswith(("_field", "_key"))} == {
        *("chat_template", "mask_user_turns", "mask_inputs", "separate_with", "group_size"),  # here
        *("pack", "roles"),  # tests/data/test_chat_format.py
        "prompt_ends_with",  # tests/data/test_pairs.py
        "truncation",  # tests/data/test_packing.py, and of pairs in test_pairs.py
    }


@pytest.mark.parametrize("name", ROWS)
def test_a_record_becomes_its_segments(encoded, tokenizer, name):
    """Texts are tokenized by themselves, as at inference; no token of these lies on the boundary of rendered ones."""
    record_format, record, segments = ROWS[name]
    special = {BOS: [tokenizer.bos_id], EOS: [tokenizer.eos_id]}
    ids = [
        content if isinstance(content, list) else special.get(content) or tokenizer.encode(content)
        for content, _ in segments
    ]
    (document, *_) = encoded(record_format, [record] * 3)
    assert document.ids.tolist() == [token for part in ids for token in part]
    mask = [is_trained for part, (_, is_trained) in zip(ids, segments, strict=True) for _ in part]
    assert document.target_mask is None if name in KEEP_NO_MASK else document.target_mask.tolist() == mask
    assert document.numbers is None if name not in NUMBERS else document.numbers.tolist() == NUMBERS[name]


@pytest.mark.parametrize("name", ROWS)
def test_keys_can_be_renamed_and_tables_hold_the_same(encoded, name):
    record_format, record, _ = ROWS[name]
    (document,) = encoded(record_format, [record])
    assert_equal(encoded(record_format, [record], "parquet")[0], document)
    fields = [field.name for field in dataclasses.fields(record_format) if field.name.endswith(("_field", "_key"))]
    names = {field: f"{getattr(record_format, field)}_x" for field in fields if getattr(record_format, field) in record}
    renamed = {f"{key}_x": value for key, value in record.items()}
    assert len(names) == len(record)
    assert_equal(encoded(dataclasses.replace(record_format, **names), [renamed])[0], document)
    with pytest.raises(ConfigError, match=r"jsonl: line 1: "):
        encoded(record_format, [renamed])


LEFT_OUT = {
    "chat": {"messages": [USER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "value"}]},
    "supervised": {"prompt": "value", "context": "", "response": ""},
    "labeled": {"input_ids": [7, 8], "labels": [-100, -100]},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_record_without_a_target_is_left_out(encoded, name):
    record_format, record, _ = ROWS[name]
    assert [text is None for text in encoded(record_format, [record, LEFT_OUT[name], record])] == [False, True, False]
