"""Mistral: Llama's blocks, in which a token sees a window.

Source: Jiang et al. 2023 (arXiv:2310.06825), section 2.
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


@ModelConfig.register_subclass("mistral")
@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """Mistral's sizes; the defaults are Mistral 7B v0.1.

    Attributes:
        sliding_window: how many tokens a token sees, itself included; null means all before it.
        rope: how queries and keys are rotated.
    """

    seq_len: int = 8192
    intermediate_dim: int = 14336
    num_kv_heads: int | None = 8
    sliding_window: int | None = 4096
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
