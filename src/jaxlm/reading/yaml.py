"""Loads YAML files as plain values and records the file and line of each value.

    key: !include other.yaml      uses the other file's content as the value; paths are relative to the including file
    <<: !include base.yaml        inherits the other file's keys; this file overrides them, and sections are merged
    include: base.yaml            at the top of a file, the same as `<<: !include base.yaml`; also a list

Included files are in the project: the folder of the first file, or one that the caller names. `..` and links do not lead out.
Recipes are included by their names: `<<: !include jaxlm:quickstart.yaml`.

`6E-4` is a number, only `true` and `false` are booleans, and `1:30`, `0x10` and `2026-01-01` are strings. A duplicate key is
an error, because YAML would silently drop the first one.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import read_text
from jaxlm.reading.recipes import SCHEME, all_recipes, config_file, recipe

KeyPath = tuple[str | int, ...]
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MAX_VALUES = 100_000
_INCLUDE = "include"
_SHOWN = 60  # characters of an invalid value in a message


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


def load_yaml(path: Path | str, root: Path | None = None) -> ConfigSource:
    """Loads a file and all files that it includes. Errors name the file and line.

    Args:
        root: the folder that has all included files; None for the folder of the file.
    """
    path = config_file(path)
    reader = _Reader(root)
    with _limited_depth(str(path)):
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
    """Parses a value from the command line as YAML. Paths of `!include` are relative to the current folder.

    `include FILE`, as Draccus spells it there, is the same as `!include FILE`.

    Raises:
        ConfigError: the text is not YAML, or the file cannot be read.
    """
    if text.startswith("include "):
        text = f"!{text}"
    with _limited_depth("the value"):
        try:
            return _Reader().text(text, "the value", (), (Path.cwd() / "command line",))
        except ConfigError as error:
            if text.startswith("!include"):
                raise
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            raise ConfigError(f"{shown!r} is not a valid YAML value: {error}") from error


def without_quotes(text: str) -> Any:
    """The number, boolean or null that YAML reads where a text is written without quotes; else the text itself."""
    loader = _Loader("")
    try:
        return loader.construct_object(yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text))
    except (ValueError, yaml.YAMLError):  # a number of 5000 digits, a `<<`
        return text


@contextlib.contextmanager
def _limited_depth(name: str) -> Iterator[None]:
    try:
        yield
    except RecursionError:  # no cause: its traceback has a thousand lines
        raise ConfigError(
            f"{name}: nested too deeply, or contains itself. Use fewer levels, aliases or includes"
        ) from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the number and boolean syntax of YAML 1.2, but with decimal integers only."""


_OWN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "int", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag not in _OWN_TAGS]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789"))


