"""OLMoE: Llama's blocks with query and key norms over all heads jointly, and a mixture of experts in place of the MLP.

Source: Muennighoff et al. 2024 (arXiv:2409.02060), section 2.
"""

import jax

from jaxlm.core.field_types import NumLayers, PositiveFloat, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import router, usual_keys
from jaxlm.interop.hf.weights import biased_attention, embeddings_and_head, experts, pre_norms, qk_norms
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import projections
from jaxlm.models.decoders.moe_decoder import MoeConfig, check_moe, joint_norms, softmax_routing
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.routers import SoftmaxRouter
from jaxlm.reading.choices import choice


@choice(ModelConfig, "olmoe")
class OlmoeConfig(MoeConfig):
    """OLMoE. The defaults are OLMoE 1B-7B.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        clip_qkv: queries and keys, after their norms, and values are clipped to [-clip_qkv, clip_qkv]. Null does not clip.
        norm_topk_prob: normalize the probabilities of a token's experts to sum to 1.
    """

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 2048
    intermediate_dim: PositiveInt = 1024
    num_layers: NumLayers = 16
    num_heads: PositiveInt = 16
    num_experts: PositiveInt = 64
    num_experts_per_token: PositiveInt = 8
    attention_bias: bool = False
    clip_qkv: PositiveFloat | None = None
    norm_topk_prob: bool = False

    def check(self) -> None:
        check_moe(self)

    def routing(self) -> SoftmaxRouter:
        return softmax_routing(self, normalised=self.norm_topk_prob)

    def attention(self, keys: jax.Array) -> SelfAttention:
        maps = projections(self, keys, qkv_bias=self.attention_bias, out_bias=self.attention_bias)
        return SelfAttention(**maps, **joint_norms(self), clip_qkv=self.clip_qkv)


FAMILY = Family(
    model_types=("olmoe",),
    architecture="OlmoeForCausalLM",
    config=OlmoeConfig,
    aliases={"num_local_experts": "num_experts"},
    keys=(
        *usual_keys(length=4096, eps_default=1e-5),
        *router("num_experts", num_experts=64, chosen=8, aux_loss_coef=0.01),
        JsonKey("norm_topk_prob", "norm_topk_prob", False),
        JsonKey("attention_bias", "attention_bias", False),
        JsonKey("clip_qkv", "clip_qkv", None),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *embeddings_and_head(config),
        *pre_norms(),
        *biased_attention(config),
        *qk_norms("heads head_size", "kv_heads head_size"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
)
