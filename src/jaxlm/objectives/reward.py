"""Reward models: a scalar head scores the chosen completion of each pair higher than the rejected one.

Source: Bradley and Terry 1952, "Rank analysis of incomplete block designs", as the loss of Ouyang et al. 2022
(arXiv:2203.02155), equation 1; the centering of Eisenstein et al. 2023 (arXiv:2312.09244), section 2.
"""

from typing import Any, ClassVar

import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core.axes import EMBED, PAIR, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat
from jaxlm.core.values.batch_types import PairBatch, TokenBatch
from jaxlm.core.values.permutation import text_index
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import AuxLoss, Inputs, LanguageModel, reward_head
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, ObjectiveFacts, auxiliary_terms, auxiliary_weight
from jaxlm.objectives.completions import by_pair, is_pair
from jaxlm.reading.choices import choice


def score(
    model: LanguageModel, batch: TokenBatch, *, key: jax.Array | None = None
) -> tuple[hax.NamedArray, dict[str, AuxLoss]]:
    """The reward of each sequence, float32 {batch}: of its last token that the model reads. And the layers' losses."""
    head = reward_head(model)
    if head is None:
        raise ConfigError(
            "objective.type: reward needs a model with a scalar head. Add `surgery: [{type: reward_head}]` to the phase"
        )
    hidden = model.hidden(Inputs.of(batch), key=key)
    num_tokens = hax.sum(batch.segment_ids > 0, POSITION)
    is_last = text_index(batch.tokens, batch.order).broadcast_to(batch.tokens.axes) == num_tokens - 1
    last = hax.sum(hidden.final.astype(jnp.float32) * is_last, POSITION)
    return hax.dot(last, head.astype(jnp.float32), axis=EMBED), hidden.aux


@choice(ObjectiveConfig, "reward")
class RewardObjective(ObjectiveConfig):
    """Preference pairs (`data.type: pairs`): a reward head (`surgery: [{type: reward_head}]`) scores the chosen completion
    higher than the rejected one. The loss is averaged over pairs.

    Attributes:
        center_coefficient: weight of the squared sum of both rewards of a pair, which keeps their mean near 0; 0 disables it.
    """

    facts: ClassVar[ObjectiveFacts] = ObjectiveFacts(
        batch_types=(PairBatch,), sequences_axis=PAIR, head_in_fp8=False, trains_writing=False
    )

    center_coefficient: NonNegativeFloat = 0.0

    def weights(self, batch: PairBatch) -> dict[str, jax.Array]:
        """The number of pairs, and of tokens that are not padding."""
        num_pairs = hax.sum(is_pair(batch)).scalar().astype(jnp.float32)
        return {"loss": num_pairs, AUXILIARY: auxiliary_weight(batch.pairs)}

    def terms(
        self, model: LanguageModel, batch: PairBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms `loss` and the layers' auxiliary losses.

        The metrics have TRL's names: `accuracy` (the fraction of pairs whose chosen reward is larger), `margin` (the mean
        difference) and `mean_reward` (of all completions).
        """
        scores, aux = score(model, batch.sequences(), key=key)
        rewards = by_pair(scores, batch)
        chosen, rejected = (rewards[PAIR, number].array for number in (0, 1))
        losses = jax.nn.softplus(rejected - chosen) + self.center_coefficient * (chosen + rejected) ** 2
        columns = {
            "loss": losses,
            "accuracy": chosen > rejected,
            "margin": chosen - rejected,
            "mean_reward": (chosen + rejected) / 2,
        }
        counted, num_pairs = is_pair(batch).array, self.weights(batch)["loss"]
        metrics = {
            name: Sum(jnp.sum(jnp.where(counted, column, 0.0), dtype=jnp.float32), num_pairs)
            for name, column in columns.items()
        }
        aux_terms, aux_metrics = auxiliary_terms(aux)
        return {"loss": metrics["loss"], **aux_terms}, metrics | aux_metrics, slot
