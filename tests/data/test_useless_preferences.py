"""Preferences and rewards from which little or nothing can be learned: one message each, with the place of a record."""

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxlm.commands.prepare import prepare
from jaxlm.core.errors import ConfigError
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.data.examples import check_signals
from jaxlm.data.formats.completions import GroupsFormat, PairsFormat, UnpairedFormat
from jaxlm.data.several_completions import GroupsConfig, PairsConfig, UnpairedConfig
from jaxlm.observe.console import Console
from jaxlm.plan.batches import BatchPlan
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import plan_phases
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.phase import open_data
from tests.data.helpers import CHATML, some_text

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


@pytest.mark.parametrize(
    ("kind", "record", "message"),
    [
        (
            "pairs",
            {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [USER, {"role": "system", "content": "no"}]},
            r"line 2: a completion has no message with the role 'assistant': .* have the roles system\. Remove the record",
        ),
        (
            "pairs",
            {"prompt": "hello", "chosen": [{"role": "user", "content": "bye"}], "rejected": [ASSISTANT]},
            r"line 2: two prompts: 'hello' is not in the messages beside it, which begin with 'bye'",
        ),
        (
            "unpaired",
            {"prompt": [USER], "completion": [{"role": "gpt", "content": "yes"}], "label": True},
            r"line 2: a completion has no message with the role 'assistant': .* the roles gpt\. .*rename the roles",
        ),
    ],
)
def test_a_conversation_without_an_answer_is_refused(open_with, kind, record, message):
    sound = {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "no"}]}
    if kind == "unpaired":
        sound = {"prompt": [USER], "completion": [ASSISTANT], "label": False}
    with pytest.raises(ConfigError, match=message):
        open_with(*KINDS[kind])([sound, record], chat_template=CHATML)
