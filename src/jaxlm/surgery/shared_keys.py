"""The keys of several heads as one key that their queries share, turned so that few of its features matter (RoRoPE).

Source: Meng et al. 2025, "TransMLA: Multi-Head Latent Attention Is All You Need" (arXiv:2502.07864), section 4.2. All
features of N heads side by side are one key: a query that belongs to one of them is zero elsewhere. Rotary embeddings turn
the pairs of a frequency by the same angle in all heads. So an orthogonal N x N matrix for each frequency may mix them, which
treats the first and the second features of pairs alike: queries and keys that the same matrix mixes have the same scores.
The principal components of the keys concentrate what the heads have in common in the first mixed pairs.

Unlike there, keys are first multiplied by the size of the queries that meet them, and queries divided by it, which changes
no score either. Keys are then as large as the scores that they make. If queries have no preferred direction, no other
orthogonal matrix leaves less outside the pairs that are kept.
"""

import jax
import jax.numpy as jnp

from jaxlm.surgery.bottleneck import HeadFeatures, Scores

_SMALLEST_SIZE = 1e-3  # of the mean size of queries


def in_shared_keys(teacher: Scores, features: HeadFeatures, num_keys: int, moment_II: jax.Array) -> Scores:
    """The same scores, with `num_keys` keys, each of all features of the heads that share it. The pairs of a frequency are
    mixed; the largest come first. Args: moment_II: second moment of the inputs."""
    num_heads, (num_values, size, _) = teacher.q_HDI.shape[0], teacher.k_GDI.shape
    shared = num_values // num_keys
    q_KNMDI = teacher.q_HDI.reshape(num_keys, shared, num_heads // num_values, size, -1)
    k_KNDI = teacher.k_GDI.reshape(num_keys, shared, size, -1)
    pairs = [jnp.asarray(part) for part in (features.first, features.second)]
    q_AKNMPI, k_AKNPI = (jnp.stack([w[..., part, :] for part in pairs]) for w in (q_KNMDI, k_KNDI))
    sizes_KNP = jnp.einsum("aknmpi,ij,aknmpj->knp", q_AKNMPI, moment_II, q_AKNMPI)
    weights_KNP = _relative(sizes_KNP)
    k_AKNPI = k_AKNPI * weights_KNP[..., None]
    moments_KPNN = jnp.einsum("aknpi,ij,akopj->kpno", k_AKNPI, moment_II, k_AKNPI)
    _, mix_KPNJ = jnp.linalg.eigh(moments_KPNN)
    mix_KPNJ = mix_KPNJ[..., ::-1]  # the largest first
    k_AKJPI = jnp.einsum("kpnj,aknpi->akjpi", mix_KPNJ, k_AKNPI)
    q_AKNMJPI = jnp.einsum("kpnj,aknmpi->aknmjpi", mix_KPNJ, q_AKNMPI / weights_KNP[:, :, None, :, None])
    own_NJ = jnp.eye(shared)
    q_KNMJDI = q_KNMDI[:, :, :, None] * own_NJ[:, None, :, None, None]
    k_KJDI = k_KNDI
    for part, q_KNMJPI, k_KJPI in zip(pairs, q_AKNMJPI, k_AKJPI, strict=True):
        q_KNMJDI = q_KNMJDI.at[..., part, :].set(q_KNMJPI)
        k_KJDI = k_KJDI.at[..., part, :].set(k_KJPI)
    width = shared * size
    return Scores(q_KNMJDI.reshape(num_heads, width, -1), k_KJDI.reshape(num_keys, width, -1))


def of_shared_keys(features: HeadFeatures, head_size: int, shared: int) -> HeadFeatures:
    """Where a key of `shared` heads has its features. Pair j P + p is the j-th one of frequency p."""
    of = lambda part: tuple(head * head_size + feature for head in range(shared) for feature in part)  # noqa: E731
    return HeadFeatures(of(features.first), of(features.second), of(features.unrotated), features.amplitude)


def _relative(squares_KNP: jax.Array) -> jax.Array:
    """Roots of sums of squares, relative to those of all heads that share a key; never 0."""
    mean_K1P = jnp.mean(squares_KNP, axis=1, keepdims=True)
    ratio_KNP = jnp.where(mean_K1P > 0, squares_KNP / jnp.where(mean_K1P > 0, mean_K1P, 1.0), 1.0)
    return jnp.sqrt(jnp.maximum(ratio_KNP, _SMALLEST_SIZE**2))
