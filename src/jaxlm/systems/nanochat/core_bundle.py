"""The bundle of CORE: a folder with the questions of its tasks, their settings, and the accuracies of guessing.

It is read and downloaded as nanochat packs it: `core.yaml`, `eval_meta_data.csv`, and a file of JSON lines for each task in
`eval_data`. Or it is built from the files of its tasks, as llm-foundry publishes them in `scripts/eval/local_data`, with
the numbers of examples, the delimiters and the accuracies of guessing of nanochat's bundle. Its files of questions are
those of llm-foundry, byte for byte.

Source: the tasks of CORE in Li et al. 2024, DataComp-LM (arXiv:2406.11794).
"""

import contextlib
import csv
import hashlib
import http.client
import io
import json
import random
import shutil
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import note
from jaxlm.core.safe_io import listed_file, read_bytes, read_text
from jaxlm.core.stores import is_url

CORE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
FETCH_OPTION = "--core_bundle"
FILES_URL = "https://github.com/mosaicml/llm-foundry"
FILES_OPTION = "--core_files"
CORE_TASKS = (
    *("hellaswag_zeroshot", "jeopardy", "bigbench_qa_wikidata", "arc_easy", "arc_challenge", "copa", "commonsense_qa"),
    *("piqa", "openbook_qa", "lambada_openai", "hellaswag", "winograd", "winogrande", "bigbench_dyck_languages"),
    *("agi_eval_lsat_ar", "bigbench_cs_algorithms", "bigbench_operators", "bigbench_repeat_copy_logic"),
    *("squad", "coqa", "boolq", "bigbench_language_identification"),
)
"""The tasks that CORE is the mean of, as `core.yaml` names them."""

MULTIPLE_CHOICE, SCHEMA, LANGUAGE_MODELING = "multiple_choice", "schema", "language_modeling"
# Type of a task -> the keys of its questions: the text, or the list of texts to choose from, and what follows.
_KEYS = {
    MULTIPLE_CHOICE: ("query", "choices", "gold"),
    SCHEMA: ("context_options", "continuation", "gold"),
    LANGUAGE_MODELING: ("context", "continuation"),
}
_LISTS = ("choices", "context_options")
SETTINGS, DATA, BASELINES = "core.yaml", "eval_data", "eval_meta_data.csv"
BUNDLE = "bundle"
_SHUFFLE_SEED = 1337
_TIMEOUT_S = 60
_WHERE = "evals: core: bundle"


@dataclass(frozen=True)
class CoreTask:
    """One task of CORE.

    Attributes:
        kind: its type, one of those above.
        questions: those that are asked, in their order.
        num_fewshot: number of solved questions in front of each one.
        delimiter: stands between a question and its answer.
        baseline: the accuracy of guessing, as a fraction.
    """

    name: str
    kind: str
    questions: Sequence[Mapping[str, Any]]
    num_fewshot: int
    delimiter: str
    baseline: float

    def centered(self, accuracy: float) -> float:
        """An accuracy on a scale where guessing is 0 and every answer right is 1."""
        return (accuracy - self.baseline) / (1 - self.baseline)


@dataclass(frozen=True)
class TaskEntry:
    """Says where a task is, and how it is asked: its entry in `core.yaml`, its questions, the accuracy of guessing."""

    settings: Mapping[str, Any]
    file: Path
    baseline: float


def read_bundle(folder: str, names: Sequence[str] = CORE_TASKS, max_per_task: int | None = None) -> list[CoreTask]:
    """Reads tasks of a bundle, in the order of `names`.

    Raises:
        ConfigError: the folder is not a bundle, one of the tasks is missing or has too few questions, or a file is damaged.
    """
    entries = task_entries(folder, names)
    with _readable():
        return [read_task(name, entries[name], max_per_task) for name in names]


