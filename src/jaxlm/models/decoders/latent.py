"""Base config of families with multi-head latent attention.

Source: DeepSeek-AI 2024, DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
from haliax import Axis

from jaxlm.core.axes import HEAD_SIZE, LATENT, LATENT_KEY, QUERY_LATENT
from jaxlm.core.field_types import PositiveInt
from jaxlm.models.decoder import DecoderConfig
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.latent_attention import LatentAttention
from jaxlm.models.norms import RMSNorm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.models.stacks import LayerKind

_NORM_EPS = 1e-6  # of both latents, whatever `layer_norm_epsilon` is


@dataclass(frozen=True)
class LatentConfig(DecoderConfig):
    """What families with multi-head latent attention share. Families say the sizes.

    Attributes:
        q_lora_rank: features of a latent that queries are projected from. Null projects them from the residual stream.
        kv_lora_rank: features of the latent that keys and values of all heads are projected from.
        qk_nope_head_dim: features of queries and keys without a position, per head.
        qk_rope_head_dim: rotated features of queries and keys, which all heads share in keys.
        v_head_dim: features of values, per head.
        rope_interleave: rotate neighboring features, instead of pairs from the two halves.
        attention_bias: add biases to the projections to latents and to the output projection.
        mtp: one more layer predicts the token after the next one, as `objective.mtp_weight` trains it. False leaves such a
            layer of a folder as it is.
    """

    q_lora_rank: PositiveInt | None = 768
    kv_lora_rank: PositiveInt = 512
    qk_nope_head_dim: PositiveInt = 192
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 256
    rope_interleave: bool = True
    attention_bias: bool = False
    mtp: bool = False
    rope: RotaryConfig = field(default_factory=DefaultRotary)
    num_kv_heads: ClassVar[None] = None
    sliding_window: ClassVar[None] = None
    head_dim: ClassVar[Any] = property(lambda self: self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def RotarySize(self) -> Axis:
        return Axis(HEAD_SIZE, self.qk_rope_head_dim)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        kind = LayerKind(self.rope, interleaved=self.rope_interleave, score_factor=self.rope.score_factor)
        return (kind,) * self.num_layers

    def attention(self, keys: jax.Array) -> LatentAttention:
        """Initializes the attention of one layer. Takes four keys."""
        k_query, k_latent, k_heads, k_out = keys
        std, Heads, bias = self.initializer_range, self.Heads, self.attention_bias
        Queries, Latent = (Heads, self.HeadSize), Axis(LATENT, self.kv_lora_rank)
        KeyValue = Axis(HEAD_SIZE, self.qk_nope_head_dim + self.v_head_dim)
        plain = down = norm = up = None
        if self.q_lora_rank is None:
            plain = Linear.init(self.Embed, Queries, std=std, key=k_query)
        else:
            QueryLatent, (k_down, k_up) = Axis(QUERY_LATENT, self.q_lora_rank), jax.random.split(k_query)
            down = Linear.init(self.Embed, QueryLatent, std=std, key=k_down, use_bias=bias)
            norm = RMSNorm.init(QueryLatent, _NORM_EPS)
            up = Linear.init(QueryLatent, Queries, std=std, key=k_up)
        Both = Axis(LATENT_KEY, self.kv_lora_rank + self.qk_rope_head_dim)
        return LatentAttention(
            q_proj=plain,
            q_a_proj=down,
            q_a_norm=norm,
            q_b_proj=up,
            kv_a_proj_with_mqa=Linear.init(self.Embed, Both, std=std, key=k_latent, use_bias=bias),
            kv_a_norm=RMSNorm.init(Latent, _NORM_EPS),
            kv_b_proj=Linear.init(Latent, (Heads, KeyValue), std=std, key=k_heads),
            o_proj=Linear.init(
                (Heads, Axis(HEAD_SIZE, self.v_head_dim)), self.Embed, std=std, key=k_out, use_bias=bias
            ),
            scale=self.head_dim**-0.5,
        )
