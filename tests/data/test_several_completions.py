"""What several completions of a prompt have in common, groups and unpaired ones; pairs alone are in test_pairs.py.

Records from which little or nothing can be learned give one message each, with the place of a record.
"""

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxlm.commands.prepare import prepare
from jaxlm.core.errors import ConfigError
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.data.config import DataConfig
from jaxlm.data.examples import check_signals
from jaxlm.data.formats.completions import GroupsFormat, PairsFormat, UnpairedFormat
from jaxlm.data.formats.documents import TextFormat
from jaxlm.data.several_completions import GroupsConfig, PairsConfig, UnpairedConfig, _next_with_another
from jaxlm.observe.console import Console
from jaxlm.plan.batches import BatchPlan
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import plan_phases
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.phase import open_data
from tests.data.helpers import CHATML, some_text
from tests.data.test_loader import layout_of

PAIR = {"prompt": "Q: why?", "chosen": " because so", "rejected": " because not"}
EQUAL = {"prompt": "Q: what?", "chosen": f" {some_text(3, 9)}", "rejected": f" {some_text(3, 9)}"}
GROUP = {"prompt": "Q", "responses": [" a", " b", " c"], "rewards": [0, 1, 0]}
LONG = "word " * 200
USER, ASSISTANT = ({"role": role, "content": "hello"} for role in ("user", "assistant"))
KINDS = {
    "pairs": (PairsConfig, PairsFormat),
    "groups": (GroupsConfig, lambda **keys: GroupsFormat(**{"group_size": 3} | keys)),
    "unpaired": (UnpairedConfig, UnpairedFormat),
}
UNPAIRED = [
    {"prompt": f"Q{n}: {some_text(n, 2 + n)}", "completion": f" {some_text(50 + n, 1 + n % 3)}", "label": n % 2 == 0}
    for n in range(5)
]
GROUPS = [
    {
        "prompt": f"Q{n}: {some_text(n, 3)}",
        "responses": [f" a{k} {some_text(50 + n, 1 + k + n % 3)}" for k in range(3)],
        "rewards": [n, n + 0.25, -1],
    }
    for n in range(5)
]


# --- groups and unpaired completions


def test_each_response_follows_the_prompt_and_has_its_reward(open_with, tokenizer):
    examples = open_with(*KINDS["groups"])(GROUPS).train[""]
    columns = examples.read(np.arange(len(GROUPS)))
    assert columns["rewards"].dtype == np.float32
    for row, record in enumerate(GROUPS):
        assert columns["rewards"][row].tolist() == record["rewards"]
        for number, response in enumerate(record["responses"]):
            prompt, answer = tokenizer.encode_batch([record["prompt"], response])
            whole = [tokenizer.bos_id, *prompt, *answer, tokenizer.eos_id]
            size = len(whole) - 1
            assert columns["tokens"][row, number, :size].tolist() == whole[:-1]
            assert columns["targets"][row, number, :size].tolist() == whole[1:]
            assert columns["loss_mask"][row, number, :size].tolist() == [0] * len(prompt) + [1] * (len(answer) + 1)
            assert not columns["segment_ids"][row, number, size + 1 :].any()


def test_groups_without_room_for_a_response_are_left_out_with_their_rewards(open_with):
    lines: list[str] = []
    long = {"prompt": "word " * 200, "responses": [" a", " b", " c"], "rewards": [7, 8, 9]}
    examples = open_with(*KINDS["groups"])([GROUPS[0], long, GROUPS[1]], 24, lines.append).train[""]
    assert examples.read(np.arange(2))["rewards"].tolist() == [GROUPS[0]["rewards"], GROUPS[1]["rewards"]]
    assert any("1 groups left out: their prompt leaves no room for a token of a completion" in line for line in lines)


def test_batches_keep_groups_together(open_with):
    layout = layout_of(data=2)
    batch = next(
        iter(
            open_with(*KINDS["groups"])(GROUPS, 32).validation[0].batches(batch_size=8, layout=layout, max_batches=None)
        )
    )
    assert [axis.name for axis in batch.responses.tokens.axes] == ["batch", "group", "position"]
    whole = np.asarray(batch.responses.tokens.array)
    np.testing.assert_array_equal(np.asarray(batch.sequences().tokens.array), whole.reshape(24, 32))
    rewards = np.asarray(batch.rewards.array)
    assert rewards[:5].tolist() == [record["rewards"] for record in GROUPS]
    assert not rewards[5:].any()
    sharding = jax.jit(lambda b: b.sequences().tokens.array)(batch).sharding
    assert sharding.spec[0] in ("data", ("data",)), "flattening moves no row between devices"


def test_the_size_of_groups_is_the_same_in_all_sources():
    with pytest.raises(
        ConfigError, match=r"data\.format\.type: text produces documents, but data\.type: groups expects groups"
    ):
        GroupsConfig(train_urls=["x.jsonl"], format=TextFormat()).batch_spec(8)
    configs = {
        name: {"train_urls": ["x.jsonl"], "cache_dir": name, "format": {"type": "groups", "group_size": size}}
        for name, size in {"one": 2, "two": 4}.items()
    }
    data = decode(DataConfig, ConfigSource({"type": "groups", "configs": configs}))
    with pytest.raises(ConfigError, match=r"groups of 2 and 4 responses given, but all sources must have the same"):
        data.batch_spec(8)


