"""Builds the bundle of CORE from the files of its tasks, as llm-foundry publishes them in `scripts/eval/local_data`.

Source: the tasks of CORE in Li et al. 2024, DataComp-LM (arXiv:2406.11794), with the numbers of examples, the delimiters and
the accuracies of guessing of nanochat's bundle. Its files of questions are those of llm-foundry, byte for byte.
"""

import csv
import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import read_bytes
from jaxlm.core.stores import is_url
from jaxlm.evals.core_bundle import (
    BASELINES,
    BUNDLE,
    DATA,
    FILES_OPTION,
    FILES_URL,
    LANGUAGE_MODELING,
    MULTIPLE_CHOICE,
    SCHEMA,
    SETTINGS,
    TaskEntry,
    complete_or_absent,
    new_folder,
    read_task,
)

_IN_CLONE = "scripts/eval/local_data"
_ANSWER = "\nAnswer: "


class _Task(NamedTuple):
    """A task. `guessing` is the accuracy of guessing, in percent."""

    name: str
    file: str
    kind: str
    num_fewshot: int
    guessing: float
    delimiter: str = " "


_TASKS = (
    _Task("hellaswag_zeroshot", "language_understanding/hellaswag.jsonl", MULTIPLE_CHOICE, 0, 25),
    _Task("jeopardy", "world_knowledge/jeopardy_all.jsonl", LANGUAGE_MODELING, 10, 0, _ANSWER),
    _Task("bigbench_qa_wikidata", "world_knowledge/bigbench_qa_wikidata.jsonl", LANGUAGE_MODELING, 10, 0),
    _Task("arc_easy", "world_knowledge/arc_easy.jsonl", MULTIPLE_CHOICE, 10, 25, _ANSWER),
    _Task("arc_challenge", "world_knowledge/arc_challenge.jsonl", MULTIPLE_CHOICE, 10, 25, _ANSWER),
    _Task("copa", "commonsense_reasoning/copa.jsonl", MULTIPLE_CHOICE, 0, 50),
    _Task("commonsense_qa", "commonsense_reasoning/commonsense_qa.jsonl", MULTIPLE_CHOICE, 10, 20),
    _Task("piqa", "commonsense_reasoning/piqa.jsonl", MULTIPLE_CHOICE, 10, 50, _ANSWER),
    _Task("openbook_qa", "commonsense_reasoning/openbook_qa.jsonl", MULTIPLE_CHOICE, 0, 25),
    _Task("lambada_openai", "language_understanding/lambada_openai.jsonl", LANGUAGE_MODELING, 0, 0),
    _Task("hellaswag", "language_understanding/hellaswag.jsonl", MULTIPLE_CHOICE, 10, 25),
    _Task("winograd", "language_understanding/winograd_wsc.jsonl", SCHEMA, 0, 50),
    _Task("winogrande", "language_understanding/winogrande.jsonl", SCHEMA, 0, 50),
    _Task(
        "bigbench_dyck_languages", "symbolic_problem_solving/bigbench_dyck_languages.jsonl", LANGUAGE_MODELING, 10, 0
    ),
    _Task("agi_eval_lsat_ar", "symbolic_problem_solving/agi_eval_lsat_ar.jsonl", MULTIPLE_CHOICE, 3, 20),
    _Task("bigbench_cs_algorithms", "symbolic_problem_solving/bigbench_cs_algorithms.jsonl", LANGUAGE_MODELING, 10, 0),
    _Task("bigbench_operators", "symbolic_problem_solving/bigbench_operators.jsonl", LANGUAGE_MODELING, 10, 0),
    _Task(
        "bigbench_repeat_copy_logic",
        "symbolic_problem_solving/bigbench_repeat_copy_logic.jsonl",
        LANGUAGE_MODELING,
        10,
        0,
    ),
    _Task("squad", "reading_comprehension/squad.jsonl", LANGUAGE_MODELING, 10, 0),
    _Task("coqa", "reading_comprehension/coqa.jsonl", LANGUAGE_MODELING, 0, 0),
    _Task("boolq", "reading_comprehension/boolq.jsonl", MULTIPLE_CHOICE, 10, 62, _ANSWER),
    _Task(
        "bigbench_language_identification",
        "language_understanding/bigbench_language_identification.jsonl",
        MULTIPLE_CHOICE,
        10,
        9.1,
    ),
)
# The files in nanochat's bundle, as git names their contents.
_BLOBS = {
    "language_understanding/hellaswag.jsonl": "448321079fdc140bd8566b16b24eda9ceacd3501",
    "world_knowledge/jeopardy_all.jsonl": "2f771918dbc8b68550df204171b14d2648b5d494",
    "world_knowledge/bigbench_qa_wikidata.jsonl": "5e1be72797ba082fd4f6efa42f7d759d2d23339a",
    "world_knowledge/arc_easy.jsonl": "b5fd1bf87a24246a6be67230b721541688f5c349",
    "world_knowledge/arc_challenge.jsonl": "ce66b8dcfb4bac892a404a0dda8b4e8ed0f84b89",
    "commonsense_reasoning/copa.jsonl": "b22f96e08ae9d0e97e1ae58f67b6425c77ef200a",
    "commonsense_reasoning/commonsense_qa.jsonl": "f1cc16a88b05ab0934aab2ec2d02a6869e6e5520",
    "commonsense_reasoning/piqa.jsonl": "a9992adfdefde366fe7ccff871f5aa62449a09cf",
    "commonsense_reasoning/openbook_qa.jsonl": "a8aff255a64cbc72a85252acf00df25a315686c2",
    "language_understanding/lambada_openai.jsonl": "4da02dd53b9e7385871d06ab855471d77b2f7dda",
    "language_understanding/winograd_wsc.jsonl": "762fe030ac6938ecba438c47a04057247c6ab891",
    "language_understanding/winogrande.jsonl": "316e87ae4659f0c402b0f00551fdec83ab0a0986",
    "symbolic_problem_solving/bigbench_dyck_languages.jsonl": "27a4ac2b3b18716add92f4ecd62475c4f8d77768",
    "symbolic_problem_solving/agi_eval_lsat_ar.jsonl": "d663b427ba310d3f877f09a6830198ca7c856189",
    "symbolic_problem_solving/bigbench_cs_algorithms.jsonl": "7ecee0f270f3de8b6558da14ae02181f3d950a40",
    "symbolic_problem_solving/bigbench_operators.jsonl": "a982dc4f962725c9dc4abb07d3cc333c99959290",
    "symbolic_problem_solving/bigbench_repeat_copy_logic.jsonl": "86621f10e7124ed6f3a61fb91493c1256c008f60",
    "reading_comprehension/squad.jsonl": "dc733b8f58ec666c53fd946198c434b819a00680",
    "reading_comprehension/coqa.jsonl": "028bd4e51326cc43f8394987ae47fbb271aeba9d",
    "reading_comprehension/boolq.jsonl": "f42083a58713d00ef4600118cfdf79618c269190",
    "language_understanding/bigbench_language_identification.jsonl": "1f132fbbb12a67ce267b7b92b458175632c265f3",
}


