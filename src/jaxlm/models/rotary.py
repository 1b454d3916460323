"""Rotary position embeddings.

Source: Su et al. 2021 (arXiv:2104.09864), section 3.2.2, with the two halves of a head as the real and imaginary parts
(the convention of GPT-NeoX and of Hugging Face checkpoints); frequency scaling for long contexts as in Llama 3.1
(Grattafiori et al. 2024, arXiv:2407.21783, and `llama_models/llama3/reference_impl/model.py`).
"""

import abc
import math
from dataclasses import dataclass

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
        Half = self.cos.resolve_axis(_HALF)
        first, second = x.astype(jnp.float32).split(HEAD_SIZE, [hax.Axis(HEAD_SIZE, Half.size)] * 2)
        first, second = (a.rename({HEAD_SIZE: _HALF}) for a in (first, second))
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return hax.concatenate(
            HEAD_SIZE, [a.rename({_HALF: HEAD_SIZE}).rearrange((*x.axes[:-1], HEAD_SIZE)) for a in turned]
        ).astype(x.dtype)


@dataclass(frozen=True)
class RotaryConfig(draccus.ChoiceRegistry, abc.ABC):
    """How fast each pair of features turns with the position. `type:` picks the rule; without it, `default`.

    Attributes:
        theta: the base of the geometric series of wavelengths.
    """

    theta: float = 10000.0

    @classmethod
    def default_choice_name(cls) -> str:
        """What a configuration without `type` means."""
        return "default"

    @abc.abstractmethod
    def frequencies(self, head_size: int) -> np.ndarray:
        """Radians per position of every feature pair, float64 [head_size / 2]."""

    def check(self) -> None:
        """Raises `ConfigError` where the numbers make no rotation."""
        if self.theta <= 0:
            raise ConfigError(f"model.rope.theta: {self.theta} given, a positive number expected")

    def rotation(self, positions: NamedArray, head_size: int) -> Rotation:
        """The rotation of tokens at `positions` (int {batch, position}), which restart where documents do."""
        frequencies = jnp.asarray(self.frequencies(head_size), jnp.float32)
        radians = positions.array.astype(jnp.float32)[..., None] * frequencies
        angles = NamedArray(radians, (*positions.axes, hax.Axis(_HALF, head_size // 2)))
        return Rotation(hax.cos(angles), hax.sin(angles))


@RotaryConfig.register_subclass("default")
@dataclass(frozen=True)
class DefaultRotary(RotaryConfig):
    """theta ** (-2 i / head_size) for pair i."""

    def frequencies(self, head_size: int) -> np.ndarray:
        """Radians per position of every feature pair, float64 [head_size / 2]."""
        return _series(self.theta, head_size)


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

    def check(self) -> None:
        """Raises `ConfigError` where the numbers make no rotation."""
        RotaryConfig.check(self)
        for name in ("factor", "low_freq_factor", "original_max_position_embeddings"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"model.rope.{name}: {getattr(self, name)} given, a positive number expected")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"model.rope.high_freq_factor: {self.high_freq_factor} given, more than model.rope.low_freq_factor"
                f" ({self.low_freq_factor}) expected"
            )

    def frequencies(self, head_size: int) -> np.ndarray:
        """Radians per position of every feature pair, float64 [head_size / 2]."""
        plain = _series(self.theta, head_size)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)  # within the original context
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return plain * (kept + (1 - kept) / self.factor)


def _series(theta: float, head_size: int) -> np.ndarray:
    return theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
