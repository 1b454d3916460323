"""Tensors under other names: for files of programs that no family covers."""

import re
from collections.abc import Mapping

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.safetensors_file import TensorInfo
from jaxlm.interop.hf.tensor_files import TensorSource


class Renamed:
    """A source under other names."""

    def __init__(self, source: TensorSource, rules: Mapping[str, str]):
        """Args: rules: regular expression on a whole name of the source -> the name it gets (`\\1` for groups); a name
        that none matches is left out, and the first that matches counts.

        Raises:
            ConfigError: an expression that is none, or that matches nothing, or two names that become one.
        """
        self._source = source
        self._names: dict[str, str] = {}
        compiled = {_compiled(pattern): name for pattern, name in rules.items()}
        used = set()
        for theirs in source.tensors:
            for pattern, name in compiled.items():
                if match := pattern.fullmatch(theirs):
                    ours = match.expand(name)
                    if ours in self._names:
                        raise ConfigError(f"both '{self._names[ours]}' and '{theirs}' become '{ours}'")
                    self._names[ours] = theirs
                    used.add(pattern)
                    break
        for pattern in compiled:
            if pattern not in used:
                raise ConfigError(
                    f"the rule '{pattern.pattern}' matches no tensor. There are: {', '.join(list(source.tensors)[:8])}, ..."
                )

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        there = self._source.tensors
        return {ours: there[theirs] for ours, theirs in self._names.items()}

    def view(self, name: str) -> np.ndarray:
        return self._source.view(self._names[name])


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"'{pattern}' is not a regular expression: {error}") from error
