"""A bundle of CORE from the files of llm-foundry: its settings are those of nanochat's bundle."""

import json
import re
from pathlib import Path

import pytest

from jaxlm.commands import prepare
from jaxlm.core.errors import ConfigError
from jaxlm.systems.nanochat.core_bundle import _BLOBS, CORE_TASKS, _blob, build_bundle, read_bundle
from tests.systems.nanochat.core_bundles import random_questions

TASKS = json.loads((Path(__file__).parents[2] / "vectors" / "core_settings.json").read_text())["tasks"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Random questions in files with the published names."""
    root = tmp_path_factory.mktemp("clone")
    for task in TASKS:
        path = root / "scripts" / "eval" / "local_data" / task["dataset_uri"]
        path.parent.mkdir(parents=True, exist_ok=True)
        name = task["label"].removesuffix("_zeroshot")  # both tasks of hellaswag have one file
        path.write_text("".join(json.dumps(one) + "\n" for one in random_questions(name, 12)))
    return root


def test_the_settings_are_those_of_the_published_bundle(clone, tmp_path):
    lines = []
    build_bundle(str(tmp_path / "new" / "b"), str(clone), lines.append)
    tasks = read_bundle(str(tmp_path / "new" / "b"))
    assert [task.name for task in tasks] == [given["label"] for given in TASKS] == list(CORE_TASKS)
    for task, given in zip(tasks, TASKS, strict=True):
        assert task.kind == given["icl_task_type"]
        assert [task.num_fewshot] == given["num_fewshot"]
        assert task.delimiter == given["continuation_delimiter"]
        assert task.baseline == 0.01 * given["baseline"]
        assert len(task.questions) == 12
    assert len([line for line in lines if "is not the file of nanochat's bundle" in line]) == 21
    assert {given["dataset_uri"]: given["blob"] for given in TASKS} == _BLOBS


def test_contents_have_the_names_that_git_gives_them(tmp_path):
    (tmp_path / "a").write_bytes(b"hello\n")
    assert _blob(tmp_path / "a") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_what_is_missing_is_named_and_nothing_is_left(clone, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = clone / "scripts" / "eval" / "local_data"  # this folder will do too
    with pytest.raises(ConfigError, match="'gs://b/x' given, a local folder expected"):
        build_bundle("b", "gs://b/x", print)
    boolq = files / "reading_comprehension" / "boolq.jsonl"
    questions = boolq.read_text()
    boolq.unlink()
    assert prepare.main(["--core_bundle", "b", "--core_files", str(files)]) == 2
    assert "lacks 1 of 21 files: reading_comprehension/boolq.jsonl. Give a clone of https" in capsys.readouterr().err
    boolq.write_text("no question\n" * 12)
    assert prepare.main(["--core_bundle", "b", "--core_files", str(files)]) == 2
    error = capsys.readouterr().err
    assert re.match(rf"error: --core_files: {boolq}, line \d+: not a question of the type multiple_choice", error), (
        error
    )
    boolq.write_text(questions[: questions.index("\n")])
    assert prepare.main(["--core_bundle", "b", "--core_files", str(files)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --core_files: {boolq}: boolq puts 10 other questions in front of each one, but")
    assert error.endswith("there are only 1 questions, 11 or more expected\n")
    assert not list(tmp_path.iterdir())
    boolq.write_text(questions)
    assert prepare.main(["--core_files", str(files)]) == 2
    assert "--core_files has no effect without --core_bundle" in capsys.readouterr().err
    assert prepare.main(["--core_bundle", "b", "--core_files", str(files)]) == 0
    assert (tmp_path / "b" / "core.yaml").is_file()
    with pytest.raises(ConfigError, match="exists already"):
        build_bundle("b", str(files), print)
