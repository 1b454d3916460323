"""Renames tensors, to import weights from other programs."""

import re
from collections.abc import Mapping

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.safetensors_file import TensorInfo
from jaxlm.interop.hf.tensor_files import TensorSource


class RenamedTensors:
    """A tensor source with other names.

    Args:
        rules: regular expression on the full name in `source` -> new name (`\\1` for groups). The first match applies;
            tensors without a match are skipped.

    Raises:
        ConfigError: an expression is invalid or matches nothing, or two tensors get the same name.
    """

    def __init__(self, source: TensorSource, rules: Mapping[str, str]):
        self._source = source
        self._names: dict[str, str] = {}
        compiled = {_compiled(pattern): name for pattern, name in rules.items()}
        used = set()
        for theirs in source.tensors:
            for pattern, name in compiled.items():
                if match := pattern.fullmatch(theirs):
                    ours = match.expand(name)
                    if ours in self._names:
                        raise ConfigError(f"'{self._names[ours]}' and '{theirs}' are both renamed to '{ours}'")
                    self._names[ours] = theirs
                    used.add(pattern)
                    break
        for pattern in compiled:
            if pattern not in used:
                raise ConfigError(
                    f"the rule '{pattern.pattern}' matches no tensor. Tensors: {', '.join(list(source.tensors)[:8])}, ..."
                )

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        infos = self._source.tensors
        return {ours: infos[theirs] for ours, theirs in self._names.items()}

    def view(self, name: str) -> np.ndarray:
        return self._source.view(self._names[name])


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"'{pattern}' is not a valid regular expression: {error}") from error
