"""Rotary position embeddings.

Source: Su et al. 2021 (arXiv:2104.09864), section 3.2.2, with the two halves of a head as the real and imaginary parts
(the convention of GPT-NeoX and of Hugging Face checkpoints); frequency scaling for long contexts as in Llama 3.1
(Grattafiori et al. 2024, arXiv:2407.21783, and `llama_models/llama3/reference_impl/model.py`).
"""

import abc
import math
from dataclasses import dataclass, field

import draccus
import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from jaxlm.core.axes import HEAD_SIZE
from jaxlm.core.errors import ConfigError

_HALF = "half_head_size"


class Rotation(eqx.Module):
    """Cosines and sines of every token's angles, float32 {batch, position, half_head_size}."""

    cos: NamedArray
    sin: NamedArray

    def __call__(self, x: NamedArray) -> NamedArray:
        """Turns {..., head_size} vectors by their tokens' angles; computed in float32, returned in the dtype of `x`."""
        Half = hax.Axis(HEAD_SIZE, self.cos.axis_size(_HALF))
        still = x.axis_size(HEAD_SIZE) - 2 * Half.size  # the last features, where not all turn
        parts = [Half, Half, *([hax.Axis(HEAD_SIZE, still)] if still else [])]
        first, second, *rest = x.astype(jnp.float32).split(HEAD_SIZE, parts)
        first, second = (a.rename({HEAD_SIZE: _HALF}) for a in (first, second))
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        turned = [a.rename({_HALF: HEAD_SIZE}).rearrange((*x.axes[:-1], HEAD_SIZE)) for a in turned]
        return hax.concatenate(HEAD_SIZE, [*turned, *rest]).astype(x.dtype)


@dataclass(frozen=True)
class RotaryConfig(draccus.ChoiceRegistry, abc.ABC):
    """How fast each pair of features turns with the position. `type:` picks the rule; without it, `default`.

    Attributes:
        theta: the base of the geometric series of wavelengths.
        partial_rotary_factor: the share of a head's features that turn, its first ones.
    """

    theta: float = 10000.0
    partial_rotary_factor: float = 1.0

    @classmethod
    def default_choice_name(cls) -> str:
        """What a configuration without `type` means."""
        return "default"

    @abc.abstractmethod
    def frequencies(self, size: int, seq_len: int) -> np.ndarray:
        """Radians per position of every pair among `size` features, float64 [size / 2].

        Args:
            seq_len: the length that the model is for.
        """

    @abc.abstractmethod
    def amplitude(self, seq_len: int) -> float:
        """What rotated vectors are multiplied by."""

    @abc.abstractmethod
    def check(self, size: int) -> None:
        """Raises `ConfigError` where the numbers make no rotation of `size` features."""

    def num_turned(self, head_size: int) -> int:
        """How many features of a head turn."""
        return int(head_size * self.partial_rotary_factor)

    def rotation(self, positions: NamedArray, head_size: int, seq_len: int) -> Rotation:
        """The rotation of tokens at `positions` (int {batch, position}), which restart where documents do."""
        frequencies = jnp.asarray(self.frequencies(self.num_turned(head_size), seq_len), jnp.float32)
        radians = positions.array.astype(jnp.float32)[..., None] * frequencies
        angles = NamedArray(radians, (*positions.axes, hax.Axis(_HALF, frequencies.size)))
        cos, sin, amplitude = hax.cos(angles), hax.sin(angles), self.amplitude(seq_len)
        return Rotation(cos, sin) if amplitude == 1.0 else Rotation(cos * amplitude, sin * amplitude)


def check_rope(rope: RotaryConfig, num_heads: int, head_size: int) -> None:
    """Raises `ConfigError` where a rotation cannot be, or not of heads of this size."""
    _positive(rope, "theta")
    if not 0 < rope.partial_rotary_factor <= 1:
        raise ConfigError(
            f"model.rope.partial_rotary_factor: {rope.partial_rotary_factor} given, more than 0 and at most 1 expected"
        )
    turned = rope.num_turned(head_size)
    if turned % 2 or not turned:
        raise ConfigError(
            f"model.num_heads: {num_heads} heads have {head_size} features each, and {turned} of them turn; rotary"
            " positions need an even number. Change model.num_heads, model.hidden_dim, model.head_dim or"
            " model.rope.partial_rotary_factor"
        )
    rope.check(turned)


def _positive(rope: RotaryConfig, *names: str) -> None:
    for name in names:
        if not getattr(rope, name) > 0:
            raise ConfigError(f"model.rope.{name}: {getattr(rope, name)} given, a positive number expected")


@RotaryConfig.register_subclass("default")
@dataclass(frozen=True)
class DefaultRotary(RotaryConfig):
    """theta ** (-2 i / size) for pair i."""

    def frequencies(self, size: int, seq_len: int) -> np.ndarray:
        """See `RotaryConfig`."""
        return _series(self.theta, size)

    def amplitude(self, seq_len: int) -> float:
        """See `RotaryConfig`."""
        return 1.0

    def check(self, size: int) -> None:
        """See `RotaryConfig`."""


