"""The surgery interface: changes a model at the start of a phase."""

import abc
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import draccus
import jax
import numpy as np
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.core.values.logged import LayerTable
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.models.diffusion import check_is_whole
from jaxlm.models.growth import whole
from jaxlm.reading.choices import Registry

Leaves = Mapping[str, np.ndarray | jax.Array]


@dataclass(frozen=True)
class Wants:
    """Declares what the values of a surgery come from, besides the model and a random key, and what its steps need.

    Attributes:
        references: names of the models in the section `refs` that `fill` reads.
        num_batches: number of batches of the phase's training data to `measure`; 0 if `fill` needs none.
        measure: (the model before the surgery, in the dtypes of the computation; a batch {batch, position}) -> sums over the
            tokens of the batch, a tree of float32 arrays of a fixed structure. They are added up over the batches. Traced.
        describe: (the model before the surgery, in the dtype of storage; the sums, maybe sharded over processes) -> what
            `fill` will decide, or None. All processes call it.
        leaves: (shapes, dtypes and axes of the model right after the surgery; its config) -> values that replace leaves made
            by `apply`, such as adapters read from a file: path -> array of the leaf's shape. Raises `ConfigError` if files
            are missing, or do not fit the model or the keys. Called once before anything is compiled, to check the files, and
            once on entering the phase; never on resume. All processes call it and must return the same.
        compiler_options: platform -> XLA options for the training steps of a run with this surgery.
    """

    references: tuple[str, ...] = ()
    num_batches: int = 0
    measure: Callable[[LanguageModel, TokenBatch], Any] | None = None
    describe: Callable[[LanguageModel, Any], LayerTable | None] = lambda model, sums: None
    leaves: Callable[[LanguageModel, ModelConfig], Leaves] = lambda model, config: {}
    compiler_options: Mapping[str, Mapping[str, bool | int | str]] = field(default_factory=dict)

    def __post_init__(self):
        if self.num_batches and self.measure is None:
            raise ConfigError(f"surgery: wants.num_batches: {self.num_batches} given without measure. Set both")


@dataclass(frozen=True)
class SurgeryConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A change of the model at the start of a phase: `apply`, then `fill`, then the leaves that it reads from files."""

    @property
    def wants(self) -> Wants:
        """What it needs besides the model."""
        return Wants()

    @abc.abstractmethod
    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        """Returns the changed model. Must trace under `jax.eval_shape`: restoring a checkpoint rebuilds the tree that way.

        Args:
            key: random key for new parameters.

        Raises:
            ConfigError: the surgery applies to no part of the model.
        """

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
            refs: the models of `wants.references`, by name.
            sums: what `wants.measure` returned, summed over the batches; None if there are none.

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

    def keys_from_files(self, keys: Mapping[str, Any], config: ModelConfig) -> Mapping[str, Any]:
        """Values for keys that the configuration leaves out, read from the files that other keys name, or from the model.

        The saved configuration contains them, so that it does not depend on other files. If every such key is given, no
        file may be needed.

        Args:
            keys: the keys that are set, with what is written there.
            config: config of the model before the surgery.
        """
        return {}


class ArraySurgery(SurgeryConfig):
    """A surgery that changes single arrays, and nothing else.

    A run that starts with the weights in a folder changes each array when it has read it, one layer at a time, and never
    holds the whole model as it was before.
    """

    @abc.abstractmethod
    def on_read(self, model: LanguageModel) -> Mapping[str, Callable[[NamedArray], Any]]:
        """Path -> change of each array. Args: model: shapes and dtypes of the model before the surgery."""

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        changes = self.on_read(model)
        return tree.map_leaves(lambda path, leaf: changes[path](leaf) if path in changes else leaf, model)


def changes_on_read(
    surgeries: Sequence[SurgeryConfig], model: LanguageModel
) -> Iterator[Mapping[str, Callable[[NamedArray], Any]]]:
    """Yields `on_read` of the first surgeries, as long as they change single arrays alone. Args: model: before them."""
    for surgery in surgeries:
        if not isinstance(surgery, ArraySurgery):
            return
        yield surgery.on_read(model)
        model = jax.eval_shape(functools.partial(surgery.apply, key=jax.random.key(0)), model)


def check_calibration(surgeries: Sequence[SurgeryConfig], batch: Any, data_type: str) -> None:
    """Raises `ConfigError` if a surgery measures batches that do not say what the model reads."""
    if any(surgery.wants.num_batches for surgery in surgeries) and not hasattr(batch, "supervised"):
        raise ConfigError(
            f"surgery: it measures the model on the phase's data, but data.type: {data_type} makes {type(batch).__name__},"
            " which does not say what the model reads (`supervised()`). Calibrate in an earlier phase with data.type: tokens,"
            " or remove what measures (init: eva)"
        )


def merge_surgeries(model: LanguageModel, surgeries: Sequence[SurgeryConfig]) -> LanguageModel:
    """Merges surgeries that were applied in this order, the last one first, and joins the stacks that they have made."""
    for surgery in reversed(surgeries):
        model = surgery.merge(model)
    return whole(model)


def stored_form(model: LanguageModel, surgeries: Sequence[SurgeryConfig]) -> LanguageModel:
    """A model with the numbers that the first of these surgeries leave of it: those that change single arrays."""
    for surgery in itertools.takewhile(lambda one: isinstance(one, ArraySurgery), surgeries):
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
