"""MPT: GPT-2's blocks without biases, and ALiBi in place of position embeddings.

Source: MosaicML 2023, "Introducing MPT-7B", and the code released with it (mosaicml/llm-foundry); ALiBi: Press et al.
2021 (arXiv:2108.12409).
"""

import jax

from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat, PositiveInt
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, DecoderConfig, check_sizes, plain_mlp, projections
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.norms import LayerNorm
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice


@choice(ModelConfig, "mpt")
class MptConfig(DecoderConfig):
    """MPT. The defaults are MPT 7B.

    Attributes:
        alibi_bias_max: sets the smallest ALiBi slope, `2 ** -alibi_bias_max`.
        softmax_scale: factor of the attention scores. Null means `1 / sqrt(head_dim)`.
        clip_qkv: queries, keys and values are clipped to [-clip_qkv, clip_qkv]. Null does not clip.
    """

    intermediate_dim: PositiveInt = 16384
    activation_function: str = "gelu"
    tie_word_embeddings: bool = True
    alibi_bias_max: NonNegativeFloat = 8.0
    softmax_scale: PositiveFloat | None = None
    clip_qkv: PositiveFloat | None = None

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return (LayerKind(),) * self.num_layers

    def check(self) -> None:
        check_sizes(self)

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 6)
        maps = projections(self, keys[:4], qkv_bias=False, out_bias=False)
        rule = ScoreRule(alibi_max=self.alibi_bias_max)
        attn = SelfAttention(**maps, clip_qkv=self.clip_qkv, scale=self.softmax_scale, rule=rule)
        return DecoderBlock(self.norm(), attn, self.norm(), plain_mlp(self, keys[4:], use_bias=False))

    def norm(self) -> LayerNorm:
        return LayerNorm.init(self.Embed, self.layer_norm_epsilon, use_bias=False)
