"""Translates Levanter's `data` section (`components`, names with slashes) and its `supervised_data`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxlm.interop.levanter.evals import Refuse

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
