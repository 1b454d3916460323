"""What Gemma 2 and 3 share: norms before and behind everything, scaled embeddings, layers that see a window between those
that see all."""

import abc
from dataclasses import dataclass

import jax
from haliax import Axis

from jaxlm.core.errors import check_at_least, check_positive
from jaxlm.models.attention.scores import ScoreRule
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
from jaxlm.models.rope import RotaryConfig, check_rope
from jaxlm.models.stacks import LayerKind


@dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    """Sizes of such a family; how its layers rotate, and its queries' and keys' norms, it says itself.

    Attributes:
        query_pre_attn_scalar: scores are divided by its square root.
        attn_soft_cap: what scores stay below; null lets them grow.
        final_soft_cap: what logits stay below; null lets them grow.
        sliding_window: how many tokens a token sees, itself included, in the layers with a window.
        sliding_window_pattern: every so many layers, the last sees everything.
    """

    seq_len: int = 8192
    num_layers: int = 26
    head_dim: int | None = 256
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-6
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: int = 256
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    sliding_window: int = 4096
    sliding_window_pattern: int = 2

    @property
    @abc.abstractmethod
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        """Of layers with a window, and of those that see everything."""

    @abc.abstractmethod
    def head_norms(self) -> tuple[RMSNorm | None, RMSNorm | None]:
        """Of every head's queries and keys, if the family has them."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is, first to last."""
        near, far = self.rotations
        local, whole = LayerKind(near, self.sliding_window), LayerKind(far)
        return tuple(whole if (i + 1) % self.sliding_window_pattern == 0 else local for i in range(self.num_layers))

    def check(self) -> None:
        """Raises `ConfigError` where the numbers cannot make a model."""
        check_sizes(self)
        for rope in self.rotations:
            check_rope(rope, self.num_heads, self.HeadSize.size)
        check_window(self.sliding_window)
        check_at_least("model.sliding_window_pattern", self.sliding_window_pattern, 1)
        for name in ("query_pre_attn_scalar", "attn_soft_cap", "final_soft_cap"):
            if getattr(self, name) is not None:
                check_positive(f"model.{name}", getattr(self, name))

    def block(self, *, key: jax.Array) -> DecoderBlock:
        """One freshly initialised block."""
        keys = jax.random.split(key, 7)
        q_norm, k_norm = self.head_norms()
        attn = SelfAttention(
            **projections(self, keys[:4], qkv_bias=False, out_bias=False),
            q_norm=q_norm,
            k_norm=k_norm,
            scale=self.query_pre_attn_scalar**-0.5,
            rule=ScoreRule(soft_cap=self.attn_soft_cap),
        )
        norms = [gemma_norm(self, self.Embed) for _ in range(4)]
        return DecoderBlock(norms[0], attn, norms[1], gated_mlp(self, keys[4:]), norms[2], norms[3])

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        """A freshly initialised model."""
        return Decoder.init(
            self,
            Vocab,
            final_norm=gemma_norm(self, self.Embed),
            key=key,
            embed_scale=self.hidden_dim**0.5,
            logit_soft_cap=self.final_soft_cap,
        )

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Floating-point operations of one training token."""
        return decoder_flops(self, vocab_size, mlp_matrices=3)


def gemma_norm(config: GemmaConfig, Over: Axis) -> RMSNorm:
    """A norm whose weights stand for what is added to 1."""
    return RMSNorm.init(Over, config.layer_norm_epsilon, offset=1.0)
