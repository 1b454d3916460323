"""Phi-3 and Phi-4: Llama's blocks; heads of which only a part may turn, and contexts that are stretched wave by wave.

Source: Abdin et al. 2024 (arXiv:2404.14219), section 2. Their files hold queries, keys and values as one matrix.
"""

from dataclasses import dataclass, field

import jax
from haliax import Axis

from jaxlm.models.base import ModelConfig
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
from jaxlm.models.rotary import DefaultRotary, RotaryConfig, check_rope
from jaxlm.models.transformer import LayerKind


@ModelConfig.register_subclass("phi3")
@dataclass(frozen=True)
class Phi3Config(DecoderConfig):
    """Phi-3's sizes; the defaults are Phi-3 mini 4k.

    Attributes:
        sliding_window: how many tokens a token sees, itself included; null means all before it.
        rope: how queries and keys are rotated; `longrope` for the long contexts.
    """

    seq_len: int = 4096
    hidden_dim: int = 3072
    intermediate_dim: int = 8192
    sliding_window: int | None = 2047
    rope: RotaryConfig = field(default_factory=DefaultRotary)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is, first to last: all the same."""
        return (LayerKind(self.rope, self.sliding_window),) * self.num_layers

    def check(self) -> None:
        """Raises `ConfigError` where the numbers cannot make a model."""
        check_sizes(self)
        check_rope(self.rope, self.num_heads, self.HeadSize.size)
        check_window(self.sliding_window)

    def block(self, *, key: jax.Array) -> DecoderBlock:
        """One freshly initialised block."""
        keys = jax.random.split(key, 7)
        attn = SelfAttention(**projections(self, keys[:4], qkv_bias=False, out_bias=False))
        return pre_norm_block(self, attn, gated_mlp(self, keys[4:]))

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        """A freshly initialised model."""
        return Decoder.init(self, Vocab, final_norm=rms_norm(self), key=key)

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Floating-point operations of one training token."""
        return decoder_flops(self, vocab_size, mlp_matrices=3)
