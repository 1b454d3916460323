"""Counts the floating-point operations (FLOPs) of a training step, of which a loss may need only a part of a model."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from jaxlm.core import tree
from jaxlm.models.base import LanguageModel
from jaxlm.models.flops import FlopsPerToken


@dataclass(frozen=True)
class ModelInStep:
    """A model that a training step reads.

    Attributes:
        whole: its FLOPs, forward and backward, if all of it is needed and trains.
        model: its arrays, or their shapes.
        num_multiplied: counts the weights in matrix products that a part of it has. Such parts have None for other leaves.
        frozen: the part of it that does not train; None if all of it trains.
    """

    whole: FlopsPerToken
    model: LanguageModel
    num_multiplied: Callable[[Any], int]
    frozen: Any = None

    def flops_per_token(self, without: Collection[str] = ()) -> FlopsPerToken:
        """FLOPs forward and backward, if all weights train.

        Args:
            without: paths of parameters whose products are not computed.
        """
        left_out = tree.map_leaves(lambda path, leaf: leaf if path in without else None, self.model)
        return self.whole.plus(-6.0 * self.num_multiplied(left_out))

    def trained(self, without: Collection[str] = ()) -> FlopsPerToken:
        """FLOPs forward and backward. A frozen matrix has no gradient of its own, which saves 2 of its 6 FLOPs. Its inputs
        are counted as if they had one.

        Args:
            without: as in `flops_per_token`.
        """
        frozen = tree.map_leaves(lambda path, leaf: None if path in without else leaf, self.frozen)
        return self.flops_per_token(without).plus(-2.0 * self.num_multiplied(frozen))
