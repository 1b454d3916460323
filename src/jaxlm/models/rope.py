"""Rotary position embeddings (RoPE).

Source: Su et al. 2021 (arXiv:2104.09864), section 3.2.2. The two halves of a head are the real and imaginary parts, as
in GPT-NeoX and most Hugging Face checkpoints; in others (GLM) neighboring features are. Frequency
scaling for long contexts is that of Llama 3.1 (Grattafiori et al. 2024, arXiv:2407.21783, and
`llama_models/llama3/reference_impl/model.py`).
"""

import abc
import math
from dataclasses import dataclass, field
from typing import ClassVar

import draccus
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from jaxlm.core.axes import BATCH, HEAD_SIZE, POSITION, ROTARY_PAIRS
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFloat, PositiveFraction, PositiveInt
from jaxlm.core.rules import Rules, ordered, together
from jaxlm.core.values.permutation import in_row_order, in_text_order
from jaxlm.reading.choices import choice

_HALF, _PAIR = "half_head_size", hax.Axis("pair_of_features", 2)


class Rotation(eqx.Module):
    """Cosines and sines of each token's angles, float32 {batch, position, half_head_size}.

    Attributes:
        interleaved: rotate neighboring features, instead of pairs from the two halves of the rotated features.
    """

    cos: NamedArray
    sin: NamedArray
    interleaved: bool = eqx.field(static=True, default=False)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Rotates {..., head_size} vectors by their token's angles. Computes in float32; returns the dtype of `x`."""
        Half = hax.Axis(HEAD_SIZE, self.cos.axis_size(_HALF))
        num_unrotated = x.axis_size(HEAD_SIZE) - 2 * Half.size  # the last features, if the rotation is partial
        unrotated = [hax.Axis(HEAD_SIZE, num_unrotated)] if num_unrotated else []
        if self.interleaved:
            whole, *rest = x.astype(jnp.float32).split(HEAD_SIZE, [Half.resize(2 * Half.size), *unrotated])
            first, second = whole.unflatten_axis(HEAD_SIZE, (Half, _PAIR)).unbind(_PAIR)
        else:
            first, second, *rest = x.astype(jnp.float32).split(HEAD_SIZE, [Half, Half, *unrotated])
        first, second = (a.rename({HEAD_SIZE: _HALF}) for a in (first, second))
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        rotated = [a.rename({_HALF: HEAD_SIZE}).rearrange((*x.axes[:-1], HEAD_SIZE)) for a in rotated]
        if self.interleaved:
            pairs = hax.stack(_PAIR, rotated).rearrange((*x.axes[:-1], HEAD_SIZE, _PAIR))
            rotated = [pairs.flatten_axes((HEAD_SIZE, _PAIR), HEAD_SIZE)]
        return hax.concatenate(HEAD_SIZE, [*rotated, *rest]).astype(x.dtype)

    def of_pairs(self, pairs: NamedArray) -> "Rotation":
        """The rotation of features of which each pair has its own frequency.

        Args:
            pairs: int {..., rotary_pairs}, the number of each pair's frequency here. Vectors to rotate have its other axes.
        """
        cos, sin = (a.take(_HALF, pairs).rename({ROTARY_PAIRS: _HALF}) for a in (self.cos, self.sin))
        return Rotation(cos, sin)


class Places(eqx.Module):
    """Says where each token is: its document, and its position there.

    Attributes:
        positions: int32 {batch, position}, counted from the start of each document.
        segment_ids: int32 {batch, position}, the number of the document in its row. The tokens of a document are neighbors
            in the text.
        order: as in `Inputs`.
    """

    positions: NamedArray
    segment_ids: NamedArray
    order: NamedArray | None = None

    def lengths(self) -> jax.Array:
        """The length of each token's document, as far as these tokens show it, int32 [batch, position].

        It does not depend on what else is in the row, so a document is computed alike wherever it is packed.
        """
        columns = (in_text_order(column, self.order) for column in (self.segment_ids, self.positions))
        ids_BT, positions_BT = (column.rearrange((BATCH, POSITION)).array for column in columns)
        end = ids_BT.shape[1] - 1
        is_last_BT = jnp.pad(ids_BT[:, 1:] != ids_BT[:, :-1], ((0, 0), (0, 1)), constant_values=True)
        last_BT = jax.lax.cummin(jnp.where(is_last_BT, jnp.arange(end + 1), end), axis=1, reverse=True)
        lengths_BT = jnp.take_along_axis(positions_BT, last_BT, axis=1) + 1
        axes = self.positions.rearrange((BATCH, POSITION)).axes
        return in_row_order(NamedArray(lengths_BT, axes), self.order).array


