"""Parameters with an update rule of their own: parameter - step * sign(gradient).

No optimizer, weight decay or clipping sees them. Their gradient need not be that of the loss: the module that declares them
defines it, and the step adds it up over microbatches and devices as every other.
"""

import abc
from collections.abc import Mapping
from typing import Any

import equinox as eqx

from jaxlm.core import tree


class DeclaresSteps(eqx.Module):
    """A module that says which of its parameters are updated so."""

    @abc.abstractmethod
    def steps(self) -> Mapping[str, float]:
        """Path in the module -> step of the parameter there, whether the module holds the array or not (frozen, masked)."""


def own_steps(params: Any) -> dict[str, float]:
    """Path -> step of each parameter in a tree that has a step of its own."""
    held = {path for path, _ in tree.leaves(params)}
    declared = {
        f"{path}.{name}".lstrip("."): step
        for path, module in tree.modules_by_path(params, DeclaresSteps)
        for name, step in module.steps().items()
    }
    return {path: step for path, step in declared.items() if path in held}
