"""Processes, or two starts of a run, whose copies of CORE's questions or of the prompts of rollouts differ."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.test_other_files import (
    check_changed_files,
    check_refused,
    check_same_files,
    fill_with_more,
    of_two_machines,
    write_questions,
)
from tests.systems.nanochat.core_bundles import write_bundle

pytestmark = pytest.mark.slow
CORE = "  - {type: core, bundle: bundle, tasks: [copa], max_per_task: 4}\n"
ROLLOUTS = """\
  - {type: rollouts, prompts_file: prompts.jsonl, max_new_tokens: 4, rewards: [{type: exact_match, column: answer}]}
"""


def fill(folder: Path) -> None:
    fill_with_more(folder)
    write_bundle(folder / "bundle", num=4)
    write_prompts(folder)
    path = folder / "run.yaml"
    text = (
        path.read_text()
        .replace("  - {type: cases", f"{CORE}  - {{type: cases")
        .replace("phases:", f"{ROLLOUTS}phases:")
    )
    path.write_text(text)


def write_prompts(folder: Path, answer: int = 4) -> None:
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "2+2=", "answer": str(answer)}) + "\n")


def another_order(folder: Path) -> None:
    """Of the questions of CORE: the last one is the first."""
    path = folder / "bundle" / "eval_data" / "some" / "copa.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[::-1]))


@pytest.mark.soak
def test_processes_whose_files_differ_end_before_they_train(workplace):
    place = workplace(1)
    fill(place.folder)
    check_refused(of_two_machines(place, another_order), "evals: core: bundle: copa: ")


@pytest.mark.soak
def test_processes_with_the_same_files_in_other_folders_train(workplace):
    check_same_files(workplace(1), fill, ("prompts.jsonl", "cases.jsonl"))


@pytest.mark.soak
def test_a_run_says_once_which_files_of_its_evaluations_have_changed(workplace):
    def change(folder: Path) -> None:
        another_order(folder)
        write_questions(folder, answer=5)
        write_prompts(folder, answer=5)

    changed = ("core: bundle: copa: ", "type cases: cases: file: ", "type rollouts: rollouts: prompts_file: ")
    check_changed_files(workplace(1), fill, change, [f"evals: {text}" for text in changed])
