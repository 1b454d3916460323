"""Floating-point operations of training, in the two ways that the field counts them.

Source: 6 operations a weight and token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1) with attention as in PaLM
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Weights are those of matrix products: the head is among them, the
embedding look-up is not. Recomputation never counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations of one training token, forward and backward.

    Attributes:
        causal: a token's attention counted over what it sees: half of the sequence on average, or its window.
        palm: attention counted over the whole sequence, as if nothing were masked.
    """

    causal: float
    palm: float

    @staticmethod
    def of(*, weights: int, attention_dim: int, seq_len: int, windows: Sequence[int | None]) -> "FlopsPerToken":
        """Args: weights: of all matrix products; attention_dim: heads x head size of a layer; windows: of each layer."""
        a_key = 12 * attention_dim
        causal = sum(a_key * _seen(seq_len, window) for window in windows)
        return FlopsPerToken(6 * weights + causal, 6 * weights + len(windows) * a_key * seq_len)


def _seen(seq_len: int, window: int | None) -> float:
    """Tokens that a token sees on average."""
    return seq_len / 2 if window is None or window >= seq_len else window - window**2 / (2 * seq_len)
