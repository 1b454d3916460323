"""Floating-point operations of training, in the two ways that the field counts them.

Source: 6 operations a weight and token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1) with attention as in PaLM
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Weights are those of matrix products: the head is among them, the
embedding look-up is not. Recomputation never counts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


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


def matrix_operations(jaxpr: Any) -> int:
    """Multiplications and additions of all matrix products in a traced program; loops of unknown length count once."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * inner
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += times * sum(map(matrix_operations, _inner(equation.params)))
    return total


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The programs inside of an operation's parameters."""
    for value in params.values():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            program = getattr(one, "jaxpr", one)
            if hasattr(program, "eqns"):
                yield program
