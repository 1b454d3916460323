"""Qwen3: Llama's blocks with a norm on every head's queries and keys.

Source: Yang et al. 2025 (arXiv:2505.09388), section 2.
"""

from dataclasses import dataclass, field

import jax
from haliax import Axis

from jaxlm.models.base import ModelConfig
from jaxlm.models.checks import check_at_least
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
from jaxlm.models.norms import RMSNorm
from jaxlm.models.rotary import DefaultRotary, RotaryConfig, check_rope
from jaxlm.models.transformer import LayerKind


@ModelConfig.register_subclass("qwen3")
@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Qwen3's sizes; the defaults are Qwen3 0.6B.

    Attributes:
        sliding_window: how many tokens a token sees, itself included, behind the first max_window_layers layers; null means
            all before it.
        max_window_layers: the first so many layers see everything.
        rope: how queries and keys are rotated.
    """

    seq_len: int = 4096
    hidden_dim: int = 1024
    intermediate_dim: int = 3072
    num_layers: int = 28
    num_heads: int = 16
    num_kv_heads: int | None = 8
    head_dim: int | None = 128
    layer_norm_epsilon: float = 1e-6
    tie_word_embeddings: bool = True
    sliding_window: int | None = None
    max_window_layers: int = 0
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is, first to last."""
        windows = [None if i < self.max_window_layers else self.sliding_window for i in range(self.num_layers)]
        return tuple(LayerKind(self.rope, window) for window in windows)

    def check(self) -> None:
        """Raises `ConfigError` where the numbers cannot make a model."""
        check_sizes(self)
        check_rope(self.rope, self.num_heads, self.HeadSize.size)
        check_window(self.sliding_window)
        check_at_least("model.max_window_layers", self.max_window_layers, 0)

    def block(self, *, key: jax.Array) -> DecoderBlock:
        """One freshly initialised block."""
        keys = jax.random.split(key, 7)
        q_norm, k_norm = (RMSNorm.init(self.HeadSize, self.layer_norm_epsilon) for _ in range(2))
        maps = projections(self, keys[:4], qkv_bias=False, out_bias=False)
        attn = SelfAttention(**maps, q_norm=q_norm, k_norm=k_norm)
        return pre_norm_block(self, attn, gated_mlp(self, keys[4:]))

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        """A freshly initialised model."""
        return Decoder.init(self, Vocab, final_norm=rms_norm(self), key=key)

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Floating-point operations of one training token."""
        return decoder_flops(self, vocab_size, mlp_matrices=3)
