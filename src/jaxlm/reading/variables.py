"""Values that a configuration names once: `vars: {width: 512}`, and `${width}` wherever it is needed.

A text that is nothing but `${name}` becomes the value itself, with its type. Inside a longer text, the value is written out.
`$${name}` stands for the text `${name}`.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxlm.core.errors import ConfigError, did_you_mean, listed
from jaxlm.reading.decode import config_error
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
    """Whether a dotted key of the command line sets variables."""
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
