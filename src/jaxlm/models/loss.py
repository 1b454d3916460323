"""Next-token cross-entropy in chunks of tokens.

Source: cross-entropy with the z-loss of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5), the label smoothing
of Szegedy et al. 2016 (arXiv:1512.00567, section 7), the logit soft cap of Gemma 2 (arXiv:2408.00118, section 2) and the
dynamic fine-tuning of Wu et al. 2025 (arXiv:2508.05629, equation 9).
`jaxlm.models.chunked_loss` says how the loss and its gradient are computed without the logits of all tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.products.fp8 import Fp8, multiplies_in_fp8
from jaxlm.core.products.stored_weights import Weight
from jaxlm.models.chunked_loss import (
    ChunkedLoss,
    ChunkLogits,
    checked_cap,
    chunk_or_default,
    chunked_loss,
    map_chunks,
    without_tokens,
)
from jaxlm.models.head_products import NextTokenFp8, plain_head
from jaxlm.models.token_sharding import TokenSharding


class CrossEntropySums(eqx.Module):
    """Sums over the tokens of a batch, weighted by the loss mask. Scalars, float32.

    Attributes:
        total: the objective, smoothed or reweighted cross-entropy plus z-loss. Only this field has a gradient.
        cross_entropy: negative log-likelihood in nats, without smoothing.
        z_loss: the z-loss contained in `total`.
        correct: sum of the loss mask over tokens whose most likely prediction is the target.
        entropy: entropy of the predictions in nats; 0 if it was not asked for.
    """

    total: jax.Array
    cross_entropy: jax.Array
    z_loss: jax.Array
    correct: jax.Array
    entropy: jax.Array


def next_token_sums(
    hidden: NamedArray,
    head: Weight | None,
    targets: NamedArray,
    loss_mask: NamedArray,
    *,
    soft_cap: float | None = None,
    z_loss_weight: float = 0.0,
    label_smoothing: float = 0.0,
    dft: bool = False,
    entropy: bool = False,
    vocab_multiple: int = 1,
    chunk_tokens: int | None = None,
    fp8: Fp8 | None = None,
    excluded: NamedArray | None = None,
) -> CrossEntropySums:
    """Summed next-token loss of a batch, without materializing the logits of all tokens.

    Differentiable with respect to `hidden` and `head`. The matrix product of each gradient is only computed if the
    gradient is needed: none in evaluation, not that of a frozen head.

    Args:
        hidden: {batch, position, embed}.
        head: {vocab, embed}; its products are computed in its dtype. None if `hidden` contains logits, {batch,
            position, vocab}.
        targets: int {batch, position}. A target outside the vocabulary makes the loss NaN if its mask is not 0.
        loss_mask: float {batch, position}, the weight of each token.
        soft_cap: soft cap of the logits; None applies no cap.
        z_loss_weight: z in `z * logsumexp(logits)**2`, which is added to each token's loss.
        label_smoothing: fraction of the target distribution that is spread uniformly over the vocabulary.
        dft: multiply each token's negative log-likelihood by its probability, which has no gradient. Without label smoothing.
        entropy: also sum the entropy of the predictions.
        vocab_multiple: the logits are computed for a multiple of this, with padding that is not in the loss.
        chunk_tokens: maximum number of tokens per chunk on one device; None uses `chunk_or_default`.
        fp8: how the products with the head are quantized in training; None for not at all.
        excluded: int {batch, position}, a token that has no probability; None for none. Without label smoothing and fp8.
    """
    assert excluded is None or not (label_smoothing or fp8), "both read the logits of all tokens"
    assert not (dft and label_smoothing), "the two reweight the same term"
    loss = _NextTokenLoss(
        TokenSharding.of(hidden, head, vocab_multiple),
        checked_cap(soft_cap),
        chunk_or_default(chunk_tokens),
        float(z_loss_weight),
        float(label_smoothing),
        dft,
        entropy,
        products=plain_head if fp8 is None or not multiplies_in_fp8() else NextTokenFp8(fp8, float(z_loss_weight)),
    )
    return CrossEntropySums(*chunked_loss(loss, hidden, head, targets, loss_mask, _optional(excluded)))


def _optional(tokens: NamedArray | None) -> tuple[jax.Array, ...]:
    """The array [B, S] of tokens, if there are any."""
    return () if tokens is None else (tokens.rearrange((BATCH, POSITION)).array,)


def token_losses(hidden: NamedArray, head: Weight | None, targets: NamedArray, **options: Any) -> NamedArray:
    """Negative log-likelihood of each token in nats, float32 {batch, position}. Arguments as in `token_numbers`."""
    return token_numbers(ChunkLogits.nats, hidden, head, targets, **options)


def token_numbers(
    numbers: Callable[[ChunkLogits], Any],
    hidden: NamedArray,
    head: Weight | None,
    targets: NamedArray,
    *,
    soft_cap: float | None = None,
    vocab_multiple: int = 1,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
    excluded: NamedArray | None = None,
) -> Any:
    """A number for each token, float32 {batch, position}, or a tuple of them, from its logits.

    Supports any cotangent (`map_chunks`). Other arguments as in `next_token_sums`.

    Args:
        numbers: of the tokens of a chunk, such as `ChunkLogits.nats`.
        temperature: the logits are divided by it, after the soft cap.
        excluded: int {batch, position}, a token that has no probability; None for none.
    """
    sharding = TokenSharding.of(hidden, head, vocab_multiple)

    def of_chunk(logits_CV: jax.Array, columns: tuple[jax.Array, ...]) -> Any:
        y_C, *excluded_C = columns
        logits_CV = without_tokens(logits_CV, excluded_C, sharding)
        return numbers(ChunkLogits.of(logits_CV if temperature == 1 else logits_CV / temperature, y_C, sharding))

    y_BS = targets.rearrange((BATCH, POSITION))
    columns = (y_BS.array, *_optional(excluded))
    values = map_chunks(of_chunk, hidden, head, columns, sharding, soft_cap, chunk_tokens)
    return jax.tree.map(lambda values_BS: NamedArray(values_BS, y_BS.axes), values)


@dataclass(frozen=True)
class _NextTokenLoss(ChunkedLoss):
    num_sums: ClassVar[int] = 5

    z: float
    smoothing: float
    dft: bool
    entropy: bool

    def of_chunk(self, logits_CV, columns, heads):
        """The sums of `CrossEntropySums`."""
        y_C, m_C, *excluded_C = columns
        sharding = self.sharding
        chunk = ChunkLogits.of(without_tokens(logits_CV, excluded_C, sharding), y_C, sharding)
        lse_C, nll_C = chunk.lse_C, chunk.nats()
        z_C = self.z * lse_C**2
        weight_C = jax.lax.stop_gradient(jnp.exp(-nll_C)) if self.dft else None
        loss_C = (nll_C if weight_C is None else weight_C * nll_C) + z_C
        if self.smoothing:
            sum_C = jnp.sum(sharding.fill_padding(chunk.logits_CV, 0.0), axis=1)
            mean_C = sharding.sum_vocab(sum_C) / sharding.vocab_size
            loss_C = (1 - self.smoothing) * nll_C + self.smoothing * (lse_C - mean_C) + z_C
        entropy_C = chunk.entropy() if self.entropy else jnp.zeros_like(lse_C)

        def gradient() -> jax.Array:
            scale_C = (1 if weight_C is None else weight_C) + 2 * self.z * lse_C
            target_CV = jnp.where(chunk.is_target(), 1 - self.smoothing, 0.0) + self.smoothing / sharding.vocab_size
            if weight_C is not None:
                target_CV *= weight_C[:, None]
            return m_C[:, None] * (scale_C[:, None] * chunk.softmax() - target_CV)

        return (loss_C, nll_C, z_C, chunk.predicts(y_C), entropy_C), gradient
