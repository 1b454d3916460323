"""Loads YAML files as plain values and records the file and line of each value.

    key: !include other.yaml      uses the other file's content as the value; paths are relative to the including file
    <<: !include base.yaml        inherits the other file's keys; this file overrides them, and sections are merged

`6E-4` is a number, and only `true` and `false` are booleans. A duplicate key is an error, because YAML would silently drop
the first one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxlm.config.recipes import config_file
from jaxlm.core.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class ConfigSource:
    """The content of a configuration file, with the origin of each value.

    Attributes:
        tree: dictionaries, lists and scalars.
        marks: path of each key or list entry -> `file:line`, or another description of its origin.
    """

    tree: dict[str, Any]
    marks: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """The origin of a path, or of its nearest recorded parent; empty if there is none."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, "")


def load_yaml(path: Path | str) -> ConfigSource:
    """Loads a file and all files that it includes. Errors name the file and line."""
    path = config_file(path)
    reader = _Reader()
    tree = reader.file(path, at=(), chain=())
    if tree is None:
        raise ConfigError(f"{path}: the file is empty. Add at least one section, such as `trainer:`")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the file contains {_kind(tree)}, not a mapping of sections (data:, model:, ...)")
    return ConfigSource(tree, reader.marks)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges `above` over `below`: mappings are merged key by key, all other values are replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_value(text: str) -> Any:
    """Parses a value from the command line as YAML. Raises `ConfigError` on a syntax error."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"'{text}' is not a valid YAML value: {_problem(error)}") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the number and boolean syntax of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
        r"|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


class _Reader:
    """Walks YAML nodes and collects values and marks."""

    def __init__(self) -> None:
        self.marks: dict[KeyPath, str] = {}

    def file(self, path: Path, at: KeyPath, chain: tuple[Path, ...]) -> Any:
        resolved = path.resolve()
        if resolved in chain:
            circle = " -> ".join(p.name for p in (*chain, resolved))
            raise ConfigError(f"{self.marks.get(at, path)}: circular !include: {circle}. Remove one of the includes")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            by = f"{self.marks.get(at, '')}: !include " if chain else ""
            raise ConfigError(f"{by}{path}: cannot be read ({reason}). The full path is {resolved}") from error
        loader = _Loader(text)
        loader.name = str(path)
        try:
            node = loader.get_single_node()
            return None if node is None else self.value(loader, node, at, (*chain, resolved))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {_problem(error)}") from error
        finally:
            loader.dispose()

    def value(self, loader: _Loader, node: yaml.Node, at: KeyPath, chain: tuple[Path, ...]) -> Any:
        self.marks[at] = self._mark(node)
        if node.tag == "!include":
            return self.file(chain[-1].parent / str(node.value), at, chain)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(loader, node, at, chain)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(loader, child, (*at, i), chain) for i, child in enumerate(node.value)]
        return loader.construct_object(node)

    def mapping(self, loader: _Loader, node: yaml.MappingNode, at: KeyPath, chain: tuple[Path, ...]) -> dict[str, Any]:
        below: dict[str, Any] = {}
        written: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag != "tag:yaml.org,2002:merge":
                key = str(loader.construct_object(key_node))
                if key in written:
                    dotted, first = ".".join(map(str, (*at, key))), written[key].start_mark.line + 1
                    raise ConfigError(
                        f"{self._mark(key_node)}: duplicate key '{dotted}', first set on line {first}. Merge the two"
                    )
                written[key] = key_node
                continue
            for included in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                base = self.value(loader, included, at, chain)
                if not isinstance(base, dict):
                    raise ConfigError(f"{self._mark(value_node)}: `<<` needs a mapping, found {_kind(base)}")
                below = merge(below, base)
        above = {}
        for key_node, value_node in node.value:
            if key_node.tag != "tag:yaml.org,2002:merge":
                key = str(loader.construct_object(key_node))
                above[key] = self.value(loader, value_node, (*at, key), chain)
                self.marks[(*at, key)] = self._mark(key_node)
        return merge(below, above)

    @staticmethod
    def _mark(node: yaml.Node) -> str:
        return f"{node.start_mark.name}:{node.start_mark.line + 1}"


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error)
