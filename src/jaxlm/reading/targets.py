"""Reads values that a configuration names once (`vars`), and variants of a run in one file (`targets`).

    vars: {steps: 500, seq_len: 2048}
    targets:
      quick: {vars: {steps: 50, seq_len: 512}}
      paper: {}
    entrypoints: {default: paper, q: quick}

A text that is nothing but `${name}` becomes the value itself, with its type. Inside a longer text, the value is written
out. `$${name}` stands for the text `${name}`. It has a meaning only in a file that has one of these three keys.

The keys of the target override those of the file, as the command line would: sections are merged, lists are replaced, and
`phases.0.num_train_steps` reaches into a list. `entrypoints.default` is used unless the command line names another.
"""

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.core.errors import ConfigError, did_you_mean, listed
from jaxlm.reading.decode import config_error, drop_stale_keys
from jaxlm.reading.overrides import option_tree, override
from jaxlm.reading.yaml import ConfigSource, KeyPath, merge

VARS = "vars"
_MAX_DEPTH = 100  # variables that use one another
_MAX_VALUES = 100_000
_USE = re.compile(r"\$(\$?)\{([^{}]*)\}")


def substituted(source: ConfigSource, path: KeyPath, variables: Mapping[str, Any]) -> Any:
    """The value at a path of a configuration, in which variables have been replaced by their values.

    Args:
        variables: name -> value, which may use other variables.

    Raises:
        ConfigError: a variable is not defined, uses itself, or has no form as text.
    """
    value: Any = source.tree
    for key in path:
        value = value[key]
    return _Substitution(source, variables).of(value, path)


def variables_of(tree: Mapping[str, Any], source: ConfigSource, path: KeyPath = (VARS,)) -> dict[str, Any]:
    """The variables in a section of a configuration. Args: tree: the section that has the key `vars`."""
    section = tree.get(VARS)
    if not isinstance(section, dict | None):
        raise config_error(source, path, f"{section!r} given, a mapping from names to values expected")
    return section or {}


