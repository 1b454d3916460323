"""What a surgery is: a model into another model."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import draccus
import jax

from jaxlm.models.base import LanguageModel


@dataclass(frozen=True)
class SurgeryConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.surgery"):
    """One change of the model tree at the start of a phase."""

    @abc.abstractmethod
    def apply(
        self, model: LanguageModel, *, refs: Mapping[str, LanguageModel], calibration: Any, key: jax.Array
    ) -> LanguageModel:
        """The changed model. Must trace under `jax.eval_shape`: a restore rebuilds the tree without any numbers.

        Args:
            refs: teacher or reference models by name; empty where the run has none.
            calibration: a batch to measure activations on, or None.
            key: for the new parameters.

        Raises:
            ConfigError: the model has nothing that this surgery applies to.
        """
