"""All keys of a run's configuration as data, so that `--help` and the check for unknown keys need no jax.

`keys.json` beside this file is generated from the dataclasses by `python docs/generate_guide.py`.
"""

import ast
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draccus.choice_types import CHOICE_TYPE_KEY

from jaxlm.config.decode import unknown_key
from jaxlm.config.overrides import override, parse_arguments
from jaxlm.config.plugins import ENTRY_POINTS, is_import_path
from jaxlm.config.schema import ConfigKey, ConfigSection
from jaxlm.config.yaml import ConfigSource, KeyPath, load_yaml

FILE = Path(__file__).with_name("keys.json")
_LEVANTER_CODE = Path(__file__).parents[1] / "interop" / "levanter"


@dataclass(frozen=True)
class KeyIndex:
    """The sections of a configuration, as `schema.sections` lists them.

    Attributes:
        sections: outer sections first.
        other_spellings: words from Levanter configurations, which are translated later. A trailing `_` marks a prefix.
    """

    sections: tuple[ConfigSection, ...]
    other_spellings: frozenset[str]

    @staticmethod
    def load() -> "KeyIndex":
        """Reads `keys.json`."""
        saved = json.loads(FILE.read_text(encoding="utf-8"))
        return KeyIndex(tuple(map(_section, saved["sections"])), frozenset(saved["other_spellings"]))

    def check(self, source: ConfigSource) -> None:
        """Raises `ConfigError` for an unknown key, as `decode` does. Skips sections whose keys jaxlm cannot know here."""
        self._check(source, source.tree, (), ())

    def _check(self, source: ConfigSource, value: Any, path: KeyPath, section_path: tuple[str, ...]) -> None:
        """Checks the value at `path`. `section_path` is the same path with `N` for each list index."""
        if isinstance(value, list):
            for number, item in enumerate(value):
                self._check(source, item, (*path, number), (*section_path, "N"))
        if not isinstance(value, Mapping):
            return
        if section := self._section_of(value, ".".join(section_path)):
            for key in value:
                is_known = key in (*section.names, *section.former) or (
                    section.choice is not None and key == CHOICE_TYPE_KEY
                )
                if not is_known and not self._is_other_spelling(str(key)):
                    raise unknown_key(source, (*path, key), section.choice, section.names)
        for key, inner in value.items():
            from_folder = key == "model" and value.get("use_hf_model_config")  # its config.json sets the type
            has_type = isinstance(inner, Mapping) and CHOICE_TYPE_KEY in inner
            from_preset = key in ("model", "optimizer") and source.tree.get("preset") and not has_type
            if not (from_folder or from_preset):
                self._check(source, inner, (*path, key), (*section_path, str(key)))

    def _is_other_spelling(self, key: str) -> bool:
        return any(key.startswith(word) if word.endswith("_") else key == word for word in self.other_spellings)

    def _section_of(self, value: Mapping[str, Any], path: str) -> ConfigSection | None:
        """The section that describes a mapping; None if it is unknown."""
        if is_import_path(value.get(CHOICE_TYPE_KEY)):
            return None
        candidates = [section for section in self.sections if section.path == path]
        typed = [section for section in candidates if section.choice is not None]
        if not typed:
            return next(iter(candidates), None)
        choice = value.get(CHOICE_TYPE_KEY)
        return next((s for s in typed if (s.is_default if choice is None else s.choice == choice)), None)


def check_command_line(arguments: Sequence[str]) -> None:
    """Raises `ConfigError` for errors in a training command that need no jax to detect: in options, files and keys."""
    parsed = parse_arguments(arguments)
    source = ConfigSource({}) if parsed.config_path is None else load_yaml(parsed.config_path)
    changes_a_type = any(name.rpartition(".")[2] == CHOICE_TYPE_KEY for name in parsed.options)
    if not changes_a_type and not has_plugins():
        KeyIndex.load().check(override(source, parsed.options))


def has_plugins() -> bool:
    """Whether an installed package registers classes. The index does not contain their keys."""
    return bool(importlib.metadata.entry_points(group=ENTRY_POINTS))


def keys_json(sections: Sequence[ConfigSection]) -> str:
    """The content of `keys.json`."""
    words = {
        word
        for file in _LEVANTER_CODE.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value
        for word in node.value.split(".")
    }
    content = {"sections": [asdict(section) for section in sections], "other_spellings": sorted(words)}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _section(saved: Mapping[str, Any]) -> ConfigSection:
    keys = tuple(ConfigKey(**key) for key in saved["keys"])
    names = {name: tuple(saved[name]) for name in ("names", "former")}
    return ConfigSection(**{**saved, "keys": keys, **names})
