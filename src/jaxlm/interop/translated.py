"""The configuration that another program's file is translated to, with the origin of each value."""

from typing import Any

from jaxlm.interop.section import Section
from jaxlm.reading.yaml import ConfigSource, KeyPath


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
        """Whether a key has been set."""
        node: Any = self._tree
        for name in path.split("."):
            if not isinstance(node, dict) or name not in node:
                return False
            node = node[name]
        return True

    def source(self) -> ConfigSource:
        """What has been written."""
        return ConfigSource(_with_lists(self._tree), dict(self._marks))


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(isinstance(key, int) for key in node):
        return [_with_lists(node[key]) for key in sorted(node)]
    return {key: _with_lists(value) for key, value in node.items()}
