"""Measures a phase's objective on validation batches, as the step measures it on training batches."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxlm.core.types import Sum
from jaxlm.engine.state import RunState
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.base import Metrics, ObjectiveConfig


class ObjectiveMeter:
    """An objective with its references. Its own state is that of the state which `attach` was last called with."""

    def __init__(self, objective: ObjectiveConfig, refs: Mapping[str, LanguageModel]):
        self._objective = objective
        self._refs = dict(refs)
        self._slot: Any = None
        self._program = jax.jit(self._measured)

    def attach(self, state: RunState) -> None:
        """Measures with the objective's state in `state` from now on."""
        self._slot = state.slots.get("objective")

    def __call__(self, model: LanguageModel, batch: Any) -> tuple[dict[str, Sum], Metrics]:
        """The loss terms and metrics of a batch {batch, ...}. Args: model: in the dtypes of the computation."""
        return self._program(model, self._refs, self._slot, batch)

    def _measured(
        self, model: LanguageModel, refs: dict[str, LanguageModel], slot: Any, batch: Any
    ) -> tuple[dict[str, Sum], Metrics]:
        objective = self._objective
        batch = objective.with_batch_statistics(batch)
        batch = objective.annotate({**refs, **objective.references_in_slot(slot, model)}, batch)
        terms, metrics, _ = objective.terms(model, batch, slot, key=None)
        return terms, metrics
