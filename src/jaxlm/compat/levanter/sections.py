"""Translates Levanter's sections `data`, `eval_harness`, `lora` and `adapter`."""

import re
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


_CACHE_OPTIONS = "cache_options"
_SOURCE_KEYS = ("validation_urls", "cache_dir", "tags")
_FORMAT_KEYS = ("input_field", "output_field")


def data_section(section: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Translates the section, and returns it with one note per translated key."""
    notes: list[str] = []
    data = _source(section, "data", notes.append)
    if data.get("cache_dir", "") is None:
        del data["cache_dir"]  # in an included file, to be set by the one that includes it
    if isinstance(data.get("components"), Mapping):
        components = data.pop("components")
        data["configs"] = {name: _component(component) for name, component in components.items()}
        notes.append("data.components is read as data.configs")
    if isinstance(data.get("configs"), Mapping):
        _name_sources(data, notes.append)
    if data.get("stop_strategy") == "restart_strategy":
        data["stop_strategy"] = "restart"
    length = data.get("shuffle")
    if isinstance(length, int) and not isinstance(length, bool):
        data["shuffle"] = {"type": "era", "era_length": length}
        notes.append(f"data.shuffle: {length} is read as {{type: era, era_length: {length}}}")
    return data, notes


def supervised_sources(section: Mapping[str, Any], refuse: Refuse) -> dict[str, dict[str, Any]]:
    """Translates `supervised_data`, prompts with completions to evaluate on, to data sources."""
    sources = {}
    for name, source in section.items():
        if not isinstance(source, Mapping) or not source.get("validation_urls"):
            raise refuse(f"supervised_data.{name}", f"{source!r} given; a section with validation_urls expected")
        for key, value in source.items():
            if key not in (*_SOURCE_KEYS, *_FORMAT_KEYS) and value is not None:
                raise refuse(
                    f"supervised_data.{name}.{key}", f"{value!r} given; evaluation sources do not support this key"
                )
        fields = {key: source[key] for key in _FORMAT_KEYS if source.get(key)}
        shared = {key: source[key] for key in _SOURCE_KEYS if source.get(key)}
        sources[name] = shared | {"format": {"type": "supervised", **fields}}
    return sources


def _source(section: Mapping[str, Any], key: str, note: Callable[[str], None]) -> dict[str, Any]:
    source = {name: value for name, value in section.items() if name != _CACHE_OPTIONS}
    if section.get(_CACHE_OPTIONS):
        note(f"{key}.{_CACHE_OPTIONS} is ignored: the tokenization batch size is chosen automatically")
    return source


def _component(component: Any) -> Any:
    """Flattens an entry of `components`: merges its `source` (without `type`, which follows from the keys) into it."""
    if not isinstance(component, Mapping) or not isinstance(component.get("source"), Mapping):
        return component
    others = {key: value for key, value in component.items() if key != "source"}
    return others | {key: value for key, value in component["source"].items() if key != "type"}


def _name_sources(data: dict[str, Any], note: Callable[[str], None]) -> None:
    """Renames sources to valid folder names, and drops zero weights of sources that are only evaluated."""
    configs = {
        name: _source(source, f"data.configs.{name}", note) if isinstance(source, Mapping) else source
        for name, source in data["configs"].items()
    }
    names = {name: name.replace("/", ".") for name in configs}
    data["configs"] = {names[name]: _with_group_tag(name, source) for name, source in configs.items()}
    if names.keys() != data["configs"].keys():
        note("data.configs: in names with a slash, the slash becomes a dot and the part before it a tag")
    trained = {names[name] for name, source in configs.items() if _is_trained(source)}

    def weights(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        renamed = {names.get(name, name): weight for name, weight in value.items()}
        only_evaluated = data["configs"].keys() - trained
        return {name: weight for name, weight in renamed.items() if weight != 0 or name not in only_evaluated}

    for key in ("max_train_batches", "num_validation_sequences"):
        if isinstance(data.get(key), Mapping):
            data[key] = {names.get(name, name): number for name, number in data[key].items()}
    stages = data.get("train_weights")
    if isinstance(stages, list):
        data["train_weights"] = [[*s[:-1], weights(s[-1])] if isinstance(s, list) and s else s for s in stages]
    elif stages is not None:
        data["train_weights"] = weights(stages)


def _is_trained(source: Any) -> bool:
    return not isinstance(source, Mapping) or any(source.get(key) for key in ("train_urls", "id", "source"))


def _with_group_tag(name: str, source: Any) -> Any:
    group, slash, _ = name.rpartition("/")
    if not slash or not isinstance(source, Mapping):
        return source
    tags = source.get("tags") or []
    return {**source, "tags": [*tags, group.replace("/", ".")]} if isinstance(tags, list) else source


# Key in Levanter -> key of the surgery and Levanter's default.
_KEYS = {"r": ("rank", 8), "alpha": ("alpha", 8.0), "dropout": ("dropout", 0.0)}
_TARGETS = "target_modules"
# Key in Levanter -> the values that match what jaxlm does: B is zero at the start.
_LORA_KEYS: dict[str, tuple[Any, ...]] = {"zero_init_b": (None, True), "type": ("lora",), "exclude_modules": (None, [])}
_ATTENTION = "q_proj|k_proj|v_proj"
# Module in the original model -> jaxlm's layers, which are not fused and have one name in all families.
_MODULES = {
    "Wqkv": _ATTENTION,
    "c_attn": _ATTENTION,
    "query_key_value": _ATTENTION,
    "qkv_proj": _ATTENTION,
    "out_proj": "o_proj",
    "c_proj": "o_proj|down_proj",
    "c_fc": "up_proj",
}


def lora_phases(section: Any, path: str, refuse: Refuse) -> list[dict[str, Any]]:
    """The only phase of a run that trains adapters, as a list of sections.

    Raises:
        ConfigError: the section has a key that surgeries of type `lora` do not support.
    """
    if not isinstance(section, Mapping):
        raise refuse(path, f"{section!r} given; a section expected, such as {{r: 8, alpha: 8.0}}")
    for key, value in section.items():
        if key not in (*_KEYS, _TARGETS) and value not in _LORA_KEYS.get(key, (None,)):
            raise refuse(f"{path}.{key}", f"{value!r} given; surgeries of type lora do not support this Levanter key")
    keys = {new: section.get(old, default) for old, (new, default) in _KEYS.items()}
    surgery = {"type": "lora", "target": _target(section.get(_TARGETS), path, refuse), **keys}
    return [{"name": "lora", "surgery": [surgery], "trainable": [r"\.[ab]$"]}]


def _target(modules: Any, path: str, refuse: Refuse) -> str:
    """The regular expression for `target_modules`: a list of names, an expression, or null for all linear layers."""
    if modules is None:
        return "."
    if isinstance(modules, str):
        return modules
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise refuse(f"{path}.{_TARGETS}", f"{modules!r} given; names of layers or a regular expression expected")
    names: dict[str, None] = dict.fromkeys(_MODULES.get(str(name), re.escape(str(name))) for name in modules)
    return f"({'|'.join(names)})$"
