"""Modifications of attention scores before the softmax: soft caps and ALiBi.

Source: soft caps: Gemma Team 2024 (arXiv:2408.00118), section 2; ALiBi: Press et al. 2021 (arXiv:2108.12409), section
3, with the slopes of the authors' code for head counts that are not a power of two.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class ScoreRule:
    """Modifies scaled scores. The default is the identity.

    Attributes:
        soft_cap: c in c tanh(score / c); None applies no cap.
        alibi_max: ALiBi subtracts slope * distance from each score. With n heads, the largest slope is
            2 ** (-alibi_max / n) and the smallest 2 ** -alibi_max. None applies no ALiBi.
    """

    soft_cap: float | None = None
    alibi_max: float | None = None

    @property
    def is_identity(self) -> bool:
        return self.soft_cap is None and self.alibi_max is None

    def __call__(
        self, scores_BKGTS: jax.Array, distance_BTS: jax.Array, slopes_KG: jax.Array | None = None
    ) -> jax.Array:
        """Maps scaled scores, float32, to the input of the softmax.

        Args:
            scores_BKGTS: B batch, K key/value heads, G query heads per key/value head, T queries, S keys.
            distance_BTS: query position minus key position; B may be 1.
            slopes_KG: ALiBi's slopes of these heads; None if they are all heads.
        """
        if self.soft_cap is not None:
            scores_BKGTS = self.soft_cap * jnp.tanh(scores_BKGTS / self.soft_cap)
        if self.alibi_max is not None:
            kv_heads, group = scores_BKGTS.shape[1:3]
            slopes = alibi_slopes(kv_heads * group, self.alibi_max) if slopes_KG is None else slopes_KG
            slopes = slopes.reshape(kv_heads, group, 1, 1)
            scores_BKGTS = scores_BKGTS - slopes * distance_BTS[:, None, None].astype(jnp.float32)
        return scores_BKGTS

    def derivative(self, scores_BKGTS: jax.Array) -> jax.Array | float:
        """The derivative of `__call__` with respect to the scaled scores."""
        return 1.0 if self.soft_cap is None else 1.0 - jnp.tanh(scores_BKGTS / self.soft_cap) ** 2

    def __str__(self) -> str:
        names = {"a soft cap of scores": self.soft_cap, "ALiBi": self.alibi_max}
        return " and ".join(name for name, value in names.items() if value is not None)


def alibi_slopes(num_heads: int, alibi_max: float) -> np.ndarray:
    """ALiBi slopes, float32 [num_heads]."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (-alibi_max * np.arange(1, power + 1) / power)
    if power != num_heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:num_heads]
    return slopes.astype(np.float32)
