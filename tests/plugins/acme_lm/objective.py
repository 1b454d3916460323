"""An objective that weights the first half of a sequence more. In YAML: `type: acme_lm.objective:FrontLoaded`."""

from dataclasses import dataclass, replace

import haliax as hax

from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.objectives.next_token import NextToken


@dataclass(frozen=True)
class FrontLoaded(ObjectiveConfig):
    """Next-token loss in which early tokens weigh more.

    Attributes:
        front_weight: weight of the tokens in the first half of a sequence; those in the second half have weight 1.
    """

    front_weight: float = 2.0

    def weights(self, batch):
        """The sum of the weights."""
        return NextToken().weights(self._weighted(batch))

    def terms(self, model, batch, slot, *, key):
        """Next-token terms, with weights instead of the mask."""
        return NextToken().terms(model, self._weighted(batch), slot, key=key)

    def _weighted(self, batch: TokenBatch) -> TokenBatch:
        Pos = batch.tokens.resolve_axis("position")
        return replace(
            batch, loss_mask=batch.loss_mask * hax.where(hax.arange(Pos) < Pos.size // 2, self.front_weight, 1.0)
        )
