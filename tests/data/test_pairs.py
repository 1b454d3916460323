"""Preference pairs: published record layouts, masks, truncation, batches, resuming, and how they are shown."""

import dataclasses
import json
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.core.axes import BATCH, DATA, PAIR
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.values.batch_types import PairBatch
from jaxlm.data.batch_schedule import BatchSchedule, BatchStage
from jaxlm.data.config import DataConfig, check_mixture
from jaxlm.data.formats.completions import PairsFormat, SupervisedFormat
from jaxlm.data.formats.documents import TextFormat
from jaxlm.data.several_completions import PairsConfig
from jaxlm.data.tokens import TokensConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.data.helpers import CHATML, some_text
from tests.data.test_loader import layout_of

SHARED = Path(__file__).parents[3] / "shared" / "data"
RECORDS = [
    {"prompt": f"Q{n}: {some_text(n, 3)}", "chosen": f" yes {some_text(50 + n, 2 + n)}", "rejected": f" no {n}"}
    for n in range(9)
]


@pytest.fixture
def opened(open_with):
    """Opens pairs made of these records."""
    return open_with(PairsConfig, PairsFormat)


def halves(columns, row):
    """(tokens, whether each is a target) of both halves of a row."""
    for half in range(2):
        size = int(columns["segment_ids"][row, half].sum())
        is_target = [False, *(columns["loss_mask"][row, half, :size] > 0).tolist()]
        ids = [*columns["tokens"][row, half, :size], columns["targets"][row, half, size - 1]]
        num_tokens = size + is_target[-1]  # a truncated half ends with a token that is only a target
        yield ids[:num_tokens], is_target[:num_tokens]


def trained(tokenizer, ids, is_target, kind=True):
    """The text of the tokens that are targets, or of the others."""
    return tokenizer.decode([i for i, t in zip(ids, is_target, strict=True) if t is kind])


def test_the_chosen_half_equals_supervised_fine_tuning(opened, tmp_path):
    pairs = opened(RECORDS).train[""].read(np.arange(len(RECORDS)))
    config = TokensConfig(
        train_urls=[f"{tmp_path}/0.jsonl"],
        cache_dir=f"{tmp_path}/supervised",
        tokenizer=f"{tmp_path}/tokenizer",
        format=SupervisedFormat(output_field="chosen", pack=False),
    )
    sequences = config.open(config.corpus.load_tokenizer(lambda _: None), 64, lambda _: None).train[""]
    for name, column in sequences.read(np.arange(len(RECORDS))).items():
        np.testing.assert_array_equal(pairs[name][:, 0], column, err_msg=name)


def test_a_prompt_that_both_completions_repeat(opened, tokenizer):
    start = "\n\nHuman: hi there\n\nAssistant: hello\n\nHuman: bye\n\nAssistant:"
    records = [{"chosen": start + " I wish", "rejected": start + " I was"}]
    marked = opened(records, 128, prompt_field=None, prompt_ends_with="\n\nAssistant:").train[""]
    (chosen, is_target), (rejected, _) = halves(marked.read(np.arange(1)), 0)
    assert [trained(tokenizer, chosen, is_target, kind) for kind in (False, True)] == [start, " I wish"]
    assert tokenizer.decode(rejected) == start + " I was"
    at_space = opened(records, 128, prompt_field=None).train[""]
    assert trained(tokenizer, *next(halves(at_space.read(np.arange(1)), 0))) == " wish"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("\n\nHuman: hi\n\nAssistant: I don't", "\n\nHuman: hi\n\nAssistant: I'm sure", "\n\nHuman: hi\n\nAssistant:"),
        ("Question here?\nYes", "Question here?\nNo", "Question here?\n"),
        ("Say it: think", "Say it: thought", "Say it:"),
        ("2+2=4", "2+2=5", "2+2="),
        ("A b c", "A b c d", "A b"),
        ("Human: hi\n\nI do", "Human: hi\n\nI did not", "Human: hi\n\nI"),
    ],
)
def test_records_without_a_prompt_are_read_as_trl_reads_them(opened, tokenizer, chosen, rejected, prompt):
    """Without configuration. TRL ends the prompt where the texts differ; here, no token is cut."""
    lines: list[str] = []
    records = [{"chosen": chosen, "rejected": rejected, "score": 3}]
    data = opened(records, 128, lines.append)
    columns = data.train[""].read(np.arange(1))
    for name, column in opened(records, 128, prompt_field=None).train[""].read(np.arange(1)).items():
        np.testing.assert_array_equal(columns[name], column, err_msg=f"prompt_field: null, {name}")
    trl = os.path.commonprefix([chosen, rejected])  # noqa: RUF071 - by character, as in TRL
    assert trl.startswith(prompt)
    assert not re.search(r"\S\s", trl[len(prompt) :])
    for (ids, is_target), text in zip(halves(columns, 0), (chosen, rejected), strict=True):
        assert trained(tokenizer, ids, is_target) == text[len(prompt) :]
        assert tokenizer.decode(ids) == text
        if prompt.endswith(":"):
            assert ids[1:-1] == tokenizer.encode(text), "the tokens of the whole text, as TRL's"
    assert "train: read as text: chosen, rejected; in no record: prompt; not read: score" in lines
    first = next(iter(list(data.train[""].show(0, tokenizer))[1:]))
    assert prompt in first
    assert f"⟧{chosen[len(prompt) :]}" in first