def overridden(variables: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Variables with the values of the command line. Args: options: dotted keys, of which only `vars.NAME` matter here."""
    given: dict[str, Any] = {}
    for option, value in options.items():
        _, _, name = option.partition(".")
        if not name and not isinstance(value, Mapping):
            raise ConfigError(f"command line: --{option}: {value!r} given. Write --{VARS}.NAME value")
        given |= {name: value} if name else value
    for name in given:
        if name not in variables:
            raise ConfigError(f"command line: --{VARS}.{name}: {_undefined(name, variables)}")
    return merge(variables, given)


def unused(names: Iterable[str], tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes the variables that a configuration uses nowhere."""
    used = {use[2] for text in _texts(tree, set()) for use in _USE.finditer(text) if not use[1]}
    return tuple(f"{VARS}.{name}: not used: ${{{name}}} is nowhere in the file" for name in names if name not in used)


def _texts(value: Any, seen: set[int]) -> Iterator[str]:
    """The texts of a tree. What YAML's aliases repeat is read once."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item, seen)


def is_option_of_variables(name: str) -> bool:
    """Tells whether a dotted key of the command line sets variables."""
    return name.partition(".")[0] == VARS


class _Substitution:
    def __init__(self, source: ConfigSource, variables: Mapping[str, Any]):
        self._source = source
        self._variables = variables
        self._num_values = 0

    def of(self, value: Any, path: KeyPath, using: Sequence[str] = ()) -> Any:
        """Args: path: where the value is, for messages; using: the variables whose values these are, outermost first."""
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise config_error(
                self._source, path, f"more than {_MAX_VALUES} values, variables counted where they are used"
            )
        if isinstance(value, dict):
            return {key: self.of(item, (*path, key), using) for key, item in value.items()}
        if isinstance(value, list):
            return [self.of(item, (*path, index), using) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        whole = _USE.fullmatch(value)
        if whole is not None and not whole[1]:
            return copy.deepcopy(self._variable(whole[2], path, using))
        return _USE.sub(lambda use: self._text(use, path, using), value)

    def _variable(self, name: str, path: KeyPath, using: Sequence[str]) -> Any:
        if name not in self._variables:
            raise config_error(self._source, path, f"${{{name}}}: {_undefined(name, self._variables)}")
        if name in using:
            circle = " -> ".join((*using[using.index(name) :], name))
            raise config_error(self._source, path, f"${{{name}}}: the variable uses itself: {circle}. Give one a value")
        if len(using) == _MAX_DEPTH:
            raise config_error(
                self._source, path, f"${{{using[0]}}}: more than {_MAX_DEPTH} variables use one another. Use fewer"
            )
        return self.of(self._variables[name], path, (*using, name))

    def _text(self, use: re.Match[str], path: KeyPath, using: Sequence[str]) -> str:
        if use[1]:
            return f"${{{use[2]}}}"
        value = self._variable(use[2], path, using)
        if isinstance(value, dict | list):
            kind = "mapping" if isinstance(value, dict) else "list"
            raise config_error(
                self._source, path, f"${{{use[2]}}}: a {kind} cannot be part of a text. Make it the whole value"
            )
        if value is None or isinstance(value, bool):
            return "null" if value is None else str(value).lower()
        return str(value)


def _undefined(name: str, variables: Mapping[str, Any]) -> str:
    return (
        f"no such variable in {VARS}.{did_you_mean(name, variables)} Known: {listed(sorted(variables))}. For the text itself,"
        f" write $${{{name}}}"
    )


TARGETS, ENTRYPOINTS, DEFAULT = "targets", "entrypoints", "default"
OPTION = "command line: --target"


@dataclass(frozen=True)
class Selection:
    """Holds what the command line says of the variant to read.

    Attributes:
        target: the name of a target or an entrypoint; None for the default.
        variables: `vars.NAME` -> value.
    """

    target: str | None
    variables: Mapping[str, Any]

    @staticmethod
    def of(target: str | None, options: Mapping[str, Any]) -> "Selection":
        """The selection of a command line. Args: options: its dotted keys."""
        return Selection(target, {name: value for name, value in options.items() if is_option_of_variables(name)})


@dataclass(frozen=True)
class Resolved:
    """A configuration without `vars`, `targets` and `entrypoints`.

    Attributes:
        target: the name of the target that was used; None for a file without one.
        notes: what a user should know about it.
        program: the program whose file it was; None for a configuration of jaxlm.
    """

    source: ConfigSource
    target: str | None
    notes: tuple[str, ...] = ()
    program: str | None = None


def resolve(source: ConfigSource, selection: Selection, kind: type) -> Resolved:
    """Applies a target, and replaces variables by their values.

    Args:
        kind: the dataclass that the file will be decoded to.
    """
    tree = source.tree
    if not {VARS, TARGETS, ENTRYPOINTS} & tree.keys():
        if selection.target is not None:
            raise ConfigError(
                f"{OPTION}: '{selection.target}' given, but the configuration has no {TARGETS}. Remove the option, or add"
                f" `{TARGETS}: {{{selection.target}: {{...}}}}` to the file"
            )
        if selection.variables:
            raise ConfigError(f"command line: --{next(iter(selection.variables))}: the configuration has no {VARS}")
        return Resolved(source, None)
    targets = _targets(source)
    target = entrypoint(source, targets, selection.target)
    over = {} if target is None else targets[target] or {}
    variables = variables_of(tree, source) | variables_of(over, source, (TARGETS, target or "", VARS))
    idle = unused(variables, tree)
    variables = overridden(variables, selection.variables)
    base = {key: value for key, value in tree.items() if key not in (VARS, TARGETS, ENTRYPOINTS)}
    base = {key: substituted(source, (key,), variables) for key in base}
    if target is None:
        return Resolved(ConfigSource(base, source.marks), None, idle)

    path = (TARGETS, target)
    keys = {key: substituted(source, (*path, key), variables) for key in over if key != VARS}
    origin = f"{TARGETS}.{target}."
    dropped = drop_stale_keys(kind, base := copy.deepcopy(base), option_tree(keys, origin))
    notes = [f"target {target} changes a type; these keys are ignored: {', '.join(dropped)}"] if dropped else []
    changed = override(ConfigSource(base, source.marks), keys, origin)
    for place, mark in source.marks.items():
        if place[:2] == path and len(place) > 2:
            first = tuple(int(part) if part.isdecimal() else part for part in str(place[2]).split("."))
            changed.marks[(*first, *place[3:])] = mark
    return Resolved(changed, target, (*idle, *notes))


def entrypoint(source: ConfigSource, targets: Collection[str], wanted: str | None) -> str | None:
    """The target that a name stands for; None if no target is wanted, and none is the default.

    Args:
        targets: names of all targets.
        wanted: the name of a target or an entrypoint; None for the default.
    """
    section = source.tree.get(ENTRYPOINTS)
    if not isinstance(section, dict | None):
        raise config_error(source, (ENTRYPOINTS,), f"{section!r} given, a mapping such as {{default: NAME}} expected")
    aliases = section or {}
    for name, meaning in aliases.items():
        if name in targets and meaning != name:
            raise config_error(
                source,
                (ENTRYPOINTS, name),
                f"'{name}' is a target already. Rename one of the two, or remove the entrypoint",
            )
        _follow(source, name, aliases, targets)  # checks all of them, not only the selected one
    if wanted is None:
        return _follow(source, DEFAULT, aliases, targets) if DEFAULT in aliases else None
    if wanted in targets:
        return wanted
    if wanted in aliases:
        return _follow(source, wanted, aliases, targets)
    raise ConfigError(f"{OPTION}: {_unknown(wanted, [*targets, *aliases])}")


def _follow(source: ConfigSource, name: str, aliases: Mapping[str, Any], targets: Collection[str]) -> str:
    """The target that an entrypoint stands for, which may be another entrypoint."""
    seen = [name]
    while (name := aliases[seen[-1]]) not in targets:
        if name in seen:
            circle = " -> ".join((*seen, name))
            raise config_error(source, (ENTRYPOINTS, seen[0]), f"circular: {circle}. Let one name a target")
        if not isinstance(name, str) or name not in aliases:
            raise config_error(source, (ENTRYPOINTS, seen[-1]), _unknown(name, [*targets, *aliases]))
        seen.append(name)
    return name


def _targets(source: ConfigSource) -> dict[str, Any]:
    section = source.tree.get(TARGETS)
    if not isinstance(section, dict | None):
        raise config_error(source, (TARGETS,), f"{section!r} given, a mapping from names to sections expected")
    for name, keys in (section or {}).items():
        if not isinstance(keys, dict | None):
            raise config_error(source, (TARGETS, name), f"{keys!r} given, a mapping of sections expected")
    return section or {}


def _unknown(name: object, known: Collection[str]) -> str:
    return f"'{name}' is not a target.{did_you_mean(str(name), known)} Known: {listed(sorted(set(known)))}"