@dataclass(frozen=True)
class QueryScaling:
    """Scores that grow with the query's position in its document: queries times 1 + beta ln(1 + floor(position / length)).

    Source: Llama 4 and Ministral 3 in transformers, after Nakanishi 2025, "Scalable-Softmax" (arXiv:2501.19399).

    Attributes:
        beta: how strongly they grow.
        length: context length before extension, in tokens. Queries within it stay as they are.
    """

    beta: float
    length: int

    def factors(self, places: Places) -> NamedArray:
        """float32 {batch, position}."""
        extensions = hax.floor(places.positions.astype(jnp.float32) / self.length)
        return 1.0 + self.beta * hax.log1p(extensions)


@dataclass(frozen=True)
class RotaryConfig(draccus.ChoiceRegistry, abc.ABC):
    """Frequencies of the rotary position embedding. `type:` selects the scaling rule; the default is `default`.

    Attributes:
        theta: base of the frequencies, `theta ** (-2 i / size)` for pair i of `size` rotated features.
        partial_rotary_factor: fraction of each head's features that are rotated, counted from the first.
    """

    theta: PositiveFloat = 10000.0
    partial_rotary_factor: PositiveFraction = 1.0

    @classmethod
    def default_choice_name(cls) -> str:
        return "default"

    @abc.abstractmethod
    def frequencies(self, size: int, places: Places) -> np.ndarray | jax.Array:
        """Radians per position of each feature pair.

        Args:
            size: number of rotated features.
            places: of the tokens.

        Returns:
            float64 [size / 2], or, if they depend on the length of a token's document, float32 [batch, position, size / 2].
        """

    @property
    def amplitude(self) -> float:
        """The factor that rotated vectors get."""
        return 1.0

    @property
    def score_factor(self) -> float:
        """The factor of scores in latent attention (`YarnRotary.mscale_all_dim`), besides what `amplitude` makes of them."""
        return 1.0

    def switch_length(self) -> int | None:
        """The length beyond which all tokens of a document are rotated in another way; None if there is none. When a text
        grows beyond it, cached keys and values have to be computed again."""
        return None

    def original_length(self, seq_len: int) -> int:
        """The context length, in tokens, before anything extended it. Args: seq_len: of the model."""
        return seq_len

    def check(self, size: int) -> None:
        """Raises `ConfigError` if the keys are invalid for `size` rotated features."""

    def num_rotated(self, head_size: int) -> int:
        return int(head_size * self.partial_rotary_factor)

    def rotation(self, places: Places, head_size: int, *, interleaved: bool = False) -> Rotation:
        """The rotation of tokens at these places."""
        frequencies = jnp.asarray(self.frequencies(self.num_rotated(head_size), places), jnp.float32)
        positions = places.positions.rearrange((BATCH, POSITION))
        radians = positions.array.astype(jnp.float32)[..., None] * frequencies
        angles = NamedArray(radians, (*positions.axes, hax.Axis(_HALF, frequencies.shape[-1])))
        cos, sin = hax.cos(angles), hax.sin(angles)
        if self.amplitude != 1.0:
            cos, sin = cos * self.amplitude, sin * self.amplitude
        return Rotation(cos, sin, interleaved)


def check_rope(rope: RotaryConfig, num_heads: int, head_size: int) -> None:
    """Raises `ConfigError` if the keys are invalid, alone or for heads of this size."""
    num_rotated = rope.num_rotated(head_size)
    if not 0 < 2 * _num_pairs(num_rotated) <= head_size:
        raise ConfigError(
            f"model.num_heads: {num_heads} heads have {head_size} features each, of which {num_rotated} are rotated;"
            " rotary position embeddings need an even number, or one more feature for the last pair. Change"
            " the keys that say the size of a head (such as model.head_dim), or model.rope.partial_rotary_factor"
        )
    rope.check(num_rotated)


@choice(RotaryConfig, "default")
class DefaultRotary(RotaryConfig):
    """No scaling: pair i of `size` rotated features has frequency `theta ** (-2 i / size)`."""

    def frequencies(self, size: int, places: Places) -> np.ndarray:
        return _unscaled_frequencies(self.theta, size)


