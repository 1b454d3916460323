"""Llama: rotary positions, grouped queries, RMSNorm, SwiGLU, no biases.

Source: Touvron et al. 2023 (arXiv:2302.13971 and arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783).
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


@ModelConfig.register_subclass("llama")
@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Llama's sizes; the defaults are Llama 2 7B at half its context.

    Attributes:
        sliding_window: how many tokens a token sees, itself included; null means all before it.
        rope: how queries and keys are rotated.
    """

    sliding_window: int | None = None
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
