"""What an objective is: numbers to minimise, as sums with their denominators."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import draccus
import jax
import jax.numpy as jnp

from jaxlm.core.types import Sum, TokenBatch
from jaxlm.models.base import AuxLoss, LanguageModel

Metrics = dict[str, Sum]
AUXILIARY = "auxiliary"
"""The term that layers add to an objective: routers' losses."""


def auxiliary_weight(batch: TokenBatch) -> jax.Array:
    """The denominator of what layers add: tokens that are no padding."""
    return jnp.sum(batch.segment_ids.array != 0, dtype=jnp.float32)


def auxiliary_terms(aux: Mapping[str, AuxLoss]) -> tuple[dict[str, Sum], Metrics]:
    """The term that a model's layers add, if they do, and its parts as metrics, without their coefficients."""
    metrics = {name: one.sum for name, one in aux.items()}
    minimised = [one for one in aux.values() if one.coefficient]
    if not minimised:
        return {}, metrics
    total = sum((one.coefficient * one.sum.total for one in minimised), jnp.zeros(()))
    return {AUXILIARY: Sum(total, minimised[0].sum.weight)}, metrics


@dataclass(frozen=True)
class ObjectiveConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.objectives"):
    """A loss as sums. The engine divides each term by its weight over the *global* batch, so the gradient does not
    depend on how the batch is cut into micro-batches or spread over devices."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """Without `type:` it is the loss of the next token."""
        return "next_token"

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
