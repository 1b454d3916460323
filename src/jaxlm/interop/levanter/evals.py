"""Translates Levanter's `eval_harness` to evaluations of type `harness`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError

Refuse = Callable[[str, str], ConfigError]
"""(path, problem) -> the error to raise."""

# Key in Levanter -> values that match the behavior of jaxlm.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "apply_chat_template": (None, False),
    "fewshot_as_multiturn": (None, False),
    "max_length": (None,),
    "max_eval_length": (None,),
}
# Key in Levanter -> why jaxlm ignores it; it does not affect the metrics.
_IGNORED = {
    "log_samples": "only metrics are logged",
    "sample_logging": "only metrics are logged",
    "bootstrap_iters": "metrics are logged without standard errors",
    "confirm_run_unsafe_code": "the harness refuses tasks that run generated code",
}
_GENERATION = {"max_gen_toks": 256, "temperature": 0.0, "n": 1, "seed": None}


def harness_evals(section: Any, refuse: Refuse) -> tuple[list[dict[str, Any]], list[str]]:
    """Translates `eval_harness` to one evaluation per number of few-shot examples, with one note per ignored key.

    Raises:
        ConfigError: a key is not supported by evaluations of type `harness`.
    """
    if not isinstance(section, Mapping) or not isinstance(section.get("task_spec"), list):
        raise refuse("eval_harness", f"{section!r} given; tasks expected, such as {{task_spec: [arc_easy]}}")
    rest = {key: value for key, value in section.items() if key not in ("task_spec", "max_examples")}
    notes = [f"eval_harness.{key} is ignored: {_IGNORED[key]}" for key in rest if key in _IGNORED and rest[key]]
    if any(isinstance(entry, Mapping) and entry.get("task_alias") for entry in section["task_spec"]):
        notes.append("eval_harness.task_spec: task_alias is ignored: metrics use the task names")
    for key, value in rest.items():
        if key == "generation_kwargs":
            _refuse_generation(value, refuse)
        elif key not in _IGNORED and value not in _SUPPORTED.get(key, ()):
            raise refuse(
                f"eval_harness.{key}", f"{value!r} given; evals of type harness do not support this Levanter key"
            )
    limit = {} if section.get("max_examples") is None else {"limit": section["max_examples"]}
    by_fewshot = _tasks(section["task_spec"], refuse)
    return [
        {"type": "harness", "tasks": tasks} | ({} if count is None else {"num_fewshot": count}) | limit
        for count, tasks in by_fewshot.items()
    ], notes


def _tasks(task_spec: list[Any], refuse: Refuse) -> dict[int | None, list[str]]:
    """Number of few-shot examples -> tasks; None uses the number in the task's own definition."""
    by_fewshot: dict[int | None, list[str]] = {}
    for number, entry in enumerate(task_spec):
        path = f"eval_harness.task_spec.{number}"
        task: Any = {"task": entry} if isinstance(entry, str) else entry
        if not isinstance(task, Mapping) or not isinstance(task.get("task"), str):
            raise refuse(path, f"{entry!r} given; a task name expected, or {{task: NAME, num_fewshot: 5}}")
        for key in task.keys() - {"task", "num_fewshot", "task_alias"}:
            if task[key] is not None:
                raise refuse(
                    f"{path}.{key}",
                    f"{task[key]!r} given; tasks cannot be modified here. Write a task of your own as a .yaml file, and list"
                    " it under evals: {type: harness, tasks: [...]}",
                )
        if any(task["task"] in tasks for tasks in by_fewshot.values()):
            raise refuse(path, f"{task['task']} is listed twice; its metrics would have the same names. Remove one")
        num_fewshot = task.get("num_fewshot")
        if not (num_fewshot is None or isinstance(num_fewshot, int)):
            raise refuse(f"{path}.num_fewshot", f"{num_fewshot!r} given; an integer expected")
        by_fewshot.setdefault(num_fewshot, []).append(task["task"])
    return by_fewshot


def _refuse_generation(value: Any, refuse: Refuse) -> None:
    if not isinstance(value or {}, Mapping):
        raise refuse(
            "eval_harness.generation_kwargs", f"{value!r} given; a section expected, such as {{temperature: 0.0}}"
        )
    other = {k: v for k, v in (value or {}).items() if k not in _GENERATION or v != _GENERATION[k]}
    if other:
        raise refuse(
            "eval_harness.generation_kwargs", f"{other!r} given; each task defines its own generation settings"
        )
