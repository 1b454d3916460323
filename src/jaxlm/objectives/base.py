"""What an objective is: numbers to minimise, as sums with their denominators."""

import abc
from dataclasses import dataclass
from typing import Any

import draccus
import jax

from jaxlm.core.types import Sum
from jaxlm.models.base import LanguageModel

Metrics = dict[str, Sum]


@dataclass(frozen=True)
class ObjectiveConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.objectives"):
    """A loss as sums. The engine divides each term by its weight over the *global* batch, so the gradient does not
    depend on how the batch is cut into micro-batches or spread over devices."""

    def init_slot(self, model: LanguageModel) -> Any:
        """The state that the objective keeps between steps, or None."""
        return None

    @abc.abstractmethod
    def weights(self, batch) -> dict[str, jax.Array]:
        """Each term's denominator (scalar float32) over a whole batch, before it is cut into micro-batches."""

    @abc.abstractmethod
    def terms(
        self, model: LanguageModel, batch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms of one micro-batch (differentiable totals), metrics to log, and the new slot."""
