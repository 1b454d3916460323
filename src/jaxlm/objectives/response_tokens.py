"""What GRPO's loss and metrics read of sampled responses: numbers of their tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, GROUP, POSITION
from jaxlm.core.values.batch_types import GroupBatch
from jaxlm.core.values.sums import Largest, Sum
from jaxlm.objectives.advantages import group_std
from jaxlm.objectives.base import Metrics


class ResponseTokens(NamedTuple):
    """Numbers of the tokens of all responses, float32 [N, S] each; None if they are unknown.

    Attributes:
        logps, entropy: of the model that trains.
        mask: 1 for a token of a response.
        counted: 1 for a token that the policy loss counts.
        old: log-likelihoods under the model that the ratios compare with.
        reference, sampler: log-likelihoods under the reference and as the sampler has recorded them.
    """

    logps: jax.Array
    entropy: jax.Array
    mask: jax.Array
    counted: jax.Array
    old: jax.Array
    reference: jax.Array | None
    sampler: jax.Array | None

    @property
    def sampled(self) -> jax.Array:
        """Log-likelihoods under the model that sampled the responses, as recorded if they are: `old` may be our own."""
        return self.old if self.sampler is None else self.sampler


def reward_metrics(rewards_BG: jax.Array, shaped_BG: jax.Array, batch: GroupBatch, std_ddof: int) -> Metrics:
    """Means over responses and groups, without padding. Args: shaped_BG: what the advantages are computed from."""
    mask_BGS = batch.responses.loss_mask.rearrange((BATCH, GROUP, POSITION)).array
    has_tokens_BG = jnp.any(mask_BGS > 0, axis=-1).astype(jnp.float32)
    is_group_B = jnp.max(has_tokens_BG, axis=-1)
    num_groups, num_responses = jnp.sum(is_group_B), jnp.sum(has_tokens_BG)
    std_B = group_std(shaped_BG, std_ddof)
    return {
        "reward": Sum(jnp.sum(rewards_BG * has_tokens_BG), num_responses),
        "reward_std": Sum(jnp.sum(std_B * is_group_B), num_groups),
        "frac_reward_zero_std": Sum(jnp.sum((std_B == 0) * is_group_B), num_groups),
        "completions/mean_length": Sum(jnp.sum(mask_BGS > 0, dtype=jnp.float32), num_responses),
    }


def sampler_metrics(tokens: ResponseTokens) -> Metrics:
    """How far our log-likelihoods are from those of the sampler, which had the same weights in the first update."""
    if tokens.sampler is None:
        return {}
    distance_NS = jnp.where(tokens.mask > 0, jnp.abs(jax.lax.stop_gradient(tokens.logps) - tokens.sampler), 0.0)
    return {
        "sampling/logp_diff_mean": Sum(jnp.sum(distance_NS), jnp.sum(tokens.mask > 0, dtype=jnp.float32)),
        "sampling/logp_diff_max": Largest(jnp.max(distance_NS)),
    }


def by_sequence(of_group: NamedArray) -> jax.Array:
    """[N, S]: {batch, group, position} in the order of `GroupBatch.sequences`."""
    array = of_group.rearrange((BATCH, GROUP, POSITION)).array
    return array.reshape(-1, array.shape[-1])