@pytest.mark.parametrize("seq_len", [64, 12])
def test_a_completion_and_that_of_the_next_record_follow_each_prompt(open_with, tokenizer, seq_len):
    short = [record | {"prompt": record["prompt"][:3]} for record in UNPAIRED] if seq_len < 64 else UNPAIRED
    data = open_with(*KINDS["unpaired"])(short, seq_len)
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


# --- what cannot be learned from


def summary_of(lines: list[str]) -> str:
    (found,) = [line for line in lines if line.startswith("train: ") and "padding" in line]
    return found


@pytest.mark.parametrize(
    ("kind", "records", "said"),
    [
        (
            "pairs",
            [PAIR, EQUAL, EQUAL, PAIR],
            "2 pairs have two equal completions (the first: document 2 of 0.jsonl): they show no preference",
        ),
        (
            "pairs",
            [PAIR, {**PAIR, "prompt": LONG}, {**PAIR, "prompt": LONG}],
            "2 pairs left out: their prompt leaves no room for a token of a completion (the first: document 2 of 0.jsonl)",
        ),
        (
            "groups",
            [GROUP, {**GROUP, "rewards": [0.1, 0.1, 0.1]}],
            "1 groups have equal rewards (the first: document 2 of 0.jsonl): none of their responses is better",
        ),
        (
            "groups",
            [GROUP, {**GROUP, "prompt": LONG}],
            "1 groups left out: their prompt leaves no room for a token of a completion (the first: document 2 of 0.jsonl)",
        ),
        (
            "unpaired",
            [{"prompt": "Q", "completion": f" {n}", "label": False} for n in range(3)],
            "all of them have the label false (the first: document 1 of 0.jsonl): unless another source has the other,",
        ),
    ],
)
def test_the_summary_says_how_many_and_where_the_first_is(open_with, kind, records, said):
    lines: list[str] = []
    examples = open_with(*KINDS[kind])(records, 48, lines.append).train[""]
    assert said in summary_of(lines)
    assert len(examples) == len(records) - sum(record["prompt"] == LONG for record in records), "the others stay"


def test_sound_records_are_not_mentioned(open_with):
    labels = [{"prompt": "Q", "completion": f" {n}", "label": n == 1} for n in range(3)]
    for kind, records in (("pairs", [PAIR] * 3), ("groups", [GROUP] * 3), ("unpaired", labels)):
        lines: list[str] = []
        open_with(*KINDS[kind])(records, 64, lines.append)
        assert "first" not in summary_of(lines)


def test_completions_are_compared_as_far_as_the_sequences_reach(open_with):
    """Differences come early, late, in the length, and beyond the sequence."""
    start = some_text(5, 30)
    opened = open_with(*KINDS["pairs"])
    records = [
        {**PAIR, "chosen": start, "rejected": start + " end"},
        {**PAIR, "chosen": start + " one", "rejected": start + " two"},
        {**PAIR, "chosen": " x" + start, "rejected": " y" + start},
        {**PAIR, "chosen": start, "rejected": start},
    ]
    pairs = opened(records, 512).train[""]._examples
    assert pairs.with_equal_completions().tolist() == [3]
    cut = opened(records, 40).train[""]._examples
    columns = cut.read(np.arange(4))
    same = [bool((columns["targets"][row, 0] == columns["targets"][row, 1]).all()) for row in range(4)]
    assert same == [True, True, False, True]
    assert cut.with_equal_completions().tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("kind", "records", "message"),
    [
        (
            "pairs",
            [EQUAL, EQUAL],
            r"data: all 2 pairs have two equal completions \(the first: document 1 of 0\.jsonl\), so nothing is preferred",
        ),
        (
            "groups",
            [{**GROUP, "rewards": [1, 1, 1]}, {**GROUP, "rewards": [0, 0, 0]}],
            r"data: all 2 groups have equal rewards \(the first: document 1 of 0\.jsonl\), so no response is better",
        ),
        (
            "pairs",
            [{**PAIR, "prompt": LONG}],
            r"data: no document of the train text has a token to compute the loss on within model\.seq_len",
        ),
    ],
)
def test_data_without_any_signal_is_refused(open_with, kind, records, message):
    with pytest.raises(ConfigError, match=message):
        check_signals(open_with(*KINDS[kind])(records, 48).train)


