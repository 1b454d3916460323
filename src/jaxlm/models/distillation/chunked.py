"""Computes divergences of a student's distribution Q from a teacher's P, and their gradients, in chunks of tokens.

Both distributions are softened by a temperature T, and the divergence is multiplied by T**2, so that the size of its
gradient hardly depends on T. The gradient is with respect to the logits u of the student, Q = softmax(u): dD/du_i = q_i
(g_i - sum_j q_j g_j), where g = dD/dq.

The functions of divergences work on log-probabilities [C, outcomes]. `total` sums over the outcomes, on all devices that
hold some.

The teacher is known either by its hidden states and head (`TeacherStates`), so that its logits are computed chunk by
chunk beside the student's, or by its top k tokens (`TeacherTopK`). The top k are compared as k + 1 outcomes: each of the
k tokens, and one for all other tokens together. Merging outcomes never increases a divergence, so this is a lower bound
of the divergence over the vocabulary; and it is 0 for a student that equals the teacher. Renormalizing the top k instead
would train the student to consider all other tokens impossible, and would make the reverse KL infinite.

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531), section 2; the generalized
Jensen-Shannon divergence, beta KL(P || M) + (1 - beta) KL(Q || M) with M = beta P + (1 - beta) Q: equation 1 of Agarwal et
al. 2024, "On-Policy Distillation of Language Models" (arXiv:2306.13649).

Shapes: those of `jaxlm.models.chunked_loss`; k tokens of the teacher, O outcomes.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, POSITION, TEACHER_TOP
from jaxlm.core.products.stored_weights import Weight
from jaxlm.models.chunked_loss import (
    ChunkedLoss,
    ChunkLogits,
    checked_cap,
    chunk_or_default,
    chunked_loss,
    hidden_and_head,
    local_logits,
    logits_of,
    logsumexp,
    map_chunks,
)
from jaxlm.models.token_sharding import TokenSharding

Total = Callable[[jax.Array], jax.Array]


class Divergence(abc.ABC):
    """A divergence between two distributions. Static, so it must be hashable."""

    @abc.abstractmethod
    def summands(self, log_p: jax.Array, log_q: jax.Array) -> jax.Array:
        """The divergence before it is summed over the outcomes."""

    @abc.abstractmethod
    def gradient(self, log_p: jax.Array, log_q: jax.Array, value: jax.Array, total: Total) -> jax.Array:
        """The gradient with respect to the logits of Q. Args: value: the divergence, [C]."""


@dataclass(frozen=True)
class ForwardKL(Divergence):
    """KL(P || Q). The student covers everything that the teacher considers possible."""

    def summands(self, log_p, log_q):
        return jnp.exp(log_p) * (log_p - log_q)

    def gradient(self, log_p, log_q, value, total):
        return jnp.exp(log_q) - jnp.exp(log_p)


@dataclass(frozen=True)
class ReverseKL(Divergence):
    """KL(Q || P). The student concentrates on what the teacher considers likely."""

    def summands(self, log_p, log_q):
        return jnp.exp(log_q) * (log_q - log_p)

    def gradient(self, log_p, log_q, value, total):
        return jnp.exp(log_q) * (log_q - log_p - value[:, None])


@dataclass(frozen=True)
class JensenShannon(Divergence):
    """The generalized Jensen-Shannon divergence. Args: beta: weight of the teacher in the mixture, in (0, 1)."""

    beta: float

    def summands(self, log_p, log_q):
        log_m = self._log_mixture(log_p, log_q)
        return self.beta * jnp.exp(log_p) * (log_p - log_m) + (1 - self.beta) * jnp.exp(log_q) * (log_q - log_m)

    def gradient(self, log_p, log_q, value, total):
        g = (1 - self.beta) * (log_q - self._log_mixture(log_p, log_q))
        q = jnp.exp(log_q)
        return q * (g - total(q * g)[:, None])

    def _log_mixture(self, log_p, log_q):
        return jnp.logaddexp(jnp.log(self.beta) + log_p, jnp.log1p(-self.beta) + log_q)


class TeacherStates(eqx.Module):
    """A teacher's output on a batch before its head.

    Attributes:
        hidden: {batch, position, embed}, or logits {batch, position, vocab} if `head` is None.
        head: {vocab, embed}.
        soft_cap: soft cap of its logits; None applies no cap.
    """

    hidden: NamedArray
    head: Weight | None
    soft_cap: float | None = eqx.field(static=True)


class TeacherTopK(eqx.Module):
    """A teacher's most likely tokens, softened by a temperature.

    Attributes:
        ids: int32 {batch, position, teacher_top}, the most likely first.
        log_probs: float32 {batch, position, teacher_top}.
        log_rest: float32 {batch, position}, log of the probability of all other tokens together.
    """

    ids: NamedArray
    log_probs: NamedArray
    log_rest: NamedArray


class DistillationSums(eqx.Module):
    """Sums over the tokens of a batch, weighted by the loss mask. Scalars, float32.

    Attributes:
        total: the objective. Only this field has a gradient.
        cross_entropy: negative log-likelihood of the targets in nats.
        divergence: divergence from the teacher in nats, at the temperature and without the factor T**2.
        correct: sum of the loss mask over tokens whose most likely prediction is the target.
        agreement: sum of the loss mask over tokens whose most likely prediction is the teacher's.
        teacher_cross_entropy: the teacher's negative log-likelihood of the targets in nats; None if it was not asked for.
    """

    total: jax.Array
    cross_entropy: jax.Array
    divergence: jax.Array
    correct: jax.Array
    agreement: jax.Array
    teacher_cross_entropy: jax.Array | None = None


def distillation_sums(
    hidden: NamedArray,
    head: Weight | None,
    targets: NamedArray,
    loss_mask: NamedArray,
    teacher: TeacherStates | TeacherTopK,
    *,
    divergence: Divergence,
    temperature: float,
    weight: float,
    soft_cap: float | None = None,
    vocab_multiple: int = 1,
    chunk_tokens: int | None = None,
    teacher_loss: bool = False,
) -> DistillationSums:
    """Summed loss `(1 - weight) * cross_entropy + weight * temperature**2 * divergence` of a batch.

    Differentiable with respect to `hidden` and `head`. The logits of all tokens are never materialized, neither the
    student's nor the teacher's. Arguments not listed here as in `next_token_sums`.

    Args:
        teacher: over the same vocabulary as the student, without a gradient.
        weight: in (0, 1].
        chunk_tokens: maximum number of tokens per chunk on one device; None uses `chunk_or_default`, and half of it
            with `TeacherStates`, because a chunk then has two arrays of logits.
        teacher_loss: also sum the teacher's cross-entropy, which only `TeacherStates` know.
    """
    assert not (teacher_loss and isinstance(teacher, TeacherTopK)), "a target may not be among the top k"
    sharding = TokenSharding.of(hidden, head, vocab_multiple)
    cap, chunk = checked_cap(soft_cap), chunk_or_default(chunk_tokens)
    options: dict[str, Any] = {"divergence": divergence, "temperature": float(temperature), "weight": float(weight)}
    teacher = jax.tree.map(jax.lax.stop_gradient, teacher)
    if isinstance(teacher, TeacherTopK):
        answer = (teacher.ids, teacher.log_probs, teacher.log_rest)
        columns = tuple(column.rearrange((BATCH, POSITION, ...)).array for column in answer)
        loss, heads = _TopKLoss(sharding, cap, chunk, **options), ()
    else:
        if chunk_tokens is None:
            chunk = max(1, chunk // 2)
        states, teacher_head = hidden_and_head(teacher.hidden, teacher.head, sharding)
        options |= {"teacher_cap": checked_cap(teacher.soft_cap), "teacher_loss": teacher_loss}
        loss = _VocabularyLoss(sharding, cap, chunk, **options)
        columns, heads = (states,), () if teacher_head is None else (teacher_head,)
    return DistillationSums(*chunked_loss(loss, hidden, head, targets, loss_mask, columns, heads))


def top_k_of(
    teacher: TeacherStates, num_top: int, temperature: float, *, chunk_tokens: int | None = None
) -> TeacherTopK:
    """A teacher's `num_top` most likely tokens, which must be fewer than its vocabulary. Without a gradient."""
    sharding = TokenSharding.of(teacher.hidden, teacher.head)

    def of_chunk(logits_CV: jax.Array, columns: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        soft_CV = logits_CV / temperature
        ids_Ck, top_Ck = _top_k(soft_CV, num_top, sharding)
        lse_C = logsumexp(soft_CV, sharding)
        rest_C = _rest(soft_CV, _is_top(soft_CV, ids_Ck, sharding), sharding)
        return ids_Ck, top_Ck - lse_C[:, None], rest_C - lse_C

    hidden, head = jax.lax.stop_gradient((teacher.hidden, teacher.head))
    of_tokens = map_chunks(of_chunk, hidden, head, (), sharding, teacher.soft_cap, chunk_tokens)
    ids, log_probs, log_rest = of_tokens
    tokens = tuple(teacher.hidden.resolve_axis(name) for name in (BATCH, POSITION))
    top = (*tokens, hax.Axis(TEACHER_TOP, num_top))
    return TeacherTopK(NamedArray(ids, top), NamedArray(log_probs, top), NamedArray(log_rest, tokens))


# --- One chunk --------------------------------------------------------------------------------------------------------


class _Outcomes(NamedTuple):
    """Holds what a chunk's divergence is computed from.

    Attributes:
        log_p, log_q: [C, O], log-probabilities of the teacher and the student.
        top_C: the teacher's most likely token.
        by_token: from the gradient with respect to the outcomes' logits to that with respect to the softened logits.
        teacher_nll_C: the teacher's negative log-likelihood of the targets; None if it was not asked for.
    """

    log_p: jax.Array
    log_q: jax.Array
    top_C: jax.Array
    by_token: Callable[[jax.Array], jax.Array] = lambda gradient_CO: gradient_CO
    teacher_nll_C: jax.Array | None = None


@dataclass(frozen=True)
class _DistillationLoss(ChunkedLoss):
    """Columns: targets, loss mask, then what `outcomes` reads."""

    divergence: Divergence
    temperature: float
    weight: float

    def of_chunk(self, logits_CV, columns, heads):
        """The sums of `DistillationSums`."""
        y_C, m_C, *teacher_columns = columns
        chunk = ChunkLogits.of(logits_CV, y_C, self.sharding)
        nll_C = chunk.nats()
        outcomes = self.outcomes(logits_CV / self.temperature, y_C, teacher_columns, heads)
        divergence_C = self.total(self.divergence.summands(outcomes.log_p, outcomes.log_q))
        loss_C = self.weight * self.temperature**2 * divergence_C
        if self.weight < 1:
            loss_C += (1 - self.weight) * nll_C

        def gradient() -> jax.Array:
            by_outcome = self.divergence.gradient(outcomes.log_p, outcomes.log_q, divergence_C, self.total)
            # T**2 from the loss, 1 / T from the softened logits.
            gradient_CV = self.weight * self.temperature * outcomes.by_token(by_outcome)
            if self.weight < 1:
                gradient_CV += (1 - self.weight) * (chunk.softmax() - chunk.is_target())
            return jnp.where(m_C[:, None] == 0, 0.0, m_C[:, None] * gradient_CV)

        teacher_C = () if outcomes.teacher_nll_C is None else (outcomes.teacher_nll_C,)
        numbers = (loss_C, nll_C, divergence_C, chunk.predicts(y_C), chunk.predicts(outcomes.top_C), *teacher_C)
        return numbers, gradient

    @abc.abstractmethod
    def outcomes(self, soft_CV, y_C, teacher_columns, heads) -> _Outcomes:
        """The two distributions over the outcomes.

        Args:
            soft_CV: the student's logits, divided by the temperature.
            y_C: the targets.
        """

    @abc.abstractmethod
    def total(self, x_CO: jax.Array) -> jax.Array:
        """The sum over all outcomes, [C]."""


@dataclass(frozen=True)
class _VocabularyLoss(_DistillationLoss):
    """Every token is an outcome. Reads the teacher's hidden states, and its head if it has one."""

    teacher_cap: float | None
    teacher_loss: bool

    @property
    def num_sums(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 6 if self.teacher_loss else 5

    def outcomes(self, soft_CV, y_C, teacher_columns, heads):
        (t_CD,), sharding = teacher_columns, self.sharding
        teacher_CV = logits_of(t_CD, heads[0] if heads else None, self.teacher_cap, sharding)
        if not heads:
            teacher_CV = local_logits(teacher_CV, soft_CV.shape[1], sharding)
        top_C = _first_maximum(teacher_CV, sharding)
        nll_C = ChunkLogits.of(teacher_CV, y_C, sharding).nats() if self.teacher_loss else None
        teacher_CV = teacher_CV / self.temperature
        log_p, log_q = (logits - logsumexp(logits, sharding)[:, None] for logits in (teacher_CV, soft_CV))
        return _Outcomes(log_p, log_q, top_C, teacher_nll_C=nll_C)

    def total(self, x_CO):
        return self.sharding.sum_vocab(jnp.sum(x_CO, axis=1))


@dataclass(frozen=True)
class _TopKLoss(_DistillationLoss):
    """The teacher's top k tokens are outcomes, and all other tokens together are the last one."""

    num_sums: ClassVar[int] = 5

    def outcomes(self, soft_CV, y_C, teacher_columns, heads):
        (ids_Ck, log_p_Ck, log_rest_C), sharding = teacher_columns, self.sharding
        num_local = soft_CV.shape[1]
        ids = sharding.local_ids(ids_Ck, num_local)
        local_Ck = jnp.take_along_axis(soft_CV, jnp.clip(ids, 0, num_local - 1), axis=1)
        top_Ck = sharding.sum_vocab(jnp.where((ids >= 0) & (ids < num_local), local_Ck, 0.0))
        is_top = _is_top(soft_CV, ids_Ck, sharding)
        lse_rest = _rest(soft_CV, is_top, sharding)
        log_q = jnp.concatenate([top_Ck, lse_rest[:, None]], axis=1) - logsumexp(soft_CV, sharding)[:, None]
        log_p = jnp.concatenate([log_p_Ck, log_rest_C[:, None]], axis=1)

        def by_token(gradient_CO: jax.Array) -> jax.Array:
            # The gradient of the last outcome spreads over its tokens in proportion to their probabilities.
            share_CV = jnp.exp(soft_CV - lse_rest[:, None])
            rest_CV = jnp.where(is_top, 0.0, share_CV * gradient_CO[:, -1:])
            return rest_CV.at[_rows_and_ids(soft_CV, ids_Ck, sharding)].set(gradient_CO[:, :-1], mode="drop")

        return _Outcomes(log_p, log_q, ids_Ck[:, 0], by_token)

    def total(self, x_CO):
        return jnp.sum(x_CO, axis=1)


def _first_maximum(logits_CV: jax.Array, sharding: TokenSharding) -> jax.Array:
    """The id of the most likely token, the first of equal ones."""
    num_local = logits_CV.shape[1]
    is_maximum = logits_CV == sharding.max_vocab(jnp.max(logits_CV, axis=1))[:, None]
    ids = jnp.arange(num_local, dtype=jnp.int32)
    if sharding.vocab_axes:
        ids = ids + jax.lax.axis_index(sharding.vocab_axes) * num_local
    return -sharding.max_vocab(-jnp.where(is_maximum, ids, jnp.iinfo(jnp.int32).max).min(axis=1))


def _top_k(logits_CV: jax.Array, num_top: int, sharding: TokenSharding) -> tuple[jax.Array, jax.Array]:
    """Ids and logits of the most likely tokens of the whole vocabulary, the most likely first."""
    num_local = logits_CV.shape[1]
    values, ids = jax.lax.top_k(logits_CV, min(num_top, num_local))
    if not sharding.vocab_axes:
        return ids, values
    ids = ids + jax.lax.axis_index(sharding.vocab_axes) * num_local
    values, ids = (jax.lax.all_gather(a, sharding.vocab_axes, axis=1, tiled=True) for a in (values, ids))
    values, order = jax.lax.top_k(values, num_top)
    return jnp.take_along_axis(ids, order, axis=1), values


def _rows_and_ids(logits_CV: jax.Array, ids_Ck: jax.Array, sharding: TokenSharding) -> tuple[jax.Array, jax.Array]:
    """Indices of tokens in this device's shard of the logits; out of bounds for tokens of other shards."""
    num_local = logits_CV.shape[1]
    ids = sharding.local_ids(ids_Ck, num_local)
    ids = jnp.where((ids >= 0) & (ids < num_local), ids, num_local)
    return jnp.arange(logits_CV.shape[0])[:, None], ids


def _is_top(logits_CV: jax.Array, ids_Ck: jax.Array, sharding: TokenSharding) -> jax.Array:
    """bool [C, V]: whether a token is among the given ones."""
    return jnp.zeros(logits_CV.shape, bool).at[_rows_and_ids(logits_CV, ids_Ck, sharding)].set(True, mode="drop")


def _rest(logits_CV: jax.Array, is_top: jax.Array, sharding: TokenSharding) -> jax.Array:
    """[C]: logsumexp over the tokens that are not among the top."""
    return logsumexp(jnp.where(is_top, -jnp.inf, logits_CV), sharding)
