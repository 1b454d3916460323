"""The keys of several heads as one key that their queries share, turned so that few of its features matter (RoRoPE).

Source: Meng et al. 2025, "TransMLA: Multi-Head Latent Attention Is All You Need" (arXiv:2502.07864), section 4.2. All
features of N heads side by side are one key: a query that belongs to one of them is zero elsewhere. Rotary embeddings turn
the pairs of a frequency by the same angle in all heads. So an orthogonal N x N matrix for each frequency may mix them:
queries and keys that the same matrix mixes have the same scores at every distance. The principal components of the keys
concentrate what the heads have in common in the first mixed pairs.

Two things differ from there. With a pair as a complex number, a rotary embedding is a factor e^(i angle), which a unitary
matrix leaves alone as an orthogonal one does: heads may have the same features at other phases. And keys are first
multiplied by the size of the queries that meet them, and queries divided by it, which changes no score either. Keys are then
as large as the scores that they make: if queries have no preferred direction, no other unitary matrix leaves less outside
the first pairs.

Shapes: as in `jaxlm.surgery.bottleneck`, with K shared keys, N key/value heads that share one, J their mixtures.
"""

import functools

import jax
import jax.numpy as jnp

from jaxlm.surgery.bottleneck import HeadFeatures, Scores

_SMALLEST_SIZE = 1e-3  # of the mean size of queries
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def in_shared_keys(teacher: Scores, features: HeadFeatures, num_keys: int, moment_II: jax.Array) -> Scores:
    """The same scores with `num_keys` keys, each of all features of the heads that share it, which `of_shared_keys` lists.
    The pairs of each frequency are mixed, the largest mixture comes first. Args: moment_II: second moment of the inputs.
    """
    num_heads, (num_values, size, num_inputs) = teacher.q_HDI.shape[0], teacher.k_GDI.shape
    shared = num_values // num_keys
    q_KNMDI = teacher.q_HDI.reshape(num_keys, shared, num_heads // num_values, size, num_inputs)
    k_KNDI = teacher.k_GDI.reshape(num_keys, shared, size, num_inputs)
    first, second = (jnp.asarray(part) for part in (features.first, features.second))
    q_KNMPI, k_KNPI = (w[..., first, :] + 1j * w[..., second, :] for w in (q_KNMDI, k_KNDI))
    sizes_KNP = _relative(_einsum("knmpi,ij,knmpj->knp", q_KNMPI, moment_II, q_KNMPI.conj()).real)
    q_KNMPI, k_KNPI = q_KNMPI / sizes_KNP[:, :, None, :, None], k_KNPI * sizes_KNP[..., None]
    moments_KPNN = _einsum("knpi,ij,kopj->kpno", k_KNPI, moment_II, k_KNPI.conj())
    _, mixtures_KPNJ = jnp.linalg.eigh(moments_KPNN)
    mixtures_KPNJ = mixtures_KPNJ[..., ::-1].conj()
    k_KJPI = _einsum("kpnj,knpi->kjpi", mixtures_KPNJ, k_KNPI)
    q_KNMJPI = _einsum("kpnj,knmpi->knmjpi", mixtures_KPNJ, q_KNMPI)
    # Features without rotation stay those of their head: no approximation that follows depends on how they are mixed.
    q_KNMJDI = q_KNMDI[:, :, :, None] * jnp.eye(shared)[:, None, :, None, None]
    q_KNMJDI = q_KNMJDI.at[..., first, :].set(q_KNMJPI.real).at[..., second, :].set(q_KNMJPI.imag)
    k_KJDI = k_KNDI.at[..., first, :].set(k_KJPI.real).at[..., second, :].set(k_KJPI.imag)
    width = shared * size
    return Scores(q_KNMJDI.reshape(num_heads, width, num_inputs), k_KJDI.reshape(num_keys, width, num_inputs))


def of_shared_keys(features: HeadFeatures, head_size: int, shared: int) -> HeadFeatures:
    """Where a key of `shared` heads has its features. Pair j P + p is mixture j of those with frequency p."""

    def of_heads(part: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(head * head_size + feature for head in range(shared) for feature in part)

    first, second, unrotated = map(of_heads, (features.first, features.second, features.unrotated))
    return HeadFeatures(first, second, unrotated, features.amplitude)


def _relative(squares_KNP: jax.Array) -> jax.Array:
    """Roots of these sums of squares, relative to the mean over the heads that share a key; never 0."""
    mean_K1P = jnp.mean(squares_KNP, axis=1, keepdims=True)
    ratio_KNP = jnp.where(mean_K1P > 0, squares_KNP / jnp.where(mean_K1P > 0, mean_K1P, 1.0), 1.0)
    return jnp.sqrt(jnp.maximum(ratio_KNP, _SMALLEST_SIZE**2))
