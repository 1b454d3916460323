"""Levanter's spelling of the `data` section: `components`, names with slashes; and what it has beside, `supervised_data`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError

_CACHE_OPTIONS = "cache_options"
_OF_SOURCE = ("validation_urls", "cache_dir", "tags")
_OF_FORMAT = ("input_field", "output_field")


def data_section(section: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The section with its spellings replaced by those here, and a line on each that was."""
    notes: list[str] = []
    made = _source(section, "data", notes.append)
    if "components" in made:
        parts = made.pop("components")
        made["configs"] = {name: _component(part) for name, part in parts.items()}
        notes.append("data.components is read as data.configs")
    if isinstance(made.get("configs"), Mapping):
        _name_sources(made, notes.append)
    if made.get("stop_strategy") == "restart_strategy":
        made["stop_strategy"] = "restart"
    length = made.get("shuffle")
    if isinstance(length, int) and not isinstance(length, bool):
        made["shuffle"] = {"type": "era", "era_length": length}
        notes.append(f"data.shuffle: {length} is read as {{type: era, era_length: {length}}}")
    return made, notes


def supervised_sources(
    given: Mapping[str, Any], refuse: Callable[[str, str], ConfigError]
) -> dict[str, dict[str, Any]]:
    """The sources of `supervised_data`, prompts with completions to evaluate on.

    Args:
        refuse: (path, what is wrong with it) -> the error that says so.
    """
    made = {}
    for name, source in given.items():
        if not isinstance(source, Mapping) or not source.get("validation_urls"):
            raise refuse(f"supervised_data.{name}", f"{source!r} given; a section with validation_urls expected")
        for key, value in source.items():
            if key not in (*_OF_SOURCE, *_OF_FORMAT) and value is not None:
                raise refuse(
                    f"supervised_data.{name}.{key}", f"{value!r} given; sources to evaluate on have no such key"
                )
        fields = {key: source[key] for key in _OF_FORMAT if source.get(key)}
        kept = {key: source[key] for key in _OF_SOURCE if source.get(key)}
        made[name] = kept | {"format": {"type": "supervised", **fields}}
    return made


def _source(section: Mapping[str, Any], key: str, note: Callable[[str], None]) -> dict[str, Any]:
    made = {name: value for name, value in section.items() if name != _CACHE_OPTIONS}
    if section.get(_CACHE_OPTIONS):
        note(f"{key}.{_CACHE_OPTIONS} is left out: how much is tokenized at once follows from the machine")
    return made


def _component(part: Any) -> Any:
    """One of `components`: its `source`, whose `type` follows from its keys, and what stands beside it."""
    if not isinstance(part, Mapping) or not isinstance(part.get("source"), Mapping):
        return part
    beside = {key: value for key, value in part.items() if key != "source"}
    return beside | {key: value for key, value in part["source"].items() if key != "type"}


def _name_sources(made: dict[str, Any], note: Callable[[str], None]) -> None:
    """Names become ones that can be folders, and those that are only evaluated on need no weight."""
    configs = {
        name: _source(part, f"data.configs.{name}", note) if isinstance(part, Mapping) else part
        for name, part in made["configs"].items()
    }
    names = {name: name.replace("/", ".") for name in configs}
    made["configs"] = {names[name]: _in_its_group(name, part) for name, part in configs.items()}
    if names.keys() != made["configs"].keys():
        note("data.configs: names with a slash get a point, and the part before it as a tag")
    trained = {names[name] for name, part in configs.items() if not isinstance(part, Mapping) or _is_trained(part)}

    def weights(given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        renamed = {names.get(name, name): weight for name, weight in given.items()}
        only_evaluated = made["configs"].keys() - trained
        return {name: weight for name, weight in renamed.items() if weight != 0 or name not in only_evaluated}

    stages = made.get("train_weights")
    if isinstance(stages, list):
        made["train_weights"] = [[*s[:-1], weights(s[-1])] if isinstance(s, list) and s else s for s in stages]
    elif stages is not None:
        made["train_weights"] = weights(stages)


def _is_trained(source: Mapping[str, Any]) -> bool:
    return any(source.get(key) for key in ("train_urls", "id", "source"))


def _in_its_group(name: str, part: Any) -> Any:
    group, slash, _ = name.rpartition("/")
    if not slash or not isinstance(part, Mapping):
        return part
    return {**part, "tags": [*(part.get("tags") or []), group.replace("/", ".")]}
