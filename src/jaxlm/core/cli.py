"""The command line over the file: overrides by dotted path, and the help text."""

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxlm.core.decode import encode, is_choice
from jaxlm.core.errors import ConfigError
from jaxlm.core.yaml_source import KeyPath, Source, merge, parse_value

_WIDTH = 118
_CONFIG_OPTIONS = ("config_path", "config")


@dataclass(frozen=True)
class Arguments:
    """A command line, taken apart.

    Attributes:
        config_path: the file, if one was named.
        options: dotted path -> value, in the order given.
        help: whether `--help` was asked for.
    """

    config_path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    help: bool = False


def parse_arguments(arguments: Sequence[str]) -> Arguments:
    """Reads `--config_path run.yaml --trainer.seed 1 --optimizer.learning_rate=3e-4`. Values are YAML.

    Raises:
        ConfigError: something that is not an option, an option without a value, or one given twice.
    """
    if any(argument in ("--help", "-h") for argument in arguments):
        return Arguments(help=True)
    given: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--") or option == "--":
            raise ConfigError(f"command line: '{option}' is not an option. Write --section.key value")
        name, equals, text = option[2:].partition("=")
        if not equals:
            if not rest or re.match(r"--[A-Za-z_]", rest[0]):
                raise ConfigError(f"command line: --{name} needs a value (--{name} true, for a switch)")
            text = rest.pop(0)
        if name in given:
            raise ConfigError(f"command line: --{name} is given twice")
        given[name] = text
    named = [given.pop(name) for name in _CONFIG_OPTIONS if name in given]
    if len(named) > 1:
        raise ConfigError("command line: --config_path and --config are the same; give one of them")
    return Arguments(named[0] if named else None, {name: parse_value(text) for name, text in given.items()})


def override(source: Source, options: dict[str, Any]) -> Source:
    """The tree with each option laid over it: sections are merged, lists replaced, `phases.1.name` reaches into a list.

    Raises:
        ConfigError: a path goes through something that is neither a section nor a list.
    """
    tree, marks = source.tree, dict(source.marks)
    for name, value in options.items():
        path: KeyPath = tuple(name.split("."))
        tree = _set(tree, path, value, name)
        marks[tuple(int(p) if str(p).isdigit() else p for p in path)] = f"command line --{name}"
    return Source(tree, marks)


def option_tree(options: dict[str, Any]) -> dict[str, Any]:
    """The options alone, as a tree."""
    tree: dict[str, Any] = {}
    for name, value in options.items():
        tree = _set(tree, tuple(name.split(".")), value, name)
    return tree


def _set(node: Any, path: KeyPath, value: Any, name: str) -> Any:
    if not path:
        return merge(node, value) if isinstance(node, dict) and isinstance(value, dict) else value
    key, rest = path[0], path[1:]
    if node is None:
        node = {}
    if isinstance(node, dict):
        return {**node, key: _set(node.get(key), rest, value, name)}
    if isinstance(node, list):
        if not str(key).isdigit() or int(key) >= len(node):
            raise ConfigError(f"command line: --{name}: '{key}' is no place in a list of {len(node)}")
        return [_set(item, rest, value, name) if i == int(key) else item for i, item in enumerate(node)]
    raise ConfigError(f"command line: --{name}: there is no '{key}' inside of {node!r}")


def help_text(kind: type, command: str) -> str:
    """Every key of a configuration with its type, default and meaning."""
    lines = [
        f"usage: python -m {command} [--config_path FILE] [--section.key VALUE ...]",
        "",
        "Keys of the YAML file, which are options of the command line too (values are read as YAML):",
        *_describe(kind, "", None),
    ]
    return "\n".join(lines)


def _describe(kind: type, prefix: str, instance: Any) -> Iterator[str]:
    docs = attribute_docs(kind)
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        name, default = prefix + item.name, _default(item, instance)
        if default is not dataclasses.MISSING and dataclasses.is_dataclass(default):
            yield f"\n{name}: {docs.get(item.name, '')}"
            if is_choice(hints[item.name]):
                yield from _describe_choices(hints[item.name], name, default)
            else:
                yield from _describe(type(default), f"{name}.", default)
            continue
        shown = "required" if default is dataclasses.MISSING else _short(encode(default))
        yield f"  --{name}  ({_type_name(hints[item.name])}, {shown})"
        yield textwrap.fill(docs.get(item.name, ""), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _describe_choices(kind: Any, name: str, default: Any) -> Iterator[str]:
    for choice, member in sorted(kind.get_known_choices().items()):
        mark = " (the default)" if member is type(default) else ""
        yield f"\n {name}.type: {choice}{mark}"
        yield from _describe(member, f"{name}.", default if member is type(default) else None)


def _default(item: dataclasses.Field, instance: Any) -> Any:
    if instance is not None:
        return getattr(instance, item.name)
    if item.default is not dataclasses.MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else dataclasses.MISSING


def attribute_docs(kind: type) -> dict[str, str]:
    """Attribute -> its sentence in the `Attributes:` sections of a class and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")[2]
        for entry in re.split(r"\n(?= {4}\w)", section):
            names, _, text = entry.strip().partition(": ")
            docs.update({name.strip(): " ".join(text.split()) for name in names.split(",") if text})
    return docs


def _type_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin is not None:
        return f"{origin.__name__} of {_type_name(arguments[-1])}"
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))


def _short(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