def test_another_key_of_the_prompt_must_be_there(opened):
    with pytest.raises(ConfigError, match="no text and no list of messages under 'question'"):
        opened([{"chosen": "a b", "rejected": "a c"}], prompt_field="question")


USER, GOOD, BAD = (
    {"role": role, "content": content} for role, content in (("user", "hi"), ("assistant", "yes"), ("assistant", "no"))
)


@pytest.mark.parametrize(
    ("prompt", "before", "keys", "said"),
    [
        ({"prompt": [USER]}, [], {}, "read as messages: prompt, chosen, rejected"),
        ({"prompt": None}, [USER], {}, "read as messages: chosen, rejected; in no record: prompt"),
        ({}, [USER], {}, "read as messages: chosen, rejected; in no record: prompt"),
        ({}, [USER], {"prompt_field": None}, "read as messages: chosen, rejected"),
        ({"prompt": "hi"}, [], {}, "read as text: prompt; read as messages: chosen, rejected"),
        ({"prompt": "hi"}, [USER], {}, "read as text: prompt; read as messages: chosen, rejected"),
    ],
)
def test_conversations_are_rendered_by_the_chat_template(opened, tokenizer, prompt, before, keys, said):
    lines: list[str] = []
    record = {**prompt, "chosen": [*before, GOOD], "rejected": [*before, BAD]}
    examples = opened([record], 64, lines.append, chat_template=CHATML, **keys).train[""]
    for (ids, is_target), answer in zip(halves(examples.read(np.arange(1)), 0), ("yes", "no"), strict=True):
        assert tokenizer.decode(ids) == f"<|user|>hi<|end|><|assistant|>{answer}<|end|>"
        assert trained(tokenizer, ids, is_target) == f"{answer}<|end|>"
    assert f"train: {said}" in lines


def test_long_pairs_are_truncated_and_pairs_without_a_target_are_left_out(opened):
    lines: list[str] = []
    records = [*RECORDS, {"prompt": "word " * 200, "chosen": " a", "rejected": " b"}]
    examples = opened(records, 24, lines.append).train[""]
    columns = examples.read(np.arange(len(examples)))
    assert (columns["loss_mask"].sum(axis=-1) > 0).all()
    assert len(examples) < len(records)
    summary = next(line for line in lines if line.startswith("train: ") and "pairs of sequences" in line)
    left_out = len(records) - len(examples)
    assert f"{left_out} pairs left out: their prompt leaves no room for a token of a completion" in summary
    assert "longer pairs that were truncated: " in summary
    assert examples.padding == pytest.approx(1 - columns["segment_ids"].sum() / columns["segment_ids"].size)


@pytest.mark.parametrize("truncation", ["keep_end", "drop_overlength"])
def test_long_pairs_can_lose_their_beginnings_or_be_left_out(opened, tokenizer, tmp_path, truncation):
    lines: list[str] = []
    long = {"prompt": "word " * 200, "chosen": " a", "rejected": " b" * 300}
    records, room = [*RECORDS, long], 25
    examples = opened(records, room - 1, lines.append, truncation=truncation).train[""]
    whole = []
    for record in records:
        prompt, *completions = tokenizer.encode_batch([record[key] for key in ("prompt", "chosen", "rejected")])
        prompt = [tokenizer.bos_id, *prompt]
        whole.append(
            [([*prompt, *c, tokenizer.eos_id], [False] * len(prompt) + [True] * (len(c) + 1)) for c in completions]
        )
    num_long = sum(any(len(ids) > room for ids, _ in pair) for pair in whole)
    assert 1 < num_long < len(records)
    if truncation == "drop_overlength":
        expected = [pair for pair in whole if all(len(ids) <= room for ids, _ in pair)]
    else:
        expected = [[(ids[-room:], [False, *mask[-room:][1:]]) for ids, mask in pair] for pair in whole]
    columns = examples.read(np.arange(len(examples)))
    assert [list(halves(columns, row)) for row in range(len(examples))] == expected
    fate = "left out" if truncation == "drop_overlength" else "truncated at the beginning"
    assert any(f"; longer pairs that were {fate}: {num_long}" in line for line in lines if "train: " in line)
    places = {"cache_dir": f"{tmp_path}/cache0", "tokenizer": f"{tmp_path}/tokenizer"}
    base = PairsConfig(train_urls=[f"{tmp_path}/0.jsonl"], **places)
    changed = dataclasses.replace(base, format=PairsFormat(truncation=truncation))
    assert changed.identity() == base.identity() | {truncation: [""]}


