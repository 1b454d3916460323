"""A configuration of StackWise whose keys are attributes, as its scripts have it."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.interop.stackwise.from_stackwise import from_stackwise
from jaxlm.reading.recipes import config_file
from jaxlm.reading.yaml import ConfigSource, load_yaml, merge

_SECTIONS = ("progressive", "optimizer", "qlora", "architecture", "attention_custom", "tokenizer_embedding")


class Keys:
    """The keys of a section as attributes, to read and to set."""

    def __init__(self, tree: dict[str, Any]):
        object.__setattr__(self, "_tree", tree)

    def __getattr__(self, name: str) -> Any:
        tree = object.__getattribute__(self, "_tree")
        if name in _SECTIONS:
            tree[name] = tree.get(name) or {}
            return Keys(tree[name])
        if name not in tree:
            raise AttributeError(f"'{name}' is not set in this section of the configuration")
        return tree[name]

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_tree")[name] = value


class StackWiseConfig:
    """A configuration of StackWise, whose keys may be changed before training.

    Attributes:
        model, training, data: its sections.
        name: of the file, without its suffix: what a run is called without training.run_id. None without a file.
    """

    def __init__(self, source: ConfigSource | None = None, name: str | None = None):
        tree = copy.deepcopy({} if source is None else source.tree)
        self.name = name
        for section in ("model", "training", "data"):
            tree[section] = tree.get(section) or {}
        self._source = ConfigSource(tree, {} if source is None else source.marks)
        self.model, self.training, self.data = (Keys(tree[section]) for section in ("model", "training", "data"))

    @staticmethod
    def from_yaml(path: Path | str) -> "StackWiseConfig":
        return StackWiseConfig(load_yaml(path), config_file(path).stem)

    def validate(self) -> None:
        """Prints what has no effect here. Raises `ConfigError` for what jaxlm cannot do."""
        self.translated({})

    def translated(self, sizes: Mapping[str, Any], target_stacks: int | None = None) -> ConfigSource:
        """jaxlm's keys. Prints notes.

        Args:
            sizes: keys of `model` that a builder was given.
            target_stacks: number of stacks at the end; None for that of the configuration.
        """
        tree = merge(copy.deepcopy(self._source.tree), {"model": dict(sizes)})
        if target_stacks is not None:
            growth = {"progressive": {"max_stacks": None, "target_stacks": target_stacks}}
            tree["training"] = merge(tree["training"], growth)
        resolved = from_stackwise(ConfigSource(tree, self._source.marks))
        for note in resolved.notes:
            print(f"note: {note}")
        return resolved.source
