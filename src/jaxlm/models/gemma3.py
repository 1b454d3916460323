"""Gemma 3: norms before and behind everything, scaled embeddings, layers that see a window between those that see all.

Source: Gemma Team 2025 (arXiv:2503.19786), section 2, the text model.
"""

from dataclasses import dataclass, field

import jax
from haliax import Axis

from jaxlm.models.backends.scores import ScoreRule
from jaxlm.models.base import ModelConfig
from jaxlm.models.checks import check_at_least, check_positive
from jaxlm.models.decoder import (
    Decoder,
    DecoderBlock,
    DecoderConfig,
    check_sizes,
    check_window,
    decoder_flops,
    gated_mlp,
    projections,
)
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.layers import SelfAttention
from jaxlm.models.norms import RMSNorm
from jaxlm.models.rotary import DefaultRotary, RotaryConfig, check_rope
from jaxlm.models.transformer import LayerKind


@ModelConfig.register_subclass("gemma3")
@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """Gemma 3's sizes; the defaults are Gemma 3 1B.

    Attributes:
        query_pre_attn_scalar: scores are divided by its square root.
        attn_soft_cap: what scores stay below; null lets them grow.
        final_soft_cap: what logits stay below; null lets them grow.
        sliding_window: how many tokens a token sees, itself included, in the layers with a window.
        sliding_window_pattern: every so many layers, the last sees everything.
        rope: how queries and keys are rotated in layers that see everything.
        local_rope: how they are rotated in layers with a window.
    """

    seq_len: int = 8192
    hidden_dim: int = 1152
    intermediate_dim: int = 6912
    num_layers: int = 26
    num_heads: int = 4
    num_kv_heads: int | None = 1
    head_dim: int | None = 256
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-6
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: int = 256
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    sliding_window: int = 512
    sliding_window_pattern: int = 6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6))
    local_rope: RotaryConfig = field(default_factory=DefaultRotary)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is, first to last."""
        local, whole = LayerKind(self.local_rope, self.sliding_window), LayerKind(self.rope)
        return tuple(whole if (i + 1) % self.sliding_window_pattern == 0 else local for i in range(self.num_layers))

    def check(self) -> None:
        """Raises `ConfigError` where the numbers cannot make a model."""
        check_sizes(self)
        check_rope(self.rope, self.num_heads, self.HeadSize.size)
        check_rope(self.local_rope, self.num_heads, self.HeadSize.size)
        check_window(self.sliding_window)
        check_at_least("model.sliding_window_pattern", self.sliding_window_pattern, 1)
        for name in ("query_pre_attn_scalar", "attn_soft_cap", "final_soft_cap"):
            if getattr(self, name) is not None:
                check_positive(f"model.{name}", getattr(self, name))

    def block(self, *, key: jax.Array) -> DecoderBlock:
        """One freshly initialised block."""
        keys = jax.random.split(key, 7)
        maps = projections(self, keys[:4], qkv_bias=False, out_bias=False)
        rule = ScoreRule(soft_cap=self.attn_soft_cap)
        q_norm, k_norm = (RMSNorm.init(self.HeadSize, self.layer_norm_epsilon, offset=1.0) for _ in range(2))
        scale = self.query_pre_attn_scalar**-0.5
        attn = SelfAttention(**maps, q_norm=q_norm, k_norm=k_norm, scale=scale, rule=rule)
        norms = [self._norm() for _ in range(4)]
        return DecoderBlock(norms[0], attn, norms[1], gated_mlp(self, keys[4:]), norms[2], norms[3])

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        """A freshly initialised model."""
        return Decoder.init(
            self,
            Vocab,
            final_norm=self._norm(),
            key=key,
            embed_scale=self.hidden_dim**0.5,
            logit_soft_cap=self.final_soft_cap,
        )

    def _norm(self) -> RMSNorm:
        return RMSNorm.init(self.Embed, self.layer_norm_epsilon, offset=1.0)

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Floating-point operations of one training token."""
        return decoder_flops(self, vocab_size, mlp_matrices=3)
