"""Orthogonalization of matrices with matrix products alone: all singular values move towards 1, singular vectors stay.

Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon) for `quintic`; Amsel et al. 2025, The Polar Express
(arXiv:2505.16932), algorithm 1, for `polar_express`, with the coefficients of github.com/karpathy/nanochat (five
iterations, safety factor 0.02). Both are odd quintics a s + b s^3 + c s^5 of each singular value s.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Quintic = tuple[float, float, float]

# Steep at 0, near 1 elsewhere: singular values end between about 0.7 and 1.2.
QUINTIC: Sequence[Quintic] = ((3.4445, -4.7750, 2.0315),)
# Each is the best one for the interval that the one before it leaves: they end between about 0.86 and 1.14.
POLAR_EXPRESS: Sequence[Quintic] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
COEFFICIENTS = {"quintic": QUINTIC, "polar_express": POLAR_EXPRESS}
_SMALLEST_NORM = 1e-6


def newton_schulz(
    matrix: jax.Array,
    num_steps: int,
    epsilon: float,
    coefficients: Sequence[Quintic] = QUINTIC,
    *,
    norm_factor: float = 1.0,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Approximately orthogonalizes each matrix of [.., rows, columns].

    Args:
        num_steps: number of iterations. Those beyond the coefficients use the last ones.
        epsilon: added to the norm of a matrix before dividing by it.
        norm_factor: a matrix is divided by this times its norm.
        dtype: dtype of the iterations and of the result; the norm is then computed in float32. None keeps the matrix's.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix  # use the smaller of the two Gram matrices
    if dtype is not None:
        x = x.astype(jnp.float32)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) * norm_factor + epsilon)
    if dtype is not None:
        x = x.astype(dtype)
    for number in range(num_steps):
        a, b, c = coefficients[min(number, len(coefficients) - 1)]
        gram = x @ x.mT
        # A factor of a bfloat16 array would be rounded to bfloat16 itself, by up to 0.4 %: in every iteration the same way.
        square = (c * _wide(gram)).astype(x.dtype) @ gram
        pull = (b * _wide(gram) + _wide(square)).astype(x.dtype)
        x = (a * _wide(x) + _wide(pull @ x)).astype(x.dtype)
    return x.mT if tall else x


def _wide(matrix: jax.Array) -> jax.Array:
    return matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))


def equal_rows(matrix: jax.Array) -> jax.Array:
    """Scales the rows of each matrix [.., rows, columns] to the same norm; the Frobenius norm does not change.

    Source: MuonEq (arXiv:2603.28254), with rows as outputs: the singular values are then closer to each other.
    """
    wide = matrix.astype(jnp.float32)
    whole = jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True)
    rows = jnp.linalg.norm(wide, axis=-1, keepdims=True)
    return (wide * (whole / matrix.shape[-2] ** 0.5 / jnp.maximum(rows, _SMALLEST_NORM))).astype(matrix.dtype)


def orthogonal_norm(matrix: jax.Array) -> jax.Array:
    """Scales each matrix [.., rows, columns] to the Frobenius norm of an exactly orthogonal one, sqrt(min(rows, columns)).

    Source: Muon+ (arXiv:2602.21545). The iterations leave it smaller or larger, from matrix to matrix.
    """
    norm = jnp.linalg.norm(matrix.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    return matrix * (min(matrix.shape[-2:]) ** 0.5 / jnp.maximum(norm, _SMALLEST_NORM)).astype(matrix.dtype)
