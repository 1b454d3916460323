"""What becomes of scores between the matrix product and the softmax.

Source: soft caps: Gemma Team 2024 (arXiv:2408.00118), section 2; ALiBi: Press et al. 2021 (arXiv:2108.12409), section 3,
with the slopes of head counts that are no power of two as its authors release them.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class ScoreRule:
    """How scaled scores are changed; by default not at all.

    Attributes:
        soft_cap: c in c tanh(score / c), which scores stay below.
        alibi_max: the steepest of n heads' slopes is 2 ** (-alibi_max / n), the flattest 2 ** -alibi_max; a score is
            lowered by its head's slope times the distance of query and key. None lowers nothing.
    """

    soft_cap: float | None = None
    alibi_max: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is changed."""
        return self.soft_cap is None and self.alibi_max is None

    def __call__(self, scores_BKGTS: jax.Array, distance_BTS: jax.Array) -> jax.Array:
        """Scaled scores, float32, as the softmax takes them.

        Args:
            scores_BKGTS: B batch, K key/value heads, G query heads a key/value head, T queries, S keys.
            distance_BTS: from a query back to a key; B may be 1.
        """
        if self.soft_cap is not None:
            scores_BKGTS = self.soft_cap * jnp.tanh(scores_BKGTS / self.soft_cap)
        if self.alibi_max is not None:
            kv_heads, group = scores_BKGTS.shape[1:3]
            slopes = alibi_slopes(kv_heads * group, self.alibi_max).reshape(kv_heads, group, 1, 1)
            scores_BKGTS = scores_BKGTS - slopes * distance_BTS[:, None, None].astype(jnp.float32)
        return scores_BKGTS

    def derivative(self, scores_BKGTS: jax.Array) -> jax.Array | float:
        """Of what `__call__` returns by the scaled scores that it was given."""
        return 1.0 if self.soft_cap is None else 1.0 - jnp.tanh(scores_BKGTS / self.soft_cap) ** 2

    def __str__(self) -> str:
        names = {"a soft cap of scores": self.soft_cap, "ALiBi": self.alibi_max}
        return " and ".join(name for name, value in names.items() if value is not None)


def alibi_slopes(num_heads: int, alibi_max: float) -> np.ndarray:
    """One for each head, float32 [num_heads]."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (-alibi_max * np.arange(1, power + 1) / power)
    if power != num_heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:num_heads]
    return slopes.astype(np.float32)