def build_bundle(path: str, files: str, log: Callable[[str], None]) -> None:
    """Writes a bundle of all tasks into a new folder, which is complete once it exists.

    Args:
        files: a clone of llm-foundry, or its folder `scripts/eval/local_data`.
        log: told which files are not those of nanochat's bundle.

    Raises:
        ConfigError: files are missing or damaged, or the folder has files already or cannot be written.
    """
    folder, source = new_folder(path), _files(files)
    try:
        for task in _TASKS:  # not of the copies: messages name your files
            read_task(task.name, TaskEntry(_entry(task), source / task.file, 0.01 * task.guessing), key=FILES_OPTION)
        with complete_or_absent(folder) as scratch:
            bundle = scratch / BUNDLE
            for name in _BLOBS:
                (bundle / DATA / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, bundle / DATA / name)
            _write_settings(bundle)
    except OSError as error:
        raise ConfigError(
            f"{FILES_OPTION}: the bundle cannot be built ({error}). Check the permissions and the disk"
        ) from error
    for name in (name for name, blob in _BLOBS.items() if _blob(folder / DATA / name) != blob):
        log(f"warning: {name} is not the file of nanochat's bundle: do not compare its task with published results")
    log(f"CORE is in {folder}: {len(_TASKS)} tasks")


def _files(path: str) -> Path:
    """The folder with the tasks' files. Raises `ConfigError` if some of them are missing."""
    if is_url(path):
        raise ConfigError(f"{FILES_OPTION}: '{path}' given, a local folder expected. Run git clone {FILES_URL} first")
    root = Path(path).expanduser()
    if not path or not root.is_dir():
        raise ConfigError(f"{FILES_OPTION}: '{path}' given, a folder expected. Run git clone {FILES_URL} first")
    source = root / _IN_CLONE if (root / _IN_CLONE).is_dir() else root
    if missing := [name for name in _BLOBS if not (source / name).is_file()]:
        shown = ", ".join([*missing[:3], *["..."] * (len(missing) > 3)])
        raise ConfigError(
            f"{FILES_OPTION}: '{path}' given, but it lacks {len(missing)} of {len(_BLOBS)} files: {shown}. Give a clone of"
            f" {FILES_URL}, or its folder {_IN_CLONE}"
        )
    return source


def _write_settings(bundle: Path) -> None:
    entries = [_entry(task) for task in _TASKS]
    (bundle / SETTINGS).write_text(yaml.safe_dump({"icl_tasks": entries}, sort_keys=False), encoding="utf-8")
    with (bundle / BASELINES).open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["Eval Task", "Random baseline"])
        rows.writerows([task.name, task.guessing] for task in _TASKS)


def _entry(task: _Task) -> Mapping[str, Any]:
    return {
        "label": task.name,
        "dataset_uri": task.file,
        "num_fewshot": [task.num_fewshot],
        "icl_task_type": task.kind,
        "continuation_delimiter": task.delimiter,
    }


def _blob(file: Path) -> str:
    """The name that git gives to the content of a file."""
    content = read_bytes(file)
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