@RotaryConfig.register_subclass("linear")
@dataclass(frozen=True)
class LinearRotary(RotaryConfig):
    """Slows all waves evenly (Chen et al. 2023, arXiv:2306.15595, equation 3).

    Attributes:
        factor: by how much the context was stretched.
    """

    factor: float = 8.0

    def frequencies(self, size: int, seq_len: int) -> np.ndarray:
        """See `RotaryConfig`."""
        return _series(self.theta, size) / self.factor

    def amplitude(self, seq_len: int) -> float:
        """See `RotaryConfig`."""
        return 1.0

    def check(self, size: int) -> None:
        """See `RotaryConfig`."""
        _positive(self, "factor")


@RotaryConfig.register_subclass("llama3")
@dataclass(frozen=True)
class Llama3Rotary(RotaryConfig):
    """Slows the long waves by `factor`, keeps the short ones, and blends those between.

    Attributes:
        factor: by how much the context was stretched.
        low_freq_factor: waves longer than original_max_position_embeddings / this are slowed fully.
        high_freq_factor: waves shorter than original_max_position_embeddings / this are kept.
        original_max_position_embeddings: the context before stretching, in tokens.
    """

    theta: float = 500000.0
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def frequencies(self, size: int, seq_len: int) -> np.ndarray:
        """See `RotaryConfig`."""
        plain = _series(self.theta, size)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)  # within the original context
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return plain * (kept + (1 - kept) / self.factor)

    def amplitude(self, seq_len: int) -> float:
        """See `RotaryConfig`."""
        return 1.0

    def check(self, size: int) -> None:
        """See `RotaryConfig`."""
        _positive(self, "factor", "low_freq_factor", "original_max_position_embeddings")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"model.rope.high_freq_factor: {self.high_freq_factor} given, more than model.rope.low_freq_factor"
                f" ({self.low_freq_factor}) expected"
            )


@RotaryConfig.register_subclass("yarn")
@dataclass(frozen=True)
class YarnRotary(RotaryConfig):
    """Slows the waves that turn less than beta_slow times in the original context by `factor`, keeps those that turn
    more than beta_fast times, and blends those between (Peng et al. 2023, arXiv:2309.00071, equations 17 to 22).

    Attributes:
        factor: by how much the context was stretched.
        beta_fast, beta_slow: turns within the original context.
        attention_factor: what rotated vectors are multiplied by; null means 0.1 ln(factor) + 1.
        original_max_position_embeddings: the context before stretching, in tokens.
    """

    factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    original_max_position_embeddings: int = 32768

    def frequencies(self, size: int, seq_len: int) -> np.ndarray:
        """See `RotaryConfig`."""

        def pair_turning(times: float) -> float:
            wave = self.original_max_position_embeddings / (times * 2 * math.pi)
            return size * math.log(wave) / (2 * math.log(self.theta))

        low, high = max(math.floor(pair_turning(self.beta_fast)), 0), math.ceil(pair_turning(self.beta_slow))
        high = min(high, size - 1)
        slowed = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        plain = _series(self.theta, size)
        return plain * (1 - slowed) + plain / self.factor * slowed

    def amplitude(self, seq_len: int) -> float:
        """See `RotaryConfig`."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def check(self, size: int) -> None:
        """See `RotaryConfig`."""
        _positive(self, "factor", "beta_fast", "beta_slow", "original_max_position_embeddings")


@RotaryConfig.register_subclass("longrope")
@dataclass(frozen=True)
class LongRotary(RotaryConfig):
    """Slows each wave by a factor of its own (Ding et al. 2024, arXiv:2402.13753, section 3.2).

    Where seq_len is at most the original context the short factors apply, else the long ones: to all tokens, so that
    what a token becomes does not depend on the length of the text around it.

    Attributes:
        short_factor, long_factor: for every pair of features.
        original_max_position_embeddings: the context before stretching, in tokens.
        max_position_embeddings: the stretched context, which the amplitude is computed from.
    """

    short_factor: list[float] = field(default_factory=list)
    long_factor: list[float] = field(default_factory=list)
    original_max_position_embeddings: int = 4096
    max_position_embeddings: int = 131072

    def __post_init__(self):
        for name in ("short_factor", "long_factor"):  # a model carries its configuration: it must be hashable
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def frequencies(self, size: int, seq_len: int) -> np.ndarray:
        """See `RotaryConfig`."""
        factors = self.long_factor if seq_len > self.original_max_position_embeddings else self.short_factor
        return _series(self.theta, size) / np.asarray(factors, np.float64)

    def amplitude(self, seq_len: int) -> float:
        """See `RotaryConfig`."""
        stretched = self.max_position_embeddings / self.original_max_position_embeddings
        if stretched <= 1:
            return 1.0
        return math.sqrt(1 + math.log(stretched) / math.log(self.original_max_position_embeddings))

    def check(self, size: int) -> None:
        """See `RotaryConfig`."""
        _positive(self, "original_max_position_embeddings", "max_position_embeddings")
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != size // 2:
                raise ConfigError(
                    f"model.rope.{name}: {len(getattr(self, name))} factors given, one for each of {size // 2} pairs"
                    " expected"
                )


def _series(theta: float, size: int) -> np.ndarray:
    return theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
