"""Another program's file whose keys are taken one by one, and the configuration that it is translated to."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError, did_you_mean, listed, shown
from jaxlm.reading.decode import config_error
from jaxlm.reading.yaml import ConfigSource, KeyPath

TOKENS = ".npy"
_HUB = "hf://"
_HUB_NAME = re.compile(r"([^/@\s]+/)?[^/@\s]+(@\S+)?")
_TEXT = (".txt", ".jsonl", ".json", ".parquet")


def hub_name(path: str) -> str:
    """A model or dataset as jaxlm names it: `hf://org/name@revision` without its scheme, a path as it is."""
    return path.removeprefix(_HUB)


NOTHING = (None, False, {}, [], "")


def as_yaml(value: Any) -> str:
    """A value for a message. YAML writes true and false in lower case."""
    return str(value).lower() if isinstance(value, bool) else shown(value)


class Section:
    """The keys of one mapping that have not been taken yet.

    Attributes:
        path: where it is in the file.
    """

    def __init__(self, source: ConfigSource, path: KeyPath, keys: Any, notes: list[str]):
        self._source = source
        self.path = path
        self._notes = notes
        if not isinstance(keys, Mapping):
            raise config_error(source, path, f"{as_yaml(keys)} given, a section with keys expected")
        self._keys = dict(keys)
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return self._keys.get(key) is not None

    def take(self, key: str, default: Any = None) -> Any:
        """Removes a key and returns its value; the default if it is missing or null.

        Raises:
            ConfigError: it is a number that is not finite, or has one.
        """
        self._known.append(key)
        value = self._keys.pop(key, None)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, float) and not math.isfinite(one):
                raise self.error(key, f"{one} given, a finite number expected")
        return default if value is None else value

    def peek(self, key: str) -> Any:
        """The value of a key, which stays; None if it is missing."""
        return self._keys.get(key)

    def number(self, key: str, default: float | None = None) -> Any:
        """Like `take`, for a number that the translation computes with."""
        value = self.take(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.error(key, f"{as_yaml(value)} given, a number expected")
        return value

    def choice(self, key: str, allowed: Collection[Any], default: Any = None) -> Any:
        """Like `take`, for one of a few values."""
        value = self.take(key, default)
        if value is not None:
            self.check_choice(key, value, allowed)
        return value

    def check_choice(self, key: str, value: Any, allowed: Collection[Any]) -> None:
        """Raises `ConfigError` if a key's value is not one of a few."""
        if value not in tuple(allowed):  # a list cannot be looked up in a mapping
            texts = [as_yaml(one) if isinstance(one, bool) else str(one) for one in allowed]
            raise self.error(key, f"{as_yaml(value)} given. Allowed: {listed(texts)}")

    def section(self, key: str) -> "Section":
        """A section inside of this one; empty if it is missing."""
        return self.inside(key, self.take(key, {}))

    def inside(self, key: str, keys: Any) -> "Section":
        """A section with the value of a key that has been taken."""
        return Section(self._source, (*self.path, key), keys, self._notes)

    def sections(self, key: str) -> list["Section"]:
        """A list of sections inside of this one."""
        value = self.take(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"{as_yaml(value)} given, a list of sections expected")
        return [Section(self._source, (*self.path, key, index), item, self._notes) for index, item in enumerate(value)]

    def ignore(self, key: str, reason: str) -> None:
        """Takes a key without an effect, and says so if it asks for something."""
        if self.take(key) not in NOTHING:
            self.note(key, reason)

    def refuse(self, key: str, instead: str, *without_effect: Any) -> None:
        """Raises `ConfigError` if the key is set, except to nothing or to a value without an effect."""
        value = self.take(key)
        if not any(value is one or (value == one and type(value) is type(one)) for one in (*NOTHING, *without_effect)):
            raise self.error(key, f"{as_yaml(value)} given, which jaxlm cannot do: {instead}")

    def note(self, key: str, text: str) -> None:
        self._notes.append(f"{self._dotted(key)}: {text}")

    def error(self, key: str, problem: str) -> ConfigError:
        return config_error(self._source, (*self.path, key), problem)

    def where(self, key: str) -> str:
        """The file and line of a key."""
        return self._source.where((*self.path, key))

    def done(self) -> None:
        """Raises `ConfigError` if a key is left."""
        for key in self._keys:
            known = ", ".join(dict.fromkeys(self._known))
            raise self.error(key, f"no such key.{did_you_mean(key, self._known)} Known here: {known}")

    def _dotted(self, key: str) -> str:
        return ".".join(map(str, (*self.path, key)))


class Translated:
    """jaxlm's sections while they are written."""

    def __init__(self) -> None:
        self._tree: dict[Any, Any] = {}
        self._marks: dict[KeyPath, str] = {}

    def put(self, path: str, value: Any, section: Section, key: str) -> None:
        """Sets a key. Args: path: dotted, with numbers for the places in a list; key: of the section, that it comes from.

        Raises:
            ConfigError: the key has another value already.
        """
        *parents, last = (int(name) if name.isdecimal() else name for name in path.split("."))
        node = self._tree
        for name in parents:
            node = node.setdefault(name, {})
        if last in node and node[last] != value:
            before = self._marks[(*parents, last)] or "another key"
            raise section.error(
                key,
                f"{value!r} follows from it, but {node[last]!r} from {before}, and jaxlm has one {path} for all phases. Give"
                " the same in both places",
            )
        node[last] = value
        self._marks[(*parents, last)] = section.where(key)

    def has(self, path: str) -> bool:
        """Tells whether a key has been set."""
        node: Any = self._tree
        for name in path.split("."):
            if not isinstance(node, dict) or name not in node:
                return False
            node = node[name]
        return True

    def source(self) -> ConfigSource:
        """Returns what has been written."""
        return ConfigSource(_with_lists(self._tree), dict(self._marks))


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(isinstance(key, int) for key in node):
        return [_with_lists(node[key]) for key in sorted(node)]
    return {key: _with_lists(value) for key, value in node.items()}


def put_text(path: str, section: Section, key: str, out: Translated) -> None:
    """Writes the source that a path means. Args: key: of the section, that has the path.

    Raises:
        ConfigError: jaxlm cannot read such files.
    """
    if path.startswith(_HUB):
        if not _HUB_NAME.fullmatch(hub_name(path)):
            raise section.error(key, f"'{path}' given, {_HUB}ORG/NAME expected")
        out.put("data.id", hub_name(path), section, key)
        return
    if not path.endswith((TOKENS, *_TEXT)):
        raise section.error(
            key,
            f"'{path}' given, which jaxlm cannot read: token ids in {TOKENS}, text in {', '.join(_TEXT)}, or a dataset"
            f" {_HUB}ORG/NAME expected",
        )
    out.put("data.train_urls", [path], section, key)
    if path.endswith(TOKENS):
        out.put("data.format", {"type": "pretokenized"}, section, key)
