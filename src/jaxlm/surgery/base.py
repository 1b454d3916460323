"""The surgery interface: changes a model at the start of a phase."""

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import draccus
import jax
import numpy as np

from jaxlm.models.base import LanguageModel, ModelConfig


@dataclass(frozen=True)
class SurgeryConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.surgery"):
    """A change of the model at the start of a phase."""

    @abc.abstractmethod
    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        """Returns the changed model. Must trace under `jax.eval_shape`: restoring a checkpoint rebuilds the tree that way.

        Args:
            key: random key for new parameters.

        Raises:
            ConfigError: the surgery applies to no part of the model.
        """

    @abc.abstractmethod
    def merge(self, model: LanguageModel) -> LanguageModel:
        """Undoes `apply` on a trained model: a model with the structure from before the surgery, and the same outputs.

        Exports, sampling and generation use it. Must trace under `jax.jit`.
        """

    def exported(self, model: LanguageModel, merged: LanguageModel) -> LanguageModel:
        """The model for an export: `merged`, with what the files of transformers have of this surgery.

        Args:
            model: before this surgery was merged.
            merged: after all surgeries were merged.
        """
        return merged

    def initial_leaves(self, model: LanguageModel, config: ModelConfig) -> Mapping[str, np.ndarray | jax.Array]:
        """Values that replace leaves made by `apply`, such as adapters read from a file: path -> array of the leaf's shape.

        Called once before anything is compiled, to check the files, and once on entering the phase. Never called on resume:
        the checkpoint has the values. All processes call it and must return the same.

        Args:
            model: shapes, dtypes and axes right after this surgery.
            config: config of the model.

        Raises:
            ConfigError: the files are missing, or do not fit the model or this surgery's keys.
        """
        return {}

    def keys_from_files(self, given: Collection[str], config: ModelConfig) -> Mapping[str, Any]:
        """Values for keys that the configuration leaves out, read from the files that other keys name.

        The saved configuration contains them, so that it does not depend on other files. If every such key is given, no
        file may be needed.

        Args:
            given: the keys that are set.
            config: config of the model.
        """
        return {}

    def compiler_options(self, platform: str) -> Mapping[str, bool | int | str]:
        """XLA options for the training steps of a run with this surgery."""
        return {}


def merge_surgeries(model: LanguageModel, surgeries: Sequence[SurgeryConfig]) -> LanguageModel:
    """Merges surgeries that were applied in this order, the last one first."""
    for surgery in reversed(surgeries):
        model = surgery.merge(model)
    return model


def export_form(model: LanguageModel, surgeries: Sequence[SurgeryConfig]) -> LanguageModel:
    """A trained model as exports write it: with merged surgeries, except for what the files of transformers have of them."""
    if not surgeries:
        return model
    *before, last = surgeries
    return last.exported(model, export_form(last.merge(model), before))
