"""Divergences between a teacher's distribution P and a student's Q, and their gradients.

Source: the generalized Jensen-Shannon divergence is equation 1 of Agarwal et al. 2024, "On-Policy Distillation of
Language Models" (arXiv:2306.13649): beta KL(P || M) + (1 - beta) KL(Q || M) with M = beta P + (1 - beta) Q.

All functions work on log-probabilities [C, outcomes]. `total` sums over the outcomes, on all devices that hold some.
The gradient is with respect to the logits u of the student, Q = softmax(u):
dD/du_i = q_i (g_i - sum_j q_j g_j), where g = dD/dq.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

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
