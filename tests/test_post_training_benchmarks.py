"""The benchmarks of fine-tuning: how they split real records, what both peers train on, and what they report."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]  # at the end, so they shadow nothing
post_training, gsm8k, work = map(importlib.import_module, ("post_training", "gsm8k_format", "post_training_rows"))


def dialogue(number: int, answer: str) -> str:
    return f"\n\nHuman: question {number // 2}?\n\nAssistant: Well.\n\nHuman: and {number}?\n\nAssistant: {answer}"


def test_folds_share_no_dialogue_and_hold_every_pair_out_once(tmp_path):
    records = [{"chosen": dialogue(n, "Yes, sure."), "rejected": dialogue(n, "Yes, no.")} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sizes = post_training.split_pairs(tmp_path / "pairs.jsonl", tmp_path, 3, seed=0)
    assert sum(sizes) == 60
    assert min(sizes) > 0
    seen = []
    for fold, size in enumerate(sizes):
        held_out, train = (
            [json.loads(line) for line in (tmp_path / f"{name}-{fold}.jsonl").read_text().splitlines()]
            for name in ("held_out", "train")
        )
        assert (len(held_out), len(train)) == (size, 60 - size)
        first = [{pair["prompt"].split("\n\nAssistant:")[0] for pair in part} for part in (held_out, train)]
        assert not first[0] & first[1]
        seen += held_out
    assert {pair["chosen"] for pair in seen} == {" Yes, sure."}
    assert len({pair["prompt"] for pair in seen}) == 60
    assert all(pair["prompt"].endswith("\n\nAssistant:") for pair in seen)


def test_a_pair_is_what_differs_after_the_end_of_a_long_prompt():
    before = "\n\nHuman: " + "x" * 900 + "\n\nAssistant:"
    pair = post_training.as_pair({"chosen": f"{before} One. ", "rejected": f"{before} Two."})
    assert pair == {"prompt": before[-200:], "chosen": " One.", "rejected": " Two."}
    assert post_training.as_pair({"chosen": f"{before} One.", "rejected": f"{before} "}) is None


def test_accuracies_of_folds_are_pooled_with_the_standard_error_of_a_fraction():
    share = post_training.pooled([0.5, 0.75], [100, 300])
    assert share == pytest.approx((50 + 225) / 400)
    found = post_training.fraction(0.6, 400)
    assert found["standard_error"] == pytest.approx((0.6 * 0.4 / 400) ** 0.5)
    assert found["standard_errors_above_half"] == pytest.approx(0.1 / (0.24 / 400) ** 0.5)


def test_questions_that_are_held_out_are_never_trained_on(tmp_path):
    solution = "She has 2 + {0} = <<2+{0}=3>>3 cards.\n#### {0}"
    records = [
        {"question": f"{n} cards?" + " more" * (40 * (n % 2)), "answer": solution.format(n)} for n in [*range(300), 4]
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    gsm8k.split(tmp_path / "questions.jsonl", tmp_path, seed=0)
    held_out, train, prompts = (
        [json.loads(line) for line in (tmp_path / f"gsm8k_{name}.jsonl").read_text().splitlines()]
        for name in ("held_out", "train", "prompts")
    )
    asked = {record["question"] for record in held_out}
    assert len(held_out) == gsm8k.HELD_OUT
    assert asked.isdisjoint(record["question"] for record in train)
    assert asked | {record["question"] for record in train} == {record["question"] for record in records}
    assert prompts == [record for record in train if len(record["question"]) <= gsm8k.LONGEST_QUESTION]
    assert 0 < len(prompts) < len(train)
    one = next(record for record in train if record["answer"] == "7")
    assert one["response"] == "She has 2 + 7 = 3 cards.\n#### 7"
    assert one["prompt"] == f"Question: {one['question']}\nAnswer:\n"


@pytest.mark.parametrize(
    ("text", "has_form"),
    [
        ("2 + 2 = 4.\n4 * 1,000 = 4000 in all.\n#### 4,000", True),
        ("x = 1\n#### -0.5", True),
        ("#### 4", False),
        ("2 + 2 is 4\n#### 4", False),
        ("2 + 2 = 4\nSo it is four.\n#### 4", False),
        ("2 + 2 = 4\n#### 4\n", False),
        ("2 + 2 = 4\n#### four", False),
        ("2 + 2 = 4", False),
        ("=" * 200 + ("=" * 40 + "\n") * 200, False),  # no match, and found without trying every '='
    ],
)
def test_the_form_is_lines_with_equations_and_a_number(text, has_form):
    assert (re.compile(gsm8k.FORM, re.DOTALL).fullmatch(text) is not None) == has_form


def answers(*rewards: float) -> list[dict]:
    return [{"place": f"line {n // 2}", "rewards": {"form": reward}} for n, reward in enumerate(rewards)]


def test_standard_errors_are_those_of_questions_and_changes_are_paired():
    of_questions = gsm8k.by_question(answers(1, 1, 0, 0, 1, 0), "form")
    assert of_questions == {"line 0": 1.0, "line 1": 0.0, "line 2": 0.5}
    found = gsm8k.mean(of_questions)
    assert found["mean"] == pytest.approx(0.5)
    assert found["standard_error"] == pytest.approx(np.std([1, 0, 0.5], ddof=1) / 3**0.5)
    found = gsm8k.change(answers(1, 1, 0, 0, 1, 0), answers(1, 1, 1, 0, 1, 1))
    assert found == pytest.approx({"mean": 1 / 3, "standard_error": np.std([0, 0.5, 0.5], ddof=1) / 3**0.5})


def test_both_halves_of_a_pair_have_the_same_prompt_and_steps_repeat():
    rows = work.rows(3)
    assert rows.shape == (work.SEQUENCES, work.MODEL["seq_len"] + 1)
    np.testing.assert_array_equal(rows[::2, : work.PROMPT], rows[1::2, : work.PROMPT])
    assert (rows[::2, work.PROMPT :] != rows[1::2, work.PROMPT :]).any()
    np.testing.assert_array_equal(rows, work.rows(3 + work.DISTINCT))
    forward = work.flops_per_token("sft") / 3
    assert work.flops_per_token("dpo") == pytest.approx(4 * forward)
    assert work.flops_per_token("dpo-lora") == pytest.approx(work.flops_per_token("sft-lora") * 3 / 2)
    assert work.flops_per_token("grpo") == pytest.approx(5 * forward)


def test_prompts_of_grpo_are_words_of_which_each_is_a_token():
    prompts, tokenizer = work.prompts(), work.tokenizer()
    assert len(prompts) == work.DISTINCT * work.SEQUENCES // work.GROUP
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    assert {len(row) for row in ids} == {work.GRPO_PROMPT}
    assert work.MODEL["seq_len"] == work.GRPO_PROMPT + work.NEW_TOKENS
    expected = np.maximum(work.rows(1)[:: work.GROUP, : work.GRPO_PROMPT], 1)
    np.testing.assert_array_equal(ids[2:4], expected)
    assert work.even_share(completion_ids=[[2, 4, 1, 3], [6]], prompts=[]) == [0.5, 1.0]