@pytest.mark.parametrize(("objective", "is_refused"), [("next_token", False), ("reward", True)])
def test_only_an_objective_that_compares_refuses_equal_halves(tokenizer, tmp_path, objective, is_refused):
    """The next-token loss trains on the chosen halves as on any text."""
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(EQUAL)}\n" * 2)
    places = {"cache_dir": f"{tmp_path}/cache", "tokenizer": f"{tmp_path}/tokenizer"}
    sections = {
        "model": {"type": "llama", "seq_len": 48},
        "data": {"type": "pairs", "train_urls": [f"{tmp_path}/pairs.jsonl"], **places},
        "objective": {"type": objective},
        "trainer": {"train_batch_size": 1},
    }
    config = decode_run(ConfigSource(sections), None)
    (phase,), data = plan_phases(config)
    plan: Any = SimpleNamespace(data=data, batches=BatchPlan(BatchSchedule.of([BatchSize(0, 1)]), eval=1))
    for opens in (lambda: prepare(config, Console()), lambda: open_data(plan, tokenizer, phase, print)):
        with pytest.raises(ConfigError, match="all 2 pairs have two equal") if is_refused else contextlib.nullcontext():
            opens()


def test_one_source_with_a_signal_is_enough(open_with):
    useless = {**GROUP, "rewards": [2, 2, 2]}
    opened = open_with(*KINDS["groups"])
    sound = opened([GROUP]).train[""]
    mixed = opened([useless, GROUP]).train[""]
    assert (sound.degenerate_reason(), mixed.degenerate_reason()) == (None, None)
    equal = type(mixed)(mixed._examples)
    equal._are_all_equal = True
    check_signals({"one": equal, "two": sound})
    with pytest.raises(ConfigError, match=r"^data\.configs\.one: all 1 groups have equal rewards"):
        check_signals({"one": equal})


REFUSED = [
    (
        "pairs",
        {"prompt": "a", "chosen": "b"},
        {},
        "line 1: no text and no list of messages under 'rejected': the record has the keys",
    ),
    ("pairs", {"prompt": "a", "chosen": 3, "rejected": "c"}, {}, "under 'chosen': it is 3"),
    (
        "pairs",
        {"chosen": "abc", "rejected": "xyz"},
        {"prompt_field": None},
        "line 1: no prompt: .* begin alike with ''. Set",
    ),
    (
        "pairs",
        {"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"},
        {},
        "and a completion is a text. Make the completions lists",
    ),
    (
        "pairs",
        {"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": [{"role": "assistant"}]},
        {},
        "the tokenizer has no chat template. Set data.format.chat_template",
    ),
    (
        "pairs",
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [USER, {"role": "system", "content": "no"}]},
        {"chat_template": CHATML},
        r"line 1: a completion has no message with the role 'assistant': .* have the roles system\. Remove the record",
    ),
    (
        "pairs",
        {"prompt": "hello", "chosen": [{"role": "user", "content": "bye"}], "rejected": [ASSISTANT]},
        {"chat_template": CHATML},
        r"line 1: two prompts: 'hello' is not in the messages beside it, which begin with 'bye'",
    ),
    (
        "unpaired",
        {"prompt": [USER], "completion": [{"role": "gpt", "content": "yes"}], "label": True},
        {"chat_template": CHATML},
        r"line 1: a completion has no message with the role 'assistant': .* the roles gpt\. .*rename the roles",
    ),
    ("unpaired", {**UNPAIRED[0], "label": "true"}, {}, r"line 1: expected true or false under 'label', got 'true'"),
    ("unpaired", {**UNPAIRED[0], "label": None}, {}, r"expected true or false under 'label', got None"),
    ("unpaired", {**UNPAIRED[0], "completion": 3}, {}, r"no text and no list of messages under 'completion': it is 3"),
    ("unpaired", {**UNPAIRED[0], "prompt": [USER]}, {}, "'prompt' is a list of messages, and a completion is a text"),
    (
        "groups",
        {**GROUPS[0], "responses": ["a", "b"]},
        {},
        r"line 1: expected a list of 3 texts under 'responses' \(data\.format\.group_size\)",
    ),
    ("groups", {**GROUPS[0], "responses": "abc"}, {}, r"expected a list of 3 texts under 'responses'"),
    ("groups", {**GROUPS[0], "rewards": [1, 2, None]}, {}, r"expected a list of 3 numbers under 'rewards'"),
    ("groups", {**GROUPS[0], "rewards": [1, 2, True]}, {}, r"expected a list of 3 numbers under 'rewards'"),
    (
        "groups",
        {**GROUPS[0], "rewards": [1, float("nan"), 3]},
        {},
        r"line 1: rewards\[1\]: nan given, a finite number expected",
    ),
    (
        "groups",
        {**GROUPS[0], "rewards": [1, 2, -1e39]},
        {},
        r"line 1: rewards\[2\]: -1e\+39 given, a number from -3\.4e\+38 to 3\.4e\+38 \(float32\)",
    ),
    ("groups", {**GROUPS[0], "prompt": 3}, {}, r"no text and no list of messages under 'prompt': it is 3"),
]


@pytest.mark.parametrize(("kind", "record", "keys", "message"), REFUSED)
def test_records_that_are_refused(open_with, kind, record, keys, message):
    with pytest.raises(ConfigError, match=message):
        open_with(*KINDS[kind])([record], **keys)
