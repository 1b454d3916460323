"""Checks and warnings at the start of a resumed run."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from jaxlm.core import hashing
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.templates import CHATML
from jaxlm.data.tokenizer.train_bpe import train_bpe
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor, seal
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session import resume_checks
from jaxlm.session.resume_checks import (
    SavedRun,
    changed_stages,
    check_cursor,
    check_same_data,
    check_same_tokenizer,
    load_saved_run,
)
from tests.data.helpers import some_text, write_records

SIZES = {"seq_len": 16, "hidden_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "intermediate_dim": 32}
STAGES = [[0, {"a": 1, "b": 0}], [50, {"a": 0, "b": 1}]]


def warnings_of(batch: Any, weights: Any, examples: int, sections: Any = None, **position: Any) -> list[str]:
    """A cursor at step 30 of a run that has read the given number of sequences."""
    sections = sections or {"data": {"configs": {"a": {"train_urls": ["a"]}, "b": {"train_urls": ["b"]}}}}
    trainer = {"train_batch_size": batch, "num_train_steps": 100}
    tree = {"model": SIZES, **sections, "data": {**sections["data"], "train_weights": weights}, "trainer": trainer}
    plan = make_plan(decode_run(ConfigSource(tree), None), "x", 64)
    cursor = Cursor(step=30, phase=0, phase_name="train", entering=False, temporary=True)
    return changed_stages(cursor, {"examples": examples, "step": 30, **position}, plan.phases[0], plan)


@pytest.mark.parametrize(
    ("batch", "weights", "examples", "warns"),
    [
        (16, STAGES, 480, False),
        (32, STAGES, 480, True),
        ([{"start": 0, "value": 16}, {"start": 30, "value": 32}], STAGES, 480, False),  # as the warning advises
        (32, {"a": 1, "b": 1}, 480, False),
    ],
)
def test_other_batch_sizes_move_the_stages_of_weights(batch, weights, examples, warns):
    lines = warnings_of(batch, weights, examples)
    assert len(lines) == warns
    for line in lines:
        assert "480 sequences" in line
        assert "960" in line
        assert "[{start: 0, value: 16}, {start: 30, value: 32}]" in line


def test_skipped_data_does_not_move_the_stages_of_weights():
    assert warnings_of(16, STAGES, 640, skipped=160) == []
    assert len(warnings_of(16, STAGES, 640)) == 1


def test_processes_with_other_data_do_not_train_together(tmp_path, monkeypatch):
    """Each machine reads its own copy of the data; everything that determines the tokens is compared."""
    (tmp_path / "a.txt").write_text("some text")
    tree = {"model": SIZES, "data": {"train_urls": [str(tmp_path)], "cache_dir": "nowhere"}}
    plan, told = make_plan(decode_run(ConfigSource(tree), None), "x", 64), []
    monkeypatch.setattr(hashing, "differences_between_processes", lambda known, _: told.append(known) or [])
    hashing.check_same_files()  # what other tests have read
    told.clear()
    for fingerprint, text in (("t", "some text"), ("t", "some more"), ("u", "some text")):
        (tmp_path / "a.txt").write_text(text)
        check_same_data(plan, fingerprint)
    first, *others = told
    assert [{name for name in first if first[name] != other[name]} for other in others] == [
        {"data of phase 'train'"},
        {"data.tokenizer"},
    ]


@pytest.mark.parametrize(
    ("key", "value", "is_same"),
    [("expert_parts", 2, True), ("scan_layers", False, True), ("num_experts_per_token", 1, False)],
)
def test_only_what_computes_a_model_otherwise_may_change(key, value, is_same, tmp_path, monkeypatch):
    """Also keys that only some families have."""
    places = {"trainer": {"log_dir": str(tmp_path / "logs")}}
    before, now = (
        decode_run(ConfigSource({"model": {"type": "mixtral", **SIZES, **keys}, **places}), None)
        for keys in ({}, {key: value})
    )
    monkeypatch.setattr(resume_checks, "load_saved_run", lambda plan: resume_checks.SavedRun("s", before))
    if is_same:
        assert resume_checks.check_same_run(make_plan(now, "x", 64)).config == before
        return
    with pytest.raises(ConfigError, match=rf"another model[^:]*:\n  model\.{key}: 2 -> {value}\n"):
        resume_checks.check_same_run(make_plan(now, "x", 64))


@pytest.mark.parametrize("vanishes", [True, False])
def test_a_checkpoint_that_another_start_replaces_while_it_is_read(vanishes, tmp_path, monkeypatch):
    """The other start trains on, and deletes the checkpoint that this one reads. The lock refuses this start later."""
    tokenizer = train_bpe([some_text(seed) for seed in range(20)], 300)
    for name in ("step-1", "step-2"):
        (tmp_path / name / "run" / "tokenizer").mkdir(parents=True)
        for file, content in tokenizer.files(max_length=24).items():
            (tmp_path / name / "run" / "tokenizer" / file).write_bytes(content)
        (tmp_path / name / "run" / "config.yaml").write_text("trainer: {seed: 7}\n")
        seal(tmp_path / name)
    read_tokenizer = resume_checks.load_tokenizer

    def delete_and_read(path, **options):
        if vanishes:
            shutil.rmtree(tmp_path / "step-2", ignore_errors=True)
        elif "step-2" in path:
            raise ConfigError("unreadable")
        return read_tokenizer(path, **options)

    monkeypatch.setattr(resume_checks, "load_tokenizer", delete_and_read)
    plan: Any = SimpleNamespace(checkpoints=LocalFolder(tmp_path))
    if not vanishes:
        with pytest.raises(ConfigError, match="unreadable"):
            load_saved_run(plan)
        return
    saved = load_saved_run(plan)
    assert saved is not None
    assert (saved.source, saved.config.trainer.seed) == (f"{tmp_path}/step-1/run/config.yaml", 7)


@pytest.mark.parametrize(("answer", "is_text"), [("b", True), ([{"role": "assistant", "content": "b"}], False)])
@pytest.mark.parametrize("keeps", [(), ("chat_template",), ("chat_template", "conversations")])
def test_runs_with_messages_rendered_otherwise_do_not_continue(answer, is_text, keeps, tmp_path):
    write_records(tmp_path / "a.jsonl", [{"prompt": "a", "response": answer}] * 4)
    tokenizer = train_bpe([some_text(seed) for seed in range(20)], 300).with_chat_template(CHATML, {})
    places = {"train_urls": [f"{tmp_path}/a.jsonl"], "cache_dir": f"{tmp_path}/cache", "tokenizer": f"{tmp_path}/t"}
    tree = {"model": SIZES, "data": {**places, "format": {"type": "supervised"}}, "trainer": {"num_train_steps": 4}}
    plan = make_plan(decode_run(ConfigSource(tree), None), "x", 64)
    (phase,) = now = resume_checks.rendering(plan, tokenizer)
    before = {phase: {"": {key: now[phase][""][key] for key in keeps}}} if keeps else {}
    saved = SavedRun("checkpoint", plan.config, {phase: {}}, tokenizer=tokenizer.fingerprint, rendering=before)
    if is_text or before == now:
        assert check_same_tokenizer(plan, saved, tokenizer) == saved
    else:
        with pytest.raises(ConfigError, match=r"conversations: None -> 3\n(?s:.*)allow_changes '\[tokenizer\]'"):
            check_same_tokenizer(plan, saved, tokenizer)


@pytest.mark.parametrize(
    ("step", "phase", "remedy"),
    [(30, "train", "Increase num_train_steps"), (5, "other", "Give phases the one of the checkpoint in its place")],
)
def test_a_checkpoint_without_a_place_says_what_to_change(step, phase, remedy):
    trainer = {"train_batch_size": 8, "num_train_steps": 20}
    plan = make_plan(decode_run(ConfigSource({"model": SIZES, "trainer": trainer}), None), "x", 64)
    cursor = Cursor(step=step, phase=0, phase_name=phase, entering=False, temporary=False)
    with pytest.raises(ConfigError, match=rf"\. {remedy}, or set another trainer\.id$"):
        check_cursor(cursor, plan)