def task_entries(folder: str, names: Sequence[str]) -> dict[str, TaskEntry]:
    """Lists the tasks. Raises `ConfigError` if the folder is not a bundle, or lacks one of them. Reads no questions."""
    root = _local(folder, _WHERE)
    if unknown := [name for name in names if name not in CORE_TASKS]:
        raise ConfigError(f"evals: core: tasks: '{unknown[0]}' given, but CORE has: {', '.join(CORE_TASKS)}")
    for file in (SETTINGS, BASELINES):
        if not (root / file).is_file():
            raise ConfigError(
                f"{_WHERE}: '{folder}' given, but it has no {file}. To download the bundle, run jaxlm prepare {FETCH_OPTION}"
                f" {folder}"
            )
    with _readable():
        settings, baselines = _settings(root / SETTINGS, names), _baselines(root / BASELINES, names)
        files = {name: listed_file(root / DATA, settings[name]["dataset_uri"]) for name in names if name in settings}
        absent = [f"{name} (no file {file})" for name, file in files.items() if not file.is_file()]
    missing = [f"{name} (not in {SETTINGS})" for name in names if name not in settings]
    missing += [f"{name} (not in {BASELINES})" for name in names if name in settings and name not in baselines]
    missing += absent
    if missing:
        raise ConfigError(
            f"{_WHERE}: '{folder}' given, but it lacks {len(missing)} of the tasks of CORE: {', '.join(missing)}. Run jaxlm"
            f" prepare {FETCH_OPTION} with a new folder, or list the tasks that are there in `tasks`"
        )
    return {name: TaskEntry(settings[name], files[name], baselines[name]) for name in names}


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Turns errors of reading files into `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{_WHERE}: {error.filename} cannot be read ({error.strerror}). Check its permissions"
        ) from error


def read_task(name: str, entry: TaskEntry, max_per_task: int | None = None, *, key: str = _WHERE) -> CoreTask:
    """Reads one task. Args: key: what names its files, for messages.

    Raises:
        ConfigError: it has too few questions, or its file is damaged.
        OSError: its file cannot be read.
    """
    kind, num_fewshot = entry.settings["icl_task_type"], entry.settings["num_fewshot"][0]
    questions = list(_questions(entry.file, kind, max_per_task, key))
    note(f"{key}: {name}", json.dumps([dict(entry.settings), entry.baseline, questions], default=str), evaluates=True)
    if len(questions) <= num_fewshot:
        enough = f"{num_fewshot + 1} or more"
        is_cut = len(questions) == max_per_task
        raise ConfigError(
            f"{key}: {entry.file}: {name} puts {num_fewshot} other questions in front of each one, but there are only"
            f" {len(questions)} questions"
            + (f" (max_per_task: {max_per_task}). Set max_per_task to {enough}" if is_cut else f", {enough} expected")
        )
    delimiter = entry.settings.get("continuation_delimiter", " ")
    return CoreTask(name, kind, questions, num_fewshot, delimiter, entry.baseline)


def asked_lines(num_lines: int, max_per_task: int | None) -> list[int]:
    """The lines of a task's file that are asked, in their order: shuffled first, then truncated."""
    numbers = list(range(num_lines))
    random.Random(_SHUFFLE_SEED).shuffle(numbers)
    return numbers[:max_per_task]


def _settings(file: Path, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    try:
        entries = yaml.safe_load(read_text(file))["icl_tasks"]
        settings = {entry["label"]: entry for entry in entries if entry["label"] in names}
    # For values that it cannot read, yaml raises ValueError, AttributeError, IndexError and others.
    except Exception as error:
        raise ConfigError(f"{_WHERE}: {file} is damaged: a list `icl_tasks` of tasks with `label` expected") from error
    for name, entry in settings.items():
        shots = entry.get("num_fewshot")
        is_sound = (
            entry.get("icl_task_type") in tuple(_KEYS)
            and isinstance(entry.get("dataset_uri"), str)
            and isinstance(entry.get("continuation_delimiter", " "), str)
            and isinstance(shots, list)
            and bool(shots)
            and type(shots[0]) is int
            and shots[0] >= 0
        )
        if not is_sound:
            raise ConfigError(
                f"{_WHERE}: {file}: the task '{name}' needs icl_task_type ({', '.join(_KEYS)}), dataset_uri and num_fewshot"
                " (a list with one number)"
            )
    return settings


def _baselines(file: Path, names: Sequence[str]) -> dict[str, float]:
    """Task -> the accuracy of guessing, as a fraction."""
    try:
        lines = io.StringIO(read_text(file).removeprefix("\ufeff"))  # spreadsheets put a mark in front
        rows = [row for row in csv.DictReader(lines) if row["Eval Task"] in names]
        baselines = {row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in rows}
        if wrong := [name for name, baseline in baselines.items() if not 0 <= baseline < 1]:
            raise ValueError(f"'{wrong[0]}': {100 * baselines[wrong[0]]:g}")
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise ConfigError(
            f"{_WHERE}: {file} is damaged ({error}): the columns `Eval Task` and `Random baseline` (in percent, 0 or more and"
            " below 100) expected"
        ) from error
    return baselines


def _questions(file: Path, kind: str, max_per_task: int | None, key: str) -> Iterator[Mapping[str, Any]]:
    lines = read_bytes(file).splitlines()
    if not lines:
        raise ConfigError(f"{key}: {file} is empty: a question in each line expected")
    for number in asked_lines(len(lines), max_per_task):
        try:
            question = json.loads(lines[number])
        except (ValueError, RecursionError):
            question = None
        if not (isinstance(question, dict) and _is_question(question, kind)):
            raise ConfigError(
                f"{key}: {file}, line {number + 1}: not a question of the type {kind}: an object with"
                f" {', '.join(_KEYS[kind])} expected"
            )
        yield question


def _is_question(question: Mapping[str, Any], kind: str) -> bool:
    if not all(name in question for name in _KEYS[kind]):
        return False
    lists = [question[name] for name in _KEYS[kind] if name in _LISTS]
    if not all(isinstance(one, list) and one for one in lists):
        return False
    texts = [question[name] for name in _KEYS[kind] if name not in (*_LISTS, "gold")]
    texts += [text for one in lists for text in one]
    gold = question.get("gold")
    has_answer = not lists or (type(gold) is int and 0 <= gold < len(lists[0]))
    return has_answer and all(isinstance(text, (str, int, float)) for text in texts)


def _local(folder: str, key: str) -> Path:
    """The path of a folder on this machine. Raises `ConfigError` for a URL."""
    if is_url(folder):
        raise ConfigError(f"{key}: '{folder}' given, a local folder expected. Copy the bundle to each machine")
    return Path(folder).expanduser()


def fetch_bundle(path: str, log: Callable[[str], None], url: str = CORE_URL) -> None:
    """Downloads and unpacks the bundle of all tasks (about 160 MB) into a new folder, which is complete once it exists.

    Raises:
        ConfigError: the folder has files already, or the bundle cannot be downloaded or written.
    """
    folder = new_folder(path)
    log(f"downloading {url}")
    try:
        with complete_or_absent(folder) as scratch:
            archive, unpacked = scratch / "bundle.zip", scratch / "unpacked"
            _download(url, archive)
            with zipfile.ZipFile(archive) as files:
                files.extractall(unpacked)
            settings = next(iter(sorted(unpacked.rglob(SETTINGS))), None)
            if settings is None:
                raise ConfigError(f"{FETCH_OPTION}: {url} is not the bundle of CORE: it has no {SETTINGS}")
            settings.parent.rename(scratch / BUNDLE)
            read_bundle(str(scratch / BUNDLE))
    except (OSError, http.client.HTTPException, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(
            f"{FETCH_OPTION}: the bundle cannot be fetched ({error}). Check the network and the disk; or download {url} on"
            f" another machine, and unpack it so that {folder / SETTINGS} exists; or build it from a clone of"
            f" {FILES_URL} with {FILES_OPTION}"
        ) from error
    log(f"CORE is in {folder}: {len(CORE_TASKS)} tasks")


def new_folder(path: str) -> Path:
    """The path of a bundle to make. Raises `ConfigError` if it has files already."""
    folder = _local(path, FETCH_OPTION)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{FETCH_OPTION}: {folder} exists already. Give a new folder, or remove it first")
    return folder


@contextlib.contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """Yields a scratch folder. The bundle that is then in its folder `BUNDLE` is moved to `folder`."""
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{folder.name}-") as scratch:
        yield Path(scratch)
        if folder.exists():
            folder.rmdir()
        (Path(scratch) / BUNDLE).rename(folder)


def _download(url: str, path: Path) -> None:
    """Raises `OSError` if the file cannot be read, or ends early."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        size = source.headers.get("Content-Length")
        if size is not None and target.tell() != int(size):
            raise OSError(f"{target.tell():,} of {int(size):,} bytes were read")


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
    root = Path(path).expanduser()
    if not path or is_url(path) or not root.is_dir():
        raise ConfigError(f"{FILES_OPTION}: '{path}' given, a local folder expected. Run git clone {FILES_URL} first")
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