def _decimal(loader: Any, node: Any) -> int:
    return int(loader.construct_scalar(node).replace("_", ""))  # `010` is ten, not octal


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)
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

    def __init__(self, root: Path | None = None) -> None:
        self.marks: dict[KeyPath, str] = {}
        self._num_values = 0
        self._root = None if root is None else root.resolve()

    def file(self, path: Path, at: KeyPath, chain: tuple[Path, ...]) -> Any:
        if "\0" in str(path):
            raise ConfigError(f"{str(path)!r}: a path cannot contain a NUL character")
        resolved = path.resolve()
        if self._root is None:
            self._root = resolved.parent
        elif chain and not (
            resolved.is_relative_to(self._root) or resolved in map(Path.resolve, all_recipes().values())
        ):
            raise ConfigError(
                f"{self.marks.get(at, path)}: !include {path}: {resolved} is outside of the project {self._root}, the"
                " folder of the first file. Move the file there, or name a folder that has all files: --config_root FOLDER"
            )
        if resolved in chain:
            circle = " -> ".join(p.name for p in (*chain, resolved))
            raise ConfigError(f"{self.marks.get(at, path)}: circular !include: {circle}. Remove one of the includes")
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            by = f"{self.marks.get(at, '')}: !include " if chain else ""
            is_recipe = not chain and path.as_posix() in all_recipes()
            hint = f". The recipe of this name is {SCHEME}{path}" if is_recipe else ""
            raise ConfigError(f"{by}{path}: cannot be read ({reason}). The full path is {resolved}{hint}") from error
        return self.text(text, str(path), at, (*chain, resolved))

    def included(self, name: str, at: KeyPath, chain: tuple[Path, ...]) -> Any:
        """The value of a file that another one includes, or of a recipe."""
        path = recipe(name.removeprefix(SCHEME)) if name.startswith(SCHEME) else chain[-1].parent / name
        return self.file(path, at, chain)

    def text(self, text: str, name: str, at: KeyPath, chain: tuple[Path, ...]) -> Any:
        """The value of a YAML text. Args: name: what messages call it; chain: the files that include it, and itself."""
        try:
            loader = _Loader(text)
            loader.name = name
            node = loader.get_single_node()
            return None if node is None else self.value(loader, node, at, chain)
        except yaml.YAMLError as error:
            line, problem = _located(error, text)
            raise ConfigError(f"{name}:{line}: {problem}") from error

    def value(self, loader: _Loader, node: yaml.Node, at: KeyPath, chain: tuple[Path, ...]) -> Any:
        self.marks[at] = self._mark(node)
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise ConfigError(f"{self.marks[at]}: more than {_MAX_VALUES} values, aliases counted where they are used")
        if node.tag == "!include":
            return self.included(str(node.value), at, chain)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTIONS:
            raise ConfigError(f"{self.marks[at]}: the tag '{node.tag}' is not supported. Remove it")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(loader, node, at, chain)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(loader, child, (*at, i), chain) for i, child in enumerate(node.value)]
        return self._scalar(loader, node)

    def _scalar(self, loader: _Loader, node: yaml.Node) -> Any:
        try:
            return loader.construct_object(node)
        except (ValueError, ArithmeticError, TypeError, LookupError, AttributeError) as error:  # `!!int x`, 5000 digits
            text = str(node.value)[:_SHOWN]
            raise ConfigError(f"{self._mark(node)}: '{text}' is not a valid {node.tag.rpartition(':')[2]}") from error

    def mapping(self, loader: _Loader, node: yaml.MappingNode, at: KeyPath, chain: tuple[Path, ...]) -> dict[str, Any]:
        below: dict[str, Any] = {}
        written: dict[str, yaml.Node] = {}
        includes = [] if at else [pair for pair in node.value if pair[0].value == _INCLUDE]
        for key_node, value_node in includes:
            for name, place in self._include_names(loader, key_node, value_node):
                self.marks[at] = place
                base = self.included(name, at, chain)
                if not isinstance(base, dict):
                    raise ConfigError(f"{place}: include: {name} has {_kind(base)}, a mapping of sections expected")
                below = merge(below, base)
        for key_node, value_node in node.value:
            if key_node.tag != "tag:yaml.org,2002:merge":
                key = str(self._scalar(loader, key_node))
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
            if key_node.tag != "tag:yaml.org,2002:merge" and (key_node, value_node) not in includes:
                key = str(self._scalar(loader, key_node))
                above[key] = self.value(loader, value_node, (*at, key), chain)
                self.marks[(*at, key)] = self._mark(key_node)
        return merge(below, above)

    def _include_names(self, loader: _Loader, key: yaml.Node, value: yaml.Node) -> list[tuple[str, str]]:
        """The files of the key `include` at the top of a file, each with its place."""
        nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
        names = []
        for node in nodes:
            name = self._scalar(loader, node) if isinstance(node, yaml.ScalarNode) else None
            if not isinstance(name, str):
                raise ConfigError(f"{self._mark(key)}: include: the name of a YAML file, or a list of names, expected")
            names.append((name, self._mark(node)))
        return names

    @staticmethod
    def _mark(node: yaml.Node) -> str:
        return f"{node.start_mark.name}:{node.start_mark.line + 1}"


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


_LATE = ("while scanning", "while parsing a flow")  # what is not closed is noticed on a later line


def _located(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """The line of a text to mend, and what is wrong there."""
    if isinstance(error, yaml.reader.ReaderError):
        return text.count("\n", 0, error.position) + 1, f"the character {chr(error.character)!a} is not allowed"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return 1, str(error)
    problem, line = str(error.problem), error.problem_mark.line + 1
    if problem.startswith("but "):  # it continues the context
        problem = f"{error.context}, {problem}"
    begin = error.context_mark
    if begin is not None and begin.line + 1 < line and str(error.context).startswith(_LATE):
        return begin.line + 1, f"{error.context}: {problem}"
    return min(line, len(text.rstrip().splitlines()) or 1), problem  # the end of a text is behind its last line