@choice(RotaryConfig, "proportional")
class ProportionalRotary(RotaryConfig):
    """Rotates the first of all feature pairs with the frequencies that they have among all of them, and no others.

    Pair i joins features i and `size / 2 + i` of a whole head, as if all were rotated. Its frequency is
    `theta ** (-2 i / size)` in the first `partial_rotary_factor` of the pairs, and 0 in the others.

    Source: Gemma 4, global layers, in transformers.
    """

    def frequencies(self, size: int, places: Places) -> np.ndarray:
        unscaled = _unscaled_frequencies(self.theta, size)
        return np.where(np.arange(len(unscaled)) < int(size * self.partial_rotary_factor) // 2, unscaled, 0.0)

    def num_rotated(self, head_size: int) -> int:
        return head_size


@choice(RotaryConfig, "linear")
class LinearRotary(RotaryConfig):
    """Position interpolation: divides all frequencies by `factor` (Chen et al. 2023, arXiv:2306.15595, equation 3).

    Attributes:
        factor: context length after extension divided by the original context length.
    """

    factor: PositiveFloat = 8.0

    def frequencies(self, size: int, places: Places) -> np.ndarray:
        return _unscaled_frequencies(self.theta, size) / self.factor

    def original_length(self, seq_len: int) -> int:
        return round(seq_len / self.factor)


@choice(RotaryConfig, "dynamic")
class DynamicRotary(RotaryConfig):
    """Dynamic NTK: a document beyond the original context increases theta, so that low frequencies are stretched.

    Source: u/emozilla 2023, "Dynamically Scaled RoPE", and transformers' `dynamic`. A document within the original context
    is not scaled. While a text grows, its cached keys stay as they are.

    Attributes:
        factor: how strongly theta grows with the length.
        original_max_position_embeddings: context length before extension, in tokens.
    """

    factor: PositiveFloat = 2.0
    original_max_position_embeddings: PositiveInt = 2048

    def frequencies(self, size: int, places: Places) -> jax.Array:
        extension_BT = jnp.maximum(places.lengths() / self.original_max_position_embeddings, 1.0)
        growth_BT = 1.0 + self.factor * (extension_BT - 1.0)
        # (theta * growth ** (size / (size - 2))) ** (-2 i / size), with theta's part computed in float64.
        powers = -np.arange(0, size, 2, dtype=np.float64) / (size - 2)
        unscaled = jnp.asarray(_unscaled_frequencies(self.theta, size), jnp.float32)
        return unscaled * growth_BT[..., None] ** jnp.asarray(powers, jnp.float32)

    def original_length(self, seq_len: int) -> int:
        return self.original_max_position_embeddings

    def check(self, size: int) -> None:
        if size <= 2:
            raise ConfigError(
                f"model.rope.type: dynamic given, which needs more than {size} rotated features in a head"
            )


@choice(RotaryConfig, "llama3")
class Llama3Rotary(RotaryConfig):
    """Llama 3.1: divides low frequencies by `factor`, keeps high ones, and interpolates between the two.

    Attributes:
        factor: context length after extension divided by the original context length.
        low_freq_factor: wavelengths above `original_max_position_embeddings / low_freq_factor` tokens are scaled fully.
        high_freq_factor: wavelengths below `original_max_position_embeddings / high_freq_factor` tokens are not scaled.
        original_max_position_embeddings: context length before extension, in tokens.
    """

    theta: PositiveFloat = 500000.0
    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_position_embeddings: PositiveInt = 8192
    key_rules: ClassVar[Rules] = (ordered("low_freq_factor", "high_freq_factor", strictly=True),)

    def frequencies(self, size: int, places: Places) -> np.ndarray:
        unscaled = _unscaled_frequencies(self.theta, size)
        num_rotations = self.original_max_position_embeddings * unscaled / (2 * math.pi)
        smooth = (num_rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return unscaled * (smooth + (1 - smooth) / self.factor)

    def original_length(self, seq_len: int) -> int:
        return self.original_max_position_embeddings


@choice(RotaryConfig, "yarn")
class YarnRotary(RotaryConfig):
    """YaRN (Peng et al. 2023, arXiv:2309.00071, equations 17 to 22).

    Frequencies that make fewer than `beta_slow` rotations in the original context are divided by `factor`; those that
    make more than `beta_fast` are kept; those between are interpolated.

    Attributes:
        factor: context length after extension divided by the original context length.
        beta_fast, beta_slow: numbers of rotations within the original context.
        attention_factor: factor that rotated vectors are multiplied by. Null means `0.1 * ln(factor) + 1`, or, with
            both `mscale` and `mscale_all_dim`, `(0.1 * mscale * ln(factor) + 1) / (0.1 * mscale_all_dim * ln(factor) + 1)`.
        mscale, mscale_all_dim: see `attention_factor`. Give both or none. Latent attention multiplies scores by
            `(0.1 * mscale_all_dim * ln(factor) + 1)^2` besides.
        truncate: round the pairs between which frequencies are interpolated outwards, to whole numbers.
        original_max_position_embeddings: context length before extension, in tokens.
    """

    factor: PositiveFloat = 4.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_factor: PositiveFloat | None = None
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    truncate: bool = True
    original_max_position_embeddings: PositiveInt = 32768
    key_rules: ClassVar[Rules] = (
        together("mscale", "mscale_all_dim", why="instead of which attention_factor may be given"),
    )

    def frequencies(self, size: int, places: Places) -> np.ndarray:
        def pair_with_rotations(num_rotations: float) -> float:
            inverse_frequency = self.original_max_position_embeddings / (num_rotations * 2 * math.pi)
            return size * math.log(inverse_frequency) / (2 * math.log(self.theta))

        low, high = pair_with_rotations(self.beta_fast), pair_with_rotations(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = np.clip((np.arange(_num_pairs(size)) - low) / (high - low or 0.001), 0.0, 1.0)
        unscaled = _unscaled_frequencies(self.theta, size)
        return unscaled * (1 - ramp) + unscaled / self.factor * ramp

    def original_length(self, seq_len: int) -> int:
        return self.original_max_position_embeddings

    def check(self, size: int) -> None:
        if self.theta == 1.0:
            raise ConfigError("model.rope.theta: 1.0 given, but yarn needs another number: all frequencies would be 1")

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._scaled(self.mscale) / self._scaled(self.mscale_all_dim)
        return self._scaled(1.0)

    @property
    def score_factor(self) -> float:
        return 1.0 if self.mscale_all_dim is None else self._scaled(self.mscale_all_dim) ** 2

    def _scaled(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@choice(RotaryConfig, "longrope")
class LongRotary(RotaryConfig):
    """LongRoPE: divides each frequency by its own factor (Ding et al. 2024, arXiv:2402.13753, section 3.2).

    `short_factor` applies to documents of at most `original_max_position_embeddings` tokens, `long_factor` to longer ones, in
    training too. Each document of a row or batch counts for itself, so its numbers do not depend on what it is packed with.
    When a generated text grows beyond that length, its cached keys and values are computed again.

    Attributes:
        short_factor, long_factor: one factor per feature pair.
        original_max_position_embeddings: context length before extension, in tokens.
        max_position_embeddings: context length after extension, in tokens. Sets the factor that rotated vectors are
            multiplied by.
        attention_factor: factor that rotated vectors are multiplied by. Null means `sqrt(1 + ln(s) / ln(original))`, where
            s is the extended context length divided by the original one (1 if it is not longer).
    """

    short_factor: list[PositiveFloat] = field(default_factory=list)
    long_factor: list[PositiveFloat] = field(default_factory=list)
    original_max_position_embeddings: PositiveInt = 4096
    max_position_embeddings: PositiveInt = 131072
    attention_factor: PositiveFloat | None = None

    def __post_init__(self):
        for name in ("short_factor", "long_factor"):  # the config is a static field of the model: it must be hashable
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def frequencies(self, size: int, places: Places) -> jax.Array:
        unscaled = _unscaled_frequencies(self.theta, size)
        short, long = (
            jnp.asarray(unscaled / np.asarray(f), jnp.float32) for f in (self.short_factor, self.long_factor)
        )
        is_long_BT = places.lengths() > self.original_max_position_embeddings
        return jnp.where(is_long_BT[..., None], long, short)

    def switch_length(self) -> int:
        return self.original_max_position_embeddings

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        return longrope_attention_factor(self.max_position_embeddings / original, original)

    def original_length(self, seq_len: int) -> int:
        return self.original_max_position_embeddings

    def check(self, size: int) -> None:
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != _num_pairs(size):
                raise ConfigError(
                    f"model.rope.{name}: {len(getattr(self, name))} factors given, {_num_pairs(size)} expected (one per pair"
                    " of rotated features)"
                )


def longrope_attention_factor(extension: float, original: int) -> float:
    """LongRoPE's factor of rotated vectors (Ding et al. 2024, section 3.3).

    Args:
        extension: context length after extension divided by the original one.
        original: the original context length, in tokens.
    """
    return math.sqrt(1 + math.log(extension) / math.log(original)) if extension > 1 else 1.0


def _num_pairs(size: int) -> int:
    """Pairs of `size` rotated features. The last pair of an odd number includes one more feature, as in transformers."""
    return (size + 1) // 2


def _unscaled_frequencies(theta: float, size: int) -> np.ndarray:
    return theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
