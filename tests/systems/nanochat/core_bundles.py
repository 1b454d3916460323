"""Small bundles of CORE's 22 tasks, and the answers of a model by a transcription of the metric, one question at a time."""

import csv
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml

from jaxlm.systems.nanochat.core_bundle import CORE_TASKS

SCHEMAS = ("winograd", "winogrande")
CONTINUATIONS = (
    *("jeopardy", "bigbench_qa_wikidata", "lambada_openai", "bigbench_dyck_languages", "bigbench_cs_algorithms"),
    *("bigbench_operators", "bigbench_repeat_copy_logic", "squad", "coqa"),
)
FEWSHOTS = (0, 1, 3, 10)
DELIMITERS = (None, "\nAnswer: ", "\n", ": ")
WORDS = ("red", "blue", "Paris", "größe", "42", "tree", "of", "the", "runs", "x")
TEMPLATES = {
    "multiple_choice": "{% for s in shots %}{{ s.query }}{{ d }}{{ s.choices[s.gold] }}\n\n{% endfor %}"
    "{{ item.query }}{{ d }}{{ choice }}",
    "schema": "{% for s in shots %}{{ s.context_options[s.gold] }}{{ d }}{{ s.continuation }}\n\n{% endfor %}"
    "{{ choice }}{{ d }}{{ item.continuation }}",
    "language_modeling": "{% for s in shots %}{{ s.context | trim }}{{ d }}{{ s.continuation }}\n\n{% endfor %}"
    "{{ item.context | trim }}{{ d }}{{ choice }}",
}


def kind_of(name: str) -> str:
    if name in SCHEMAS:
        return "schema"
    return "language_modeling" if name in CONTINUATIONS else "multiple_choice"


def random_questions(name: str, num: int) -> list[dict[str, Any]]:
    """Questions of random words. Contexts may end in white space, and choices begin with the same words."""
    rng = random.Random(name)
    text = lambda longest: " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))  # noqa: E731
    kind = kind_of(name)
    if kind == "multiple_choice":
        sizes = [rng.randint(2, 4) for _ in range(num)]
        return [
            {"query": text(6), "choices": [text(2) + " " + text(2) for _ in range(size)], "gold": rng.randrange(size)}
            for size in sizes
        ]
    if kind == "schema":
        return [
            {"context_options": [text(4), text(4)], "continuation": text(3) + ".", "gold": rng.randrange(2)}
            for _ in range(num)
        ]
    return [{"context": text(6) + rng.choice(["", " ", "\n"]), "continuation": text(1)} for _ in range(num)]


def write_bundle(folder: Path, num: int = 12, questions: dict[str, list] | None = None) -> Path:
    """Writes a bundle of all tasks. Args: questions: of some tasks, which then have neither examples nor a delimiter."""
    (folder / "eval_data" / "some").mkdir(parents=True)
    entries = []
    for number, name in enumerate(CORE_TASKS):
        uri = f"some/{name}.jsonl"
        task_questions = (questions or {}).get(name)
        lines = random_questions(name, num) if task_questions is None else task_questions
        (folder / "eval_data" / uri).write_text("".join(json.dumps(one) + "\n" for one in lines))
        fewshot = 0 if task_questions is not None else min(num - 1, FEWSHOTS[number % 4])
        entry = {"label": name, "dataset_uri": uri, "num_fewshot": [fewshot], "icl_task_type": kind_of(name)}
        delimiter = "" if task_questions is not None else DELIMITERS[number // 4 % 4]
        entries.append(entry if delimiter is None else {**entry, "continuation_delimiter": delimiter})
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    with (folder / "eval_meta_data.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["Eval Task", "Task Category", "Random baseline"])
        rows.writerows([name, "some", 4.0 * number] for number, name in enumerate(CORE_TASKS))
    return folder


def reference_answers(
    folder: Path,
    name: str,
    encode: Callable[[str], list[int]],
    bos: int,
    log_probs: Callable[[Sequence[int]], np.ndarray],
    *,
    max_per_task: int | None = None,
    max_tokens: int | None = None,
) -> list[bool]:
    """Whether each question of a task is answered, by the text of the specification.

    Args:
        log_probs: float64 [tokens, vocab] of the next token after each token of one sequence.
        max_tokens: longer sequences lose their first tokens.
    """
    [entry] = [e for e in yaml.safe_load((folder / "core.yaml").read_text())["icl_tasks"] if e["label"] == name]
    data = [json.loads(line) for line in (folder / "eval_data" / entry["dataset_uri"]).read_text().splitlines()]
    random.Random(1337).shuffle(data)
    data = data[:max_per_task]
    kind, template = entry["icl_task_type"], jinja2.Template(TEMPLATES[entry["icl_task_type"]])
    answers = []
    for index, item in enumerate(data):
        others = [other for other in range(len(data)) if other != index]
        chosen = random.Random(1234 + index).sample(others, entry["num_fewshot"][0])
        variables = {
            "shots": [data[i] for i in chosen],
            "item": item,
            "d": entry.get("continuation_delimiter", " "),
        }
        if kind == "language_modeling":
            texts = [
                template.render(choice="", **variables).strip(),
                template.render(choice=item["continuation"], **variables),
            ]
        else:
            choices = item["choices"] if kind == "multiple_choice" else item["context_options"]
            texts = [template.render(choice=choice, **variables) for choice in choices]
        rows = [[bos, *encode(text)] for text in texts]
        spans = _spans(kind, rows)
        if kind == "language_modeling":
            rows = rows[1:]
        losses, greedy = [], []
        for row, (begin, end) in zip(rows, spans, strict=True):
            crop = max(0, len(row) - max_tokens) if max_tokens is not None else 0
            row, begin, end = row[crop:], begin - crop, end - crop
            assert begin > 0 or not crop
            scores = log_probs(row)
            # Two equal texts of a schema have all tokens in common, and no token comes before the first.
            losses.append(np.mean([-scores[at - 1, row[at]] for at in range(begin, end)]) if begin else math.nan)
            greedy.append(all(scores[at - 1].argmax() == row[at] for at in range(begin, end)))
        answers.append(greedy[0] if kind == "language_modeling" else losses.index(min(losses)) == item["gold"])
    return answers


def _spans(kind: str, rows: list[list[int]]) -> list[tuple[int, int]]:
    if kind == "language_modeling":
        without, whole = rows
        assert whole[: len(without)] == without
        assert len(without) < len(whole)
        return [(len(without), len(whole))]
    shortest, shared = min(map(len, rows)), 0
    at = (lambda n: n) if kind == "multiple_choice" else (lambda n: -1 - n)
    while shared < shortest and len({row[at(shared)] for row in rows}) == 1:
        shared += 1
    return [(shared if kind == "multiple_choice" else len(row) - shared, len(row)) for row in rows]
