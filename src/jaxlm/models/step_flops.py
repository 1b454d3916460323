"""Counts the floating-point operations (FLOPs) of a training step, of which a loss may need only a part of a model."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxlm.core import tree
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.stack_paths import without_layers_below


@dataclass(frozen=True)
class ModelInStep:
    """A model that a training step reads.

    Attributes:
        config, vocab_size: what the FLOPs of all of it follow from.
        model: its arrays, or their shapes.
        num_multiplied: counts the weights in matrix products that a part of it has. Such parts have None for other leaves.
        frozen: the part of it that does not train; None if all of it trains.
    """

    config: ModelConfig
    vocab_size: int
    model: LanguageModel
    num_multiplied: Callable[[Any], int]
    frozen: Any = None

    def flops_per_token(self, without: Collection[str] = ()) -> FlopsPerToken:
        """FLOPs forward and backward, if all weights train.

        Args:
            without: paths of parameters whose products are not computed.
        """
        left_out = tree.map_leaves(lambda path, leaf: leaf if path in without else None, self.model)
        return self.config.flops_per_token(self.vocab_size).plus(-6.0 * self.num_multiplied(left_out))

    def trained(self, without: Collection[str] = ()) -> FlopsPerToken:
        """FLOPs forward and backward. A frozen matrix has no gradient of its own, which saves 2 of its 6 FLOPs. Its inputs
        are counted as if they had one.

        Args:
            without: as in `flops_per_token`.
        """
        frozen = tree.map_leaves(lambda path, leaf: None if path in without else leaf, self.frozen)
        return self.flops_per_token(without).plus(-2.0 * self.num_multiplied(frozen))

    def above(self, first: int) -> "ModelInStep":
        """The model without its layers below `first`, whose output is stored."""
        config = self.config.with_layers(range(first, self.config.Layers.size))
        return replace(self, config=config, frozen=without_layers_below(self.frozen, first))


def trained_and_read(model: ModelInStep, others: Sequence[ModelInStep]) -> FlopsPerToken:
    """FLOPs per training token: forward and backward of a model, and the forward passes of others."""
    flops = model.trained()
    for other in others:
        flops = flops.with_forward(other.flops_per_token())
    return flops
