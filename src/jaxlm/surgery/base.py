"""The surgery interface: changes a model at the start of a phase."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import draccus
import jax
import numpy as np
from haliax import NamedArray

from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.models.diffusion import check_is_whole
from jaxlm.models.growth import whole
from jaxlm.reading.choices import Registry


@dataclass(frozen=True)
class SurgeryConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A change of the model at the start of a phase: `apply`, then `fill`, then `initial_leaves`."""

    @abc.abstractmethod
    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        """Returns the changed model. Must trace under `jax.eval_shape`: restoring a checkpoint rebuilds the tree that way.

        Args:
            key: random key for new parameters.

        Raises:
            ConfigError: the surgery applies to no part of the model.
        """

    def on_read(self, model: LanguageModel) -> Mapping[str, Callable[[NamedArray], Any]] | None:
        """Returns what `apply` makes of single arrays, as path -> change, if it changes nothing else; None if it does.

        A run that starts with the weights in a folder then changes each array when it has read it, one layer at a time, and
        never holds the whole model as it was before.

        Args:
            model: shapes and dtypes of the model before the surgery.
        """
        return None

    def changed(self, config: ModelConfig) -> ModelConfig:
        """The config of the model after the surgery. Args: config: of the model before it.

        Only surgeries that change the architecture override it. FLOPs, exports and forecasts read this config; they know
        nothing of surgeries.

        Raises:
            ConfigError: no config describes the model after the surgery.
        """
        return config

    def moved(self, moments: Any, sums: Any) -> Any:
        """A tree with the model's structure, such as moments, with its leaves where those of the model go (`apply`, `fill`).

        Leaves that the tree does not have are None. The result may leave out those that `apply` makes. Must trace.

        Args:
            sums: as in `fill`; None while a checkpoint is restored, which needs the structure alone.
        """
        return moments

    @property
    def references(self) -> tuple[str, ...]:
        """Names of the models in the section `refs` that `fill` reads."""
        return ()

    @property
    def num_calibration_batches(self) -> int:
        """Number of batches of the phase's training data to `measure`; 0 if `fill` needs none."""
        return 0

    def measure(self, model: LanguageModel, batch: TokenBatch) -> Any:
        """Sums over the tokens of a batch, which are added up over the calibration batches. Traced.

        Args:
            model: before the surgery, in the dtypes of the computation.
            batch: {batch, position}.

        Returns:
            A tree of arrays of a fixed structure, in float32.
        """
        raise AssertionError("the surgery is not calibrated")

    def describe(self, model: LanguageModel, sums: Any) -> str | None:
        """Says what `fill` will decide from the sums, for the log. All processes call it.

        Args:
            model: before the surgery, in the dtype of storage.
            sums: as in `fill`, maybe sharded over processes.
        """
        return None

    def fill(
        self,
        model: LanguageModel,
        before: LanguageModel,
        *,
        refs: Mapping[str, LanguageModel],
        sums: Any,
        key: jax.Array,
    ) -> LanguageModel:
        """The model with values that depend on references or on data. Not called when a checkpoint is restored, so it may not
        change the tree. Traced.

        Args:
            model: from `apply`.
            before: the model that `apply` changed.
            refs: the models of `references`, by name.
            sums: what `measure` returned, summed over the calibration batches; None if there are none.

        Raises:
            ConfigError: a reference does not fit. It is also traced on shapes of the references when the run starts.
        """
        return model

    @abc.abstractmethod
    def merge(self, model: LanguageModel) -> LanguageModel:
        """Undoes `apply` on a trained model: a model with the same outputs that its config describes (`changed`).

        What the config does not mention, such as adapters, is gone. A surgery that changes the architecture returns the model
        unchanged. Exports, sampling and generation use it. Must trace under `jax.jit`.
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

    def keys_from_files(self, keys: Mapping[str, Any], config: ModelConfig) -> Mapping[str, Any]:
        """Values for keys that the configuration leaves out, read from the files that other keys name, or from the model.

        The saved configuration contains them, so that it does not depend on other files. If every such key is given, no
        file may be needed.

        Args:
            keys: the keys that are set, with what is written there.
            config: config of the model before the surgery.
        """
        return {}

    def compiler_options(self, platform: str) -> Mapping[str, bool | int | str]:
        """XLA options for the training steps of a run with this surgery."""
        return {}


def merge_surgeries(model: LanguageModel, surgeries: Sequence[SurgeryConfig]) -> LanguageModel:
    """Merges surgeries that were applied in this order, the last one first, and joins the stacks that they have made."""
    for surgery in reversed(surgeries):
        model = surgery.merge(model)
    return whole(model)


def stored_form(model: LanguageModel, surgeries: Sequence[SurgeryConfig]) -> LanguageModel:
    """A model with the numbers that the first of these surgeries leave of it: those that change single arrays (`on_read`)."""
    for surgery in surgeries:
        if surgery.on_read(model) is None:
            break
        model = surgery.merge(surgery.apply(model, key=jax.random.key(0)))
    return model


def export_form(model: LanguageModel, surgeries: Sequence[SurgeryConfig]) -> LanguageModel:
    """A trained model as exports write it: with merged surgeries, except for what the files of transformers have of them.

    Raises:
        ConfigError: no files of other programs describe the model.
    """
    check_is_whole(model.traits.denoisers)
    if not surgeries:
        return whole(model)
    *before, last = surgeries
    return last.exported(model, export_form(last.merge(model), before))
