"""Samples the next token from logits, with random keys of each row, and finds the texts that end a continuation.

Stop strings are searched in the decoded text, because one may start in the middle of a token.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import (
    Fraction,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    check_fields,
)


def row_keys(prompts: Sequence[Sequence[int]], rows: int, seed: int) -> jax.Array:
    """One key per row, from the seed, the prompt, and the number of earlier rows with the same prompt."""
    num_earlier: Counter[int] = Counter()
    words = np.zeros((rows, 2), np.uint32)
    for row, prompt in enumerate(prompts):
        checksum = zlib.crc32(np.asarray(prompt, np.int32).tobytes())
        words[row] = checksum, num_earlier[checksum]
        num_earlier[checksum] += 1
    key = jax.random.key(seed)
    return jax.vmap(lambda w: jax.random.fold_in(jax.random.fold_in(key, w[0]), w[1]))(jnp.asarray(words))


StopFunction = Callable[[list[int]], bool]
"""Whether the new tokens of a row end its continuation."""


@dataclass(frozen=True)
class StopStrings:
    """Ends a continuation at the first stop string, which is not part of the output.

    Only what the model wrote can end it, not the output of a tool.

    Attributes:
        texts: the stop strings, none of them empty.
        fragments: the parts of the text of some tokens, each with whether the model wrote it.
    """

    texts: Sequence[str]
    fragments: Callable[[list[int]], Sequence[tuple[str, bool]]]

    @staticmethod
    def of_text(texts: Sequence[str], decode: Callable[[list[int]], str]) -> "StopStrings":
        """For tokens that the model wrote all. Args: decode: decodes them to text."""
        return StopStrings(texts, lambda ids: [(decode(ids), True)])

    @property
    def until(self) -> StopFunction | None:
        """The stop function for `generate_tokens`; None if there are no stop strings."""
        return self._contains_stop if self.texts else None

    def before(self, ids: list[int]) -> str:
        """The text of the tokens up to the first stop string.

        Truncates at each stop string in the order given, as lm-evaluation-harness does; this matters if two overlap.
        """
        fragments = self.fragments(ids)
        for stop in self.texts:
            fragments = _until(stop, fragments)
        return "".join(text for text, _ in fragments)

    def _contains_stop(self, ids: list[int]) -> bool:
        fragments = self.fragments(ids)
        return any(is_own and stop in text for text, is_own in fragments for stop in self.texts)


def _until(stop: str, fragments: Sequence[tuple[str, bool]]) -> Sequence[tuple[str, bool]]:
    for number, (text, is_own) in enumerate(fragments):
        if is_own and stop in text:
            return [*fragments[:number], (text.partition(stop)[0], is_own)]
    return fragments


_LARGEST_TEMPERATURE = 1e20  # logits divided by more, or by less than its inverse, may not be in the range of float32


def check_temperature(value: float) -> None:
    """Raises `ConfigError` for a temperature that logits cannot be divided by."""
    if value and not 1 / _LARGEST_TEMPERATURE <= value <= _LARGEST_TEMPERATURE:
        raise ConfigError(
            f"temperature: {value} given, 0 (greedy) or {1 / _LARGEST_TEMPERATURE:g} to {_LARGEST_TEMPERATURE:g} expected"
        )


@dataclass(frozen=True)
class Sampling:
    """Sampling options, with the order and the meaning that transformers gives them: the penalty, the temperature, `top_k`,
    `top_p`, `min_p`.

    Attributes:
        temperature: logits are divided by this number; 0 is greedy decoding.
        top_k: sample from the k most likely tokens only, and those that are as likely as the last of them; None samples from
            all.
        top_p: nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751, section 3.1): sample from the fewest most
            likely tokens with at least this total probability, after `top_k`, and those that are as likely as the last of
            them; None samples from all.
        min_p: sample only from tokens with at least this fraction of the most likely token's probability (Nguyen et al.
            2024, arXiv:2407.01082, section 3); None samples from all.
        repetition_penalty: positive logits of tokens that the text has so far are divided by this number, and negative ones
            multiplied by it (Keskar et al. 2019, arXiv:1909.05858, section 4.1); 1 has no effect.
    """

    temperature: float = 1.0
    top_k: PositiveInt | None = None
    top_p: PositiveFraction | None = None
    min_p: Fraction | None = None
    repetition_penalty: PositiveFloat = 1.0

    def __post_init__(self):
        check_temperature(self.temperature)
        check_fields(self)

    @property
    def changed(self) -> dict[str, float]:
        """The options besides the temperature that have an effect: with them, tokens come from a distribution other than
        the model's."""
        options = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")}
        without = {"top_k": (None,), "top_p": (None, 1), "min_p": (None, 0), "repetition_penalty": (1,)}
        return {name: value for name, value in options.items() if value not in without[name]}

    @property
    def numbers(self) -> "TokenDistribution":
        """The options as arguments of a compiled program."""
        changed: dict[str, Any] = {name: np.float32(value) for name, value in self.changed.items()}
        if "top_k" in changed:
            changed["top_k"] = np.int32(min(self.top_k or 0, np.iinfo(np.int32).max))
        return TokenDistribution(np.float32(self.temperature) if self.temperature else None, **changed)


class TokenDistribution(eqx.Module):
    """`Sampling` in a compiled program: scalars, so that other values compile nothing. None is an option without an effect.

    Attributes:
        temperature: None for greedy decoding.
    """

    temperature: Any
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None

    @property
    def reads_text(self) -> bool:
        """Tells whether the distribution depends on which tokens the text has."""
        return self.repetition_penalty is not None

    def logits(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        """The logits of the distribution that tokens are sampled from, float32 [rows, vocab], -inf where a token is left out.

        Args:
            logits: of the model.
            seen: bool [rows, vocab], the tokens that each text has; None unless `reads_text`.
        """
        if self.repetition_penalty is not None:
            assert seen is not None, "the distribution reads the text"
            penalized = jnp.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
            logits = jnp.where(seen, penalized, logits)
        if self.temperature is None:
            return logits
        logits = logits / self.temperature
        if self.top_k is not None or self.top_p is not None:
            logits = jnp.where(logits < self._least(logits), -jnp.inf, logits)
        if self.min_p is not None:
            least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(self.min_p)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return logits

    def _least(self, logits: jax.Array) -> jax.Array:
        """The smallest logit that `top_k` and `top_p` leave, [rows, 1]."""
        ranked = jnp.sort(logits, axis=-1, descending=True)
        if self.top_k is not None:
            last = jax.lax.dynamic_index_in_dim(ranked, jnp.minimum(self.top_k, ranked.shape[-1]) - 1, axis=-1)
            ranked = jnp.where(ranked < last, -jnp.inf, ranked)
        is_left = ranked > -jnp.inf
        if self.top_p is not None:
            probabilities = jax.nn.softmax(ranked, axis=-1)
            is_left &= jnp.cumsum(probabilities, axis=-1) - probabilities < self.top_p
        return jnp.min(jnp.where(is_left, ranked, jnp.inf), axis=-1, keepdims=True)

    def draw(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """One token per row, int32 [rows]. Args: logits: those that the method `logits` returns; keys: one per row."""
        if self.temperature is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def with_token(seen: jax.Array | None, token: jax.Array) -> jax.Array | None:
    """`seen` of `TokenDistribution.logits` with one more token of each row, int32 [rows]."""
    return None if seen is None else seen.at[jnp.arange(len(token)), token].set(True)


def log_likelihoods(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Of a token of each row, float32 [rows]. Args: logits: float32 [rows, vocab]."""
    return jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)
