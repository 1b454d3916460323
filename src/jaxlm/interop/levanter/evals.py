"""Levanter's `eval_harness`, read as evaluations of type `harness`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError

Refuse = Callable[[str, str], ConfigError]
"""(path, what is wrong with it) -> the error that says so."""

# Key there -> values that ask for what happens here anyway.
_AS_HERE: dict[str, tuple[Any, ...]] = {
    "apply_chat_template": (None, False),
    "fewshot_as_multiturn": (None, False),
    "max_length": (None,),
    "max_eval_length": (None,),
}
# Key there -> why it is left out; it changes none of the numbers.
_LEFT_OUT = {
    "log_samples": "numbers alone are logged",
    "sample_logging": "numbers alone are logged",
    "bootstrap_iters": "numbers are logged without their standard errors",
    "confirm_run_unsafe_code": "tasks that run what the model writes are refused by the harness",
}
_GENERATION = {"max_gen_toks": 256, "temperature": 0.0, "n": 1, "seed": None}


def harness_evals(given: Any, refuse: Refuse) -> tuple[list[dict[str, Any]], list[str]]:
    """An evaluation for each number of solved examples that tasks are given, and a line on each key that is left out.

    Raises:
        ConfigError: for what the evaluations here cannot be asked.
    """
    if not isinstance(given, Mapping) or not isinstance(given.get("task_spec"), list):
        raise refuse("eval_harness", f"{given!r} given; tasks expected, as in {{task_spec: [arc_easy]}}")
    rest = {key: value for key, value in given.items() if key not in ("task_spec", "max_examples")}
    notes = [f"eval_harness.{key} is left out: {_LEFT_OUT[key]}" for key in rest if key in _LEFT_OUT and rest[key]]
    if any(isinstance(entry, Mapping) and entry.get("task_alias") for entry in given["task_spec"]):
        notes.append("eval_harness.task_spec: task_alias is left out: numbers have the names of their tasks")
    for key, value in rest.items():
        if key == "generation_kwargs":
            _refuse_generation(value, refuse)
        elif key not in _LEFT_OUT and value not in _AS_HERE.get(key, ()):
            raise refuse(
                f"eval_harness.{key}", f"{value!r} given, as in Levanter; evals of type harness have no such key"
            )
    limit = {} if given.get("max_examples") is None else {"limit": given["max_examples"]}
    by_fewshot = _tasks(given["task_spec"], refuse)
    return [
        {"type": "harness", "tasks": tasks} | ({} if count is None else {"num_fewshot": count}) | limit
        for count, tasks in by_fewshot.items()
    ], notes


def _tasks(task_spec: list[Any], refuse: Refuse) -> dict[int | None, list[str]]:
    """Solved examples before each question -> the tasks that are asked so; None for what a task says itself."""
    found: dict[int | None, list[str]] = {}
    for number, entry in enumerate(task_spec):
        at = f"eval_harness.task_spec.{number}"
        task: Any = {"task": entry} if isinstance(entry, str) else entry
        if not isinstance(task, Mapping) or not isinstance(task.get("task"), str):
            raise refuse(at, f"{entry!r} given; a task's name expected, or {{task: NAME, num_fewshot: 5}}")
        for key in task.keys() - {"task", "num_fewshot", "task_alias"}:
            if task[key] is not None:
                raise refuse(
                    f"{at}.{key}",
                    f"{task[key]!r} given; tasks are taken as they are. Write a task of your own as a .yaml file, and name"
                    " that under evals, {type: harness, tasks: [...]}",
                )
        if any(task["task"] in tasks for tasks in found.values()):
            raise refuse(at, f"{task['task']} is there twice; its numbers would have the same names. Leave one out")
        solved = task.get("num_fewshot")
        if not (solved is None or isinstance(solved, int)):
            raise refuse(f"{at}.num_fewshot", f"{solved!r} given; a whole number expected")
        found.setdefault(solved, []).append(task["task"])
    return found


def _refuse_generation(given: Any, refuse: Refuse) -> None:
    if not isinstance(given or {}, Mapping):
        raise refuse(
            "eval_harness.generation_kwargs", f"{given!r} given; a section expected, as in {{temperature: 0.0}}"
        )
    other = {k: v for k, v in (given or {}).items() if k not in _GENERATION or v != _GENERATION[k]}
    if other:
        raise refuse("eval_harness.generation_kwargs", f"{other!r} given; each task says how its text is written")
