"""Granite MoE: Granite's blocks with a mixture of experts in place of the MLP.

Source: Granite Team 2024, "Granite 3.0 Language Models", section 2.
"""

from collections.abc import Iterator

import jax
from haliax import Axis

from jaxlm.core.field_types import NumLayers, PositiveFloat, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import router, usual_keys
from jaxlm.interop.hf.weights import BLOCK, Tensor, biased_attention, embeddings_and_head, fused, pre_norms, single
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import Decoder, projections, rms_norm
from jaxlm.models.decoders.moe_decoder import MoeConfig, check_moe, softmax_routing
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.routers import SoftmaxRouter
from jaxlm.reading.choices import choice


@choice(ModelConfig, "granitemoe")
class GraniteMoeConfig(MoeConfig):
    """Granite MoE. The defaults are Granite 3.0 1B-A400M.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        embedding_multiplier: token embeddings are multiplied by this number.
        attention_multiplier: attention scores are multiplied by this number, in place of `1 / sqrt(head_dim)`.
        residual_multiplier: the outputs of attention and experts are multiplied by this number before they are added.
        logits_scaling: logits are divided by this number.
    """

    seq_len: PositiveInt = 4096
    hidden_dim: PositiveInt = 1024
    intermediate_dim: PositiveInt = 512
    num_layers: NumLayers = 24
    num_heads: PositiveInt = 16
    num_kv_heads: PositiveInt | None = 8
    num_experts: PositiveInt = 32
    num_experts_per_token: PositiveInt = 8
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    embedding_multiplier: PositiveFloat = 12.0
    attention_multiplier: PositiveFloat = 0.015625
    residual_multiplier: PositiveFloat = 0.22
    logits_scaling: PositiveFloat = 6.0

    def check(self) -> None:
        check_moe(self)

    def routing(self) -> SoftmaxRouter:
        return softmax_routing(self, normalised=True)

    def attention(self, keys: jax.Array) -> SelfAttention:
        maps = projections(self, keys, qkv_bias=self.attention_bias, out_bias=self.attention_bias)
        return SelfAttention(**maps, scale=self.attention_multiplier)

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        scales = {"embed_scale": self.embedding_multiplier, "final_scale": 1 / self.logits_scaling}
        return Decoder.init(self, Vocab, final_norm=rms_norm(self), key=key, **scales)


def _experts() -> Iterator[Tensor]:
    """The router, and the experts of a layer as matrices [experts, out, in]: gate and up as one."""
    layer, ours = "model.layers.{layer}.block_sparse_moe.", f"{BLOCK}mlp."
    yield single(f"{layer}router.layer.weight", f"{ours}router.weight", "routes | embed")
    gate_up = {f"{ours}{name}_proj.weight": "experts | mlp | embed" for name in ("gate", "up")}
    yield fused(f"{layer}input_linear.weight", gate_up, along=1)
    yield single(f"{layer}output_linear.weight", f"{ours}down_proj.weight", "experts | embed | mlp")


FAMILY = Family(
    model_types=("granitemoe",),
    architecture="GraniteMoeForCausalLM",
    config=GraniteMoeConfig,
    keys=(
        *usual_keys(length=2048),
        *router("num_local_experts", num_experts=8, chosen=2),
        JsonKey("attention_bias", "attention_bias", False),
        *(
            JsonKey(name, name, 1.0)
            for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        ),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *embeddings_and_head(config),
        *pre_norms(),
        *biased_attention(config),
        *_experts(),
    ),
)
