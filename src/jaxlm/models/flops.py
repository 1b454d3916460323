"""Counts the floating-point operations (FLOPs) of training, by the two common conventions.

Source: 6 FLOPs per weight and token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1) plus attention as in PaLM
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Weights are those of matrix products, including the head and
excluding the embedding lookup. Recomputation is not counted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MixerWork:
    """What the mixer of one layer computes of a token, apart from its products with weights.

    Attributes:
        attention_dim: heads times head size, the mean of that of keys and of values, by which it attends to each token; 0 if
            its work does not depend on the length of the text.
        window: number of tokens that a token attends to; None for all.
        others: other FLOPs of a token, forward and backward.
    """

    attention_dim: int = 0
    window: int | None = None
    others: int = 0


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs per training token, forward and backward.

    Attributes:
        causal: counts attention only to unmasked tokens: half of the sequence on average, or the window.
        palm: counts attention to the whole sequence, as if there were no mask.
    """

    causal: float
    palm: float

    @staticmethod
    def of(*, weights: int, mixers: Sequence[MixerWork], seq_len: int, causal: bool = True) -> "FlopsPerToken":
        """Computes both counts.

        Args:
            weights: number of weights in matrix products.
            mixers: of each layer.
            causal: whether tokens attend to no later tokens. Otherwise there are as many of these on average.
        """
        fixed = 6 * weights + sum(mixer.others for mixer in mixers)
        unmasked = sum(12 * mixer.attention_dim * _mean_keys(seq_len, mixer.window) for mixer in mixers)
        whole = sum(12 * mixer.attention_dim * seq_len for mixer in mixers)
        return FlopsPerToken(fixed + unmasked * (1 if causal else 2), fixed + whole)

    def plus(self, flops: float) -> "FlopsPerToken":
        """With other FLOPs, which do not depend on how attention is counted."""
        return FlopsPerToken(self.causal + flops, self.palm + flops)

    def share(self, share: float) -> "FlopsPerToken":
        """A share of them."""
        return FlopsPerToken(self.causal * share, self.palm * share)

    def with_forward(self, other: "FlopsPerToken") -> "FlopsPerToken":
        """With the forward pass of another model, a third of its FLOPs."""
        return FlopsPerToken(self.causal + other.causal / 3, self.palm + other.palm / 3)


def _mean_keys(seq_len: int, window: int | None) -> float:
    """Number of tokens that a token attends to, averaged over the sequence."""
    return seq_len / 2 if window is None or window >= seq_len else window - window**2 / (2 * seq_len)


def matrix_operations(jaxpr: Any) -> int:
    """FLOPs of all matrix products in a traced program. Loops of unknown length count once."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * inner
        num_iterations = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += num_iterations * sum(map(matrix_operations, _inner_jaxprs(equation.params)))
    return total


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
