"""What a dry run plans with before a tokenizer is loaded, and what it says that a start would end with."""

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.preview import MaskPreview
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session import dry_run as dry_runs
from jaxlm.session.dry_run import _agreed_checks, _answers, _caveats, _checks, _previews, assumed_vocabulary
from jaxlm.train import train
from tests.answers import LLAMA, write_tokenizer
from tests.session.test_mesh_plan import MODEL

CHECKPOINT = Path(__file__).parents[1] / "vectors" / "earlier_run"
NOWHERE = "/nowhere/tokenizer.json"


def configured(**sections: Any) -> RunConfig:
    return decode_run(ConfigSource({"model": {**MODEL, "num_kv_heads": 4}, **sections}), None)


@pytest.fixture
def folder(tmp_path):
    """A folder with config.json, whose embedding has more rows than there are tokens."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 384, **LLAMA}))
    return str(tmp_path)


def test_the_vocabulary_is_what_the_configuration_and_its_files_say(folder):
    saved = json.loads((CHECKPOINT / "step-6" / "run" / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"data": {"tokenizer": folder}}, 320, f"tokens of {folder}"),
        ({"data": {"tokenizer": folder, "vocab_size": 320}}, 320, "data.vocab_size"),
        ({"data": {"tokenizer": folder}, "initialize_from_hf": True}, 320, f"tokens of {folder}"),
        ({"data": {"tokenizer": NOWHERE}, "initialize_from_hf": folder}, 384, f"rows of the embedding in {folder}"),
        (
            {"data": {"tokenizer": NOWHERE}, "trainer": {"initialize_from": str(CHECKPOINT)}},
            max(saved.values()) + 1,
            f"tokens of {CHECKPOINT}/step-6",
        ),
        ({"data": {"tokenizer": folder, "added_tokens": ["<a>"]}}, 321, f"tokens of {folder} and data.added_tokens"),
        ({}, 8192, "of a tokenizer that is trained without data.vocab_size"),
        ({"data": {"tokenizer": {"type": "bpe"}, "vocab_size": 300}}, 300, "data.vocab_size"),
        ({"data": {"tokenizer": NOWHERE}}, 50_257, "GPT-2's, assumed because data.vocab_size is not set"),
        ({"phases": [{"name": "a", "data": {"tokenizer": folder}}]}, 320, f"tokens of {folder}"),
    ]
    for sections, size, source in cases:
        assert assumed_vocabulary(configured(**sections)) == (size, f"{size:,} ({source})")


def refused(**sections: Any) -> dict[str, str]:
    plan = make_plan(configured(**sections), "x", 64)
    rows = dict(_answers([*_checks(plan), *_agreed_checks(plan)]))
    return {name: answer.removeprefix("a start would end with: ") for name, answer in rows.items()}


def test_a_dry_run_lists_errors_that_would_end_a_start(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    data = {"train_urls": ["text.txt"], "tokenizer": folder}
    assert refused(data=data) == {}
    wrong = refused(
        data={**data, "train_urls": ["*.text"], "tokenizer": NOWHERE},
        evals=[{"type": "harness", "tasks": []}],
        trainer={"initialize_from": "no-run"},
    )
    expected = {
        "tokenizer": f"data.tokenizer: '{NOWHERE}': no tokenizer.json found",
        "text of data": "data.train_urls[0]: '*.text' matches no file",
        "evaluation harness": "tasks: lm-evaluation-harness needs at least one task",
        "start": "trainer.initialize_from: no checkpoint at no-run",
    }
    assert wrong.keys() == expected.keys()
    assert all(wrong[name].startswith(text) for name, text in expected.items())
    assert refused(data={**data, "vocab_size": 300})["tokenizer"].startswith(
        "data.vocab_size: 300 given, but the tokenizer"
    )
    few = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(few))
    assert refused(data=data, initialize_from_hf=True)["weights"].startswith(
        f"{folder}: the embedding has 40 rows, but the tokenizer has 64 tokens. Set data.tokenizer"
    )
    (tmp_path / "config.json").write_text(json.dumps(few | {"vocab_size": 63}))
    assert "weights" in refused(data=data, initialize_from_hf=True)
    assert refused(data={**data, "added_tokens": ["<a>"]}, initialize_from_hf=True) == {}
    assert not (tmp_path / "cache").exists()


def test_a_configuration_that_names_no_text_ends_before_it_compiles(monkeypatch):
    monkeypatch.setattr(dry_runs, "compile_steps", mock.Mock(side_effect=KeyError("compiles")))
    with pytest.raises(ConfigError, match=r"^data.train_urls: empty. Give files, folders, globs or 'stdlib:train'"):
        train(dataclasses.replace(configured(), dry_run=True))


def test_chats_are_previewed_and_masks_that_are_empty_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "text.txt").write_text("text")

    def previewed(messages_, **data):
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages_}) + "\n")
        section = {"train_urls": ["a.jsonl"], "tokenizer": folder, "format": {"type": "chat"}, **data}
        drawn: list[MaskPreview] = []
        rows = dict(_answers(list(_previews(make_plan(configured(data=section), "x", 64), drawn))))
        return rows, drawn

    rows, drawn = previewed(messages)
    num_trained, num_tokens = len("That.") + 1, len("What?That.") + 4
    assert rows["trained tokens of data"].endswith("tokens in the first 1 records")
    assert 0 < drawn[0].num_trained <= num_trained
    assert drawn[0].num_tokens <= num_tokens
    for nothing in ({"train_urls": ["text.txt"], "format": {"type": "text"}}, {"train_urls": ["no.jsonl"]}):
        assert previewed(messages, **nothing) == ({}, []), "nothing to draw, or another row says what is wrong"
    assert previewed(messages, tokenizer=NOWHERE) == ({}, [])
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"prompt": "a", "chosen": "b", "rejected": "c", "score": 1}) + "\n"
    )
    rows, _ = previewed(messages, type="pairs", train_urls=["pairs.jsonl"], format={"type": "pairs"})
    assert rows == {"records of data": "read as text: prompt, chosen, rejected; not read: score"}
    messages[1]["speaker"] = "x"
    rows, _ = previewed(messages)
    assert rows["trained tokens of data"].endswith("in the first 1 records; not read: messages[].speaker")
    rows, drawn = previewed(messages[:1])
    assert not drawn
    assert rows["trained tokens of data"].startswith("a start would end with: data.format: the chat template (the tok")
    assert rows["trained tokens of data"].endswith("a.jsonl: line 1")


def test_what_was_not_checked_qualifies_the_last_line(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    data = {"train_urls": ["text.txt"], "tokenizer": folder}
    rows = refused(
        data=data, initialize_from_hf="someone/model", trainer={"checkpointer": {"base_path": "gs://b/runs"}}
    )
    assert rows == {
        "weights": "not checked: someone/model is not on this disk",
        "start": "not checked: the checkpoints at gs://b/runs, which a start may download",
    }
    assert _caveats(list(rows.items())) == ". Not everything was checked: see weights, start in the table"
    assert _caveats([("data", "a start would end with: x"), *rows.items()]) == (
        ", but a start would not get that far: see data in the table. Not everything was checked: see weights, start in the"
        " table"
    )
    assert _caveats([("optimizer", "adam")]) == ""
    monkeypatch.setattr(dry_runs, "_ANSWER_S", 0.0)
    never = threading.Event()
    (row,) = _answers([dry_runs._Question("text of data", never.wait, "the store")])
    never.set()
    assert row == ("text of data", "not checked: the store has not answered for 0 s")


@pytest.mark.slow
def test_a_busy_processor_is_not_a_disk_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(dry_runs, "_ANSWER_S", 0.3)

    def computes() -> str:
        until = time.process_time() + 1.5
        while time.process_time() < until:
            pass
        return "the answer"

    assert list(_answers([dry_runs._Question("text of data", computes, "the disk")])) == [
        ("text of data", "the answer")
    ]
