"""Attention scores of a teacher as semantic and geometric ones of fewer features (`jaxlm.models.mixers.decoupled_attention`).

Rotary embeddings rotate pairs of features by angles that grow with the position. Of each key/value head, some pairs stay as
they are: geometric features, which keep their frequencies. All other features lose their rotation, and their product, over
all query heads of the group,

    A = stack_h (W_q^h)^T W_k,

is replaced by its best approximation of rank d_s: the semantic features. So two errors arise, of un-rotation and of rank.

Which pairs stay: those whose scores change most without their rotation, or, by the 2-norm rule of MHA2MLA (Ji et al. 2025,
arXiv:2502.14837, section 3.1), those with the largest queries and keys, as root mean squares over tokens.

Source: the joint decomposition: MHA2MLA, section 3.2, for each key/value head. Weighted by the second moment C of the inputs
it is the approximation with the smallest E(error^2) for two independent tokens (Wang et al. 2024, SVD-LLM,
arXiv:2403.07378, section 3.1: C = L L^T, decompose A between L^T and L). `independent`: what caramba's
`initializers/dba/svd.py` does, for comparison: it decomposes W_q and W_k separately and drops their left factors, which
leaves no relation between queries and keys.

Shapes: H query heads, G key/value heads, M = H / G, D features of a head, I inputs (the last is the constant 1, with the
biases, if there are any), P pairs, U features that the teacher does not rotate, R features that lose their rotation.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_SMALLEST_VARIANCE = 1e-6  # of the largest one: inputs hardly move in directions with less


class Scores(NamedTuple):
    """Holds what scores are products of: <q x_i, k x_j>, without a scale."""

    q_HDI: jax.Array
    k_GDI: jax.Array

    def grouped(self) -> jax.Array:
        """Queries as [G, M, D, I]."""
        num_groups = self.k_GDI.shape[0]
        return self.q_HDI.reshape(num_groups, self.q_HDI.shape[0] // num_groups, *self.q_HDI.shape[1:])


class Bottleneck(NamedTuple):
    """Projections of `DecoupledAttention` that need no other scale than its own.

    Attributes:
        sem, geo: with d_s and d_g features.
        pairs_GP: int32, the number of the teacher's frequency of each pair of geometric features.
    """

    sem: Scores
    geo: Scores
    pairs_GP: jax.Array


class ScoreErrors(NamedTuple):
    """Root mean squares over heads, and over independent tokens at the distances of a causal row. Scalars.

    Attributes:
        signal: of the teacher's scores.
        unrotated: of what the scores change by where features lose their rotation.
        low_rank: of what the product of these features changes by when its rank is cut.
    """

    signal: jax.Array
    unrotated: jax.Array
    low_rank: jax.Array


@dataclass(frozen=True)
class HeadFeatures:
    """Says where a head of a teacher has its features.

    Attributes:
        first, second: the two features of each pair [P].
        unrotated: the features without rotation [U].
        amplitude: factor that the rotary embedding gives rotated features (YaRN).
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    unrotated: tuple[int, ...]
    amplitude: float = 1.0

    @staticmethod
    def of(head_size: int, num_rotated: int, *, interleaved: bool, amplitude: float = 1.0) -> "HeadFeatures":
        """Args: interleaved: neighbors are a pair, instead of features of the two halves."""
        num_pairs = -(-num_rotated // 2)
        rotated = range(2 * num_pairs)
        first, second = (rotated[::2], rotated[1::2]) if interleaved else (rotated[:num_pairs], rotated[num_pairs:])
        return HeadFeatures(tuple(first), tuple(second), tuple(range(2 * num_pairs, head_size)), amplitude)

    @property
    def num_pairs(self) -> int:
        return len(self.first)


def second_root(moment_II: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L and its inverse, for a second moment C = L L^T. Directions with almost no variance count as if they had little."""
    values, vectors = jnp.linalg.eigh(moment_II)
    root = jnp.sqrt(jnp.maximum(values, _SMALLEST_VARIANCE * values[-1]))
    return vectors * root, (vectors / root).T


def largest_pairs(teacher: Scores, features: HeadFeatures, moment_II: jax.Array, num_pairs: int) -> jax.Array:
    """The pairs of each key/value head with the largest E|q_pair| E|k_pair|, over its query heads; ascending [G, P]."""

    def norms(w_XDI: jax.Array) -> jax.Array:
        squares_XD = jnp.einsum("xdi,ij,xdj->xd", w_XDI, moment_II, w_XDI)
        first, second = (squares_XD[:, jnp.asarray(part)] for part in (features.first, features.second))
        return jnp.sqrt(jnp.maximum(first + second, 0.0))

    q_GMP = norms(teacher.q_HDI).reshape(teacher.k_GDI.shape[0], -1, features.num_pairs)
    contribution_GP = q_GMP.sum(axis=1) * norms(teacher.k_GDI)
    return _largest(contribution_GP, num_pairs)


def most_turned_pairs(
    teacher: Scores, features: HeadFeatures, moment_II: jax.Array, angles_P: jax.Array, num_tokens: int, num_pairs: int
) -> jax.Array:
    """The pairs of each key/value head whose scores change most when they lose their rotation; ascending [G, P].

    Args: as in `score_errors`.
    """

    def moments(w_XDI: jax.Array) -> jax.Array:
        both = jnp.stack([w_XDI[:, jnp.asarray(part)] for part in (features.first, features.second)], axis=2)
        return jnp.einsum("xpai,ij,xpbj->xpab", both, moment_II, both)

    q_GPAB = moments(teacher.q_HDI).reshape(teacher.k_GDI.shape[0], -1, features.num_pairs, 2, 2).sum(axis=1)
    k_GPAB = moments(teacher.k_GDI)

    def at_distance(distance: jax.Array) -> jax.Array:
        cos, sin = jnp.cos(angles_P * distance), jnp.sin(angles_P * distance)
        change_PAB = jnp.stack([jnp.stack([cos - 1, sin], -1), jnp.stack([-sin, cos - 1], -1)], axis=1)
        return jnp.einsum("gpab,pac,gpcd,pbd->gp", q_GPAB, change_PAB, k_GPAB, change_PAB)

    errors_GP = jax.lax.map(at_distance, _distances(num_tokens)).mean(axis=0)
    return _largest(errors_GP, num_pairs)


def _largest(numbers_GP: jax.Array, num_pairs: int) -> jax.Array:
    order = jnp.argsort(-numbers_GP, axis=1, stable=True)
    return jnp.sort(order[:, :num_pairs], axis=1).astype(jnp.int32)


def kept_rotation(teacher: Scores, features: HeadFeatures, pairs_GP: jax.Array) -> Scores:
    """The features of these pairs, the first ones of all pairs before the second ones."""
    first, second = (jnp.asarray(part)[pairs_GP] for part in (features.first, features.second))
    return _taken(teacher, jnp.concatenate([first, second], axis=1))


def lost_rotation(teacher: Scores, features: HeadFeatures, pairs_GP: jax.Array) -> tuple[Scores, jax.Array]:
    """All other features, and the pair of each, or -1 where the teacher has none [G, R].

    First those that the teacher does not rotate, then the first and the second ones of the pairs.
    """
    is_kept_GP = jnp.zeros((pairs_GP.shape[0], features.num_pairs), bool)
    is_kept_GP = is_kept_GP.at[jnp.arange(pairs_GP.shape[0])[:, None], pairs_GP].set(True)
    others = jnp.argsort(is_kept_GP, axis=1, stable=True)[:, : features.num_pairs - pairs_GP.shape[1]]
    unrotated = jnp.broadcast_to(
        jnp.asarray(features.unrotated, jnp.int32), (pairs_GP.shape[0], len(features.unrotated))
    )
    first, second = (jnp.asarray(part, jnp.int32)[others] for part in (features.first, features.second))
    pair_GR = jnp.concatenate([jnp.full_like(unrotated, -1), others, others], axis=1)
    lost = _taken(teacher, jnp.concatenate([unrotated, first, second], axis=1))
    factor_GR = jnp.where(pair_GR < 0, 1.0, features.amplitude**2)
    return Scores(lost.q_HDI, lost.k_GDI * factor_GR[:, :, None]), pair_GR


def low_rank(scores: Scores, rank: int, root: tuple[jax.Array, jax.Array] | None) -> Scores:
    """The best approximation of the scores with `rank` features, both sides balanced.

    Args:
        root: of the second moment of the inputs (`second_root`); None weights all directions alike.
    """
    q_GMRI, k_GRI = scores.grouped(), scores.k_GDI
    if root is not None:
        q_GMRI, k_GRI = q_GMRI @ root[0], k_GRI @ root[0]
    q_GMSI, k_GSI = jax.vmap(lambda q_MRI, k_RI: _low_rank(q_MRI, k_RI, rank))(q_GMRI, k_GRI)
    if root is not None:
        q_GMSI, k_GSI = q_GMSI @ root[1], k_GSI @ root[1]
    return Scores(q_GMSI.reshape(scores.q_HDI.shape[0], *q_GMSI.shape[2:]), k_GSI)


def _low_rank(q_MRI: jax.Array, k_RI: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    """By two thin QR decompositions and the SVD of a core of [M R, R]: no [I, I] matrix."""
    q_basis_MIK, q_core_MKR = jnp.linalg.qr(q_MRI.swapaxes(1, 2))
    k_basis_IK, k_core_KR = jnp.linalg.qr(k_RI.T)
    core_MKK = q_core_MKR @ k_core_KR.T
    num_heads, size, _ = core_MKK.shape
    u, s, vh = jnp.linalg.svd(core_MKK.reshape(num_heads * size, -1), full_matrices=False)
    top = min(rank, len(s))
    signs = jnp.where(jnp.take_along_axis(vh, jnp.argmax(jnp.abs(vh), axis=1, keepdims=True), axis=1) < 0, -1.0, 1.0)
    root = jnp.sqrt(s[:top])[:, None] * signs[:top]
    k_SI = root * vh[:top] @ k_basis_IK.T
    u_MKS = u[:, :top].reshape(num_heads, size, top)
    q_MSI = root * u_MKS.swapaxes(1, 2) @ q_basis_MIK.swapaxes(1, 2)
    missing = ((0, rank - top), (0, 0))
    return jnp.pad(q_MSI, ((0, 0), *missing)), jnp.pad(k_SI, missing)


def zero_padded(scores: Scores, size: int) -> Scores:
    """With zeros as further features."""
    pad = lambda w: jnp.pad(w, ((0, 0), (0, size - w.shape[1]), (0, 0)))  # noqa: E731
    return Scores(pad(scores.q_HDI), pad(scores.k_GDI))


def scaled(scores: Scores, teacher_scale: float) -> Scores:
    """The same scores for a product that is divided by the root of its number of features, as the student's is.

    Args:
        teacher_scale: factor of the teacher's scores.
    """
    size = scores.q_HDI.shape[1]
    factor = (teacher_scale * size**0.5) ** 0.5
    return Scores(factor * scores.q_HDI, factor * scores.k_GDI)


def independent(teacher: Scores, sem_size: int, geo_size: int, num_pairs: int) -> Bottleneck:
    """Decomposes W_q and W_k of all heads separately. Args: num_pairs: of the teacher; every n-th frequency is taken."""

    def components(w_XDI: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads, width = w_XDI.shape[0], sem_size + geo_size
        _, s, vh = jnp.linalg.svd(w_XDI.reshape(-1, w_XDI.shape[-1]), full_matrices=False)
        rows = (s[:, None] * vh)[: heads * width]
        rows = jnp.pad(rows, ((0, heads * width - rows.shape[0]), (0, 0)))
        sem, geo = rows[: heads * sem_size], rows[heads * sem_size :]
        return sem.reshape(heads, sem_size, -1), geo.reshape(heads, geo_size, -1)

    (q_sem, q_geo), (k_sem, k_geo) = map(components, teacher)
    pairs = np.arange(geo_size // 2) * num_pairs // max(geo_size // 2, 1)
    pairs_GP = jnp.broadcast_to(jnp.asarray(pairs, jnp.int32), (teacher.k_GDI.shape[0], len(pairs)))
    return Bottleneck(Scores(q_sem, k_sem), Scores(q_geo, k_geo), pairs_GP)


def score_errors(
    teacher: Scores,
    features: HeadFeatures,
    pairs_GP: jax.Array,
    sem: Scores,
    moment_II: jax.Array,
    angles_P: jax.Array,
    num_tokens: int,
) -> ScoreErrors:
    """The errors of a bottleneck. Args: angles_P: radians per position; sem: without `scaled`; num_tokens: of a row."""
    lost, pair_GR = lost_rotation(teacher, features, pairs_GP)
    every, every_pair_GR = lost_rotation(teacher, features, pairs_GP[:, :0])
    num_unrotated = len(features.unrotated)

    def mean_square(scores: Scores, change_GRR: jax.Array) -> jax.Array:
        """Of <q x_i, change k x_j> for independent tokens, over heads."""
        q_GRR = jnp.einsum("gmri,ij,gmsj->grs", scores.grouped(), moment_II, scores.grouped())
        k_GRR = jnp.einsum("gri,ij,gsj->grs", scores.k_GDI, moment_II, scores.k_GDI)
        return jnp.sum(q_GRR * (change_GRR @ k_GRR @ change_GRR.swapaxes(1, 2))) / teacher.q_HDI.shape[0]

    def at_distance(distance: jax.Array) -> tuple[jax.Array, jax.Array]:
        angles = -angles_P * distance  # the key is before the query
        whole = mean_square(every, _rotations(every_pair_GR, num_unrotated, angles))
        turned = _rotations(pair_GR, num_unrotated, angles)
        return whole, mean_square(lost, turned - jnp.eye(turned.shape[-1]))

    whole, unrotated = jax.lax.map(at_distance, _distances(num_tokens))
    difference = Scores(
        *(jnp.concatenate(pair, axis=1) for pair in ((lost.q_HDI, -sem.q_HDI), (lost.k_GDI, sem.k_GDI)))
    )
    cut = mean_square(difference, jnp.eye(difference.k_GDI.shape[1])[None])
    return ScoreErrors(*(jnp.sqrt(jnp.maximum(x, 0.0)) for x in (whole.mean(), unrotated.mean(), cut)))


_NUM_DISTANCES = 32


def _distances(num_tokens: int) -> jax.Array:
    """Quantiles of the distance between a query and a key of a causal row."""
    shares = (np.arange(_NUM_DISTANCES) + 0.5) / _NUM_DISTANCES
    return jnp.asarray(num_tokens * (1 - np.sqrt(1 - shares)), jnp.float32)


def _rotations(pair_GR: jax.Array, num_unrotated: int, angles_P: jax.Array) -> jax.Array:
    """Matrices [G, R, R] that rotate features which are first all unrotated ones, then the first and second of pairs."""
    angle_GR = jnp.where(pair_GR < 0, 0.0, angles_P[jnp.maximum(pair_GR, 0)])
    num_pairs = (pair_GR.shape[1] - num_unrotated) // 2
    partner = np.arange(pair_GR.shape[1])
    partner[num_unrotated:] = np.roll(partner[num_unrotated:], num_pairs)
    sign = np.ones(pair_GR.shape[1])
    sign[num_unrotated : num_unrotated + num_pairs] = -1
    sign[:num_unrotated] = 0
    eye = jnp.eye(pair_GR.shape[1])
    return jnp.cos(angle_GR)[:, :, None] * eye + (sign * jnp.sin(angle_GR))[:, :, None] * eye[partner]


def _taken(scores: Scores, feature_GR: jax.Array) -> Scores:
    """These features of each key/value head and of the query heads of its group."""
    q_GMRI = jnp.take_along_axis(scores.grouped(), feature_GR[:, None, :, None], axis=2)
    k_GRI = jnp.take_along_axis(scores.k_GDI, feature_GR[:, :, None], axis=1)
    return Scores(q_GMRI.reshape(scores.q_HDI.shape[0], *q_GMRI.shape[2:]), k_GRI)