def test_batches_are_equal_on_any_mesh_and_continue_after_a_restart(opened):
    data = opened(RECORDS, 32)
    schedule = BatchSchedule((BatchStage(0, 4, 2, 2),))

    def batches(layout):
        return data.batches(schedule, layout, start=0, first_step=0, seed=3)

    def arrays(batch: PairBatch):
        return {name: np.asarray(column.array) for name, column in vars(batch.pairs).items() if column is not None}

    def assert_equal(batch, expected):
        for name, column in arrays(batch).items():
            np.testing.assert_array_equal(column, expected[name], err_msg=name)

    one, two = batches(layout_of()), batches(layout_of(data=2))
    seen = [arrays(next(one)) for _ in range(6)]
    for expected in seen[:5]:
        assert_equal(next(two), expected)
    assert seen[0]["tokens"].shape == (2, 2, 2, 32)
    resumed = batches(layout_of())
    resumed.restore(two.state())
    assert_equal(next(resumed), seen[5])
    for stream in (one, two, resumed):
        stream.close()


def test_sequences_alternate_and_the_supervised_half_is_the_chosen(opened):
    data = opened(RECORDS, 32)
    layout = layout_of(data=2)
    batch = next(iter(data.validation[0].batches(batch_size=4, layout=layout, max_batches=None)))
    assert [axis.name for axis in batch.pairs.tokens.axes[:2]] == [BATCH, PAIR]
    whole = np.asarray(batch.pairs.tokens.array)
    np.testing.assert_array_equal(np.asarray(batch.sequences().tokens.array), whole.reshape(8, 32))
    np.testing.assert_array_equal(np.asarray(batch.supervised().tokens.array), whole[:, 0])
    sharding = jax.jit(lambda b: b.sequences().tokens.array)(batch).sharding
    assert sharding.spec[0] in (DATA, (DATA,)), "interleaving moves no row between devices"


def test_shown_with_both_halves(opened, tokenizer):
    lines = list(opened(RECORDS).train[""].show(2, tokenizer))
    assert lines[0].startswith("loss on ")
    assert lines[1].startswith("--- document 3 of 0.jsonl, chosen ---\n⟦")
    assert lines[1].endswith(RECORDS[2]["chosen"] + tokenizer.decode([tokenizer.eos_id], special=True))
    assert lines[2].startswith("--- document 3 of 0.jsonl, rejected ---\n⟦")


def test_the_kind_of_data_and_the_format_must_agree():
    with pytest.raises(
        ConfigError, match=r"data\.format\.type: text produces documents, but data\.type: pairs expects pairs"
    ):
        check_mixture(PairsConfig(train_urls=["x.jsonl"], format=TextFormat()))
    tokens = decode(DataConfig, ConfigSource({"train_urls": ["x.jsonl"], "format": {"type": "pairs"}}))
    with pytest.raises(
        ConfigError, match=r"data\.format\.type: pairs produces pairs, but data\.type: tokens expects documents"
    ):
        check_mixture(tokens)
    with pytest.raises(ConfigError, match=r"data\.format\.prompt_ends_with: x given without prompt_field: null"):
        check_fields(PairsFormat(prompt_ends_with="x"), "data.format")


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")
def test_published_pairs(tmp_path):
    path = SHARED / "hh_harmless_pairs_1200.jsonl"
    config = PairsConfig(
        train_urls=[str(path)],
        cache_dir=f"{tmp_path}/cache",
        tokenizer=str(SHARED / "gpt2_tokenizer"),
        format=PairsFormat(prompt_field=None, prompt_ends_with="\n\nAssistant:"),
    )
    config.check()
    tokenizer = config.corpus.load_tokenizer(lambda _: None)
    examples = config.open(tokenizer, 512, lambda _: None).train[""]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    columns = examples.read(np.arange(20))
    for row, record in enumerate(records[:20]):
        (chosen, is_target), _ = halves(columns, row)
        answer = trained(tokenizer, chosen, is_target)
        assert record["chosen"].endswith(answer) or len(chosen) == 513
        assert answer.startswith(" ")
