"""YAML files into plain values, remembering where each one was written.

    key: !include other.yaml      the other file's content as the value; paths are relative to the including file
    <<: !include base.yaml        the other file's keys below this file's: where both have a section, it is merged

Numbers are read as people write them (`6E-4` is one), only `true` and `false` are booleans, and a key that stands twice
in one place is an error, because the first one would be lost without a word.
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
    """What a file says, and where.

    Attributes:
        tree: dictionaries, lists and scalars.
        marks: path of each key or list entry -> `file:line`, or what else it came from.
    """

    tree: dict[str, Any]
    marks: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """The place of a path, or of the nearest thing around it."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, "")


def load_yaml(path: Path | str) -> ConfigSource:
    """Reads a file and everything that it includes.

    Raises:
        ConfigError: no such file, bad syntax, a key twice, an include that is missing or goes in a circle, or a file
            that is empty or not a mapping. Names file and line.
    """
    path = config_file(path)
    reader = _Reader()
    tree = reader.file(path, at=(), chain=())
    if tree is None:
        raise ConfigError(f"{path}: the file is empty. It needs at least one section, such as `trainer:`")
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: the file holds {_kind(tree)}; a mapping of sections was expected (data:, model:, ...)"
        )
    return ConfigSource(tree, reader.marks)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`: mappings are merged key by key, everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_value(text: str) -> Any:
    """A value from the command line, read as YAML. Raises `ConfigError` on bad syntax."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"'{text}' cannot be read as a YAML value: {_problem(error)}") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the number and boolean words of YAML 1.2."""


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
    """Walks YAML nodes, collecting values and marks."""

    def __init__(self) -> None:
        self.marks: dict[KeyPath, str] = {}

    def file(self, path: Path, at: KeyPath, chain: tuple[Path, ...]) -> Any:
        resolved = path.resolve()
        if resolved in chain:
            circle = " -> ".join(p.name for p in (*chain, resolved))
            raise ConfigError(f"{self.marks.get(at, path)}: !include goes in a circle: {circle}")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            by = f"{self.marks.get(at, '')}: !include " if chain else ""
            raise ConfigError(f"{by}{path}: cannot be read ({reason}). Looked for it at {resolved}") from error
        loader = _Loader(text)
        loader.name = str(path)
        try:
            node = loader.get_single_node()
            return None if node is None else self.value(loader, node, at, (*chain, resolved))
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}:{_line_of(error)}: {_problem(error)}") from error
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
                    first = written[key].start_mark.line + 1
                    raise ConfigError(
                        f"{self._mark(key_node)}: the key '{_dotted((*at, key))}' stands here again; it is on line {first}"
                        " already, and one of the two would be lost. Merge them"
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


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _line_of(error: yaml.YAMLError) -> int:
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark is not None else 1


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error)
