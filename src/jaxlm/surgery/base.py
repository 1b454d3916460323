"""The surgery interface: changes a model at the start of a phase."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import draccus
import jax

from jaxlm.models.base import LanguageModel


@dataclass(frozen=True)
class SurgeryConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.surgery"):
    """A change of the model at the start of a phase."""

    @abc.abstractmethod
    def apply(
        self, model: LanguageModel, *, refs: Mapping[str, LanguageModel], calibration: Any, key: jax.Array
    ) -> LanguageModel:
        """Returns the changed model. Must trace under `jax.eval_shape`: restoring a checkpoint rebuilds the tree that way.

        Args:
            refs: teacher or reference models by name; empty if the run has none.
            calibration: a batch to measure activations on, or None.
            key: random key for new parameters.

        Raises:
            ConfigError: the surgery applies to no part of the model.
        """
