"""The interface of tools: programs that a model calls in the middle of a text, and whose output it reads."""

import abc
from dataclasses import dataclass

import draccus


@dataclass(frozen=True)
class Tool(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.models.inference.tools"):
    """A program that a model calls while it generates. `--tool` of `jaxlm chat` and `jaxlm sample` selects it by name."""

    @abc.abstractmethod
    def run(self, call: str) -> str | None:
        """The output for a call; None if the call has no output, because it is invalid.

        It must not raise, must end soon, and must return the same for the same call: every process of a mesh runs it, and
        all of them continue with its output.
        """
