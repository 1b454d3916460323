"""What families share whose blocks are Llama's: a norm before each part, rotary positions, gated feed-forward networks."""

import abc
from dataclasses import dataclass, field

import jax
from haliax import Axis

from jaxlm.core.errors import check_at_least
from jaxlm.models.decoder import (
    Decoder,
    DecoderBlock,
    DecoderConfig,
    check_sizes,
    check_window,
    decoder_flops,
    gated_mlp,
    pre_norm_block,
    projections,
    rms_norm,
)
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.layers import SelfAttention
from jaxlm.models.rope import DefaultRotary, RotaryConfig, check_rope
from jaxlm.models.stacks import LayerKind


@dataclass(frozen=True)
class PreNormConfig(DecoderConfig):
    """Sizes of such a family; what its attention is and which layers see a window, it says itself.

    Attributes:
        sliding_window: how many tokens a token sees, itself included; null means all before it.
        rope: how queries and keys are rotated.
    """

    sliding_window: int | None = None
    rope: RotaryConfig = field(default_factory=DefaultRotary)

    @abc.abstractmethod
    def attention(self, keys: jax.Array) -> SelfAttention:
        """Freshly initialised attention of one layer, from four keys."""

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        """A freshly initialised model."""
        return Decoder.init(self, Vocab, final_norm=rms_norm(self), key=key)


def check_pre_norm(config: PreNormConfig) -> None:
    """Raises `ConfigError` where what such families share cannot make a model."""
    check_sizes(config)
    check_rope(config.rope, config.num_heads, config.HeadSize.size)
    check_window(config.sliding_window)


@dataclass(frozen=True)
class DenseConfig(PreNormConfig):
    """A family with one feed-forward network a layer."""

    def block(self, *, key: jax.Array) -> DecoderBlock:
        """One freshly initialised block."""
        keys = jax.random.split(key, 7)
        return pre_norm_block(self, self.attention(keys[:4]), gated_mlp(self, keys[4:]))

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Floating-point operations of one training token."""
        return decoder_flops(self, vocab_size, mlp_matrices=3)


@dataclass(frozen=True)
class UniformConfig(PreNormConfig):
    """A family whose layers are all the same."""

    def check(self) -> None:
        """Raises `ConfigError` where the numbers cannot make a model."""
        check_pre_norm(self)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is, first to last: all the same."""
        return (LayerKind(self.rope, self.sliding_window),) * self.num_layers


@dataclass(frozen=True)
class PlainConfig(UniformConfig, DenseConfig):
    """A family whose layers are all the same, dense, and without biases."""

    def attention(self, keys: jax.Array) -> SelfAttention:
        """See `PreNormConfig.attention`."""
        return SelfAttention(**projections(self, keys, qkv_bias=False, out_bias=False))


@dataclass(frozen=True)
class LateWindowConfig(DenseConfig):
    """A family whose window, if it has one, begins behind the first layers.

    Attributes:
        max_window_layers: the first so many layers see everything.
    """

    max_window_layers: int = 0

    def check(self) -> None:
        """Raises `ConfigError` where the numbers cannot make a model."""
        check_pre_norm(self)
        check_at_least("model.max_window_layers", self.max_window_layers, 0)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is, first to last."""
        windows = [None if i < self.max_window_layers else self.sliding_window for i in range(self.num_layers)]
        return tuple(LayerKind(self.rope, window) for window in windows)
