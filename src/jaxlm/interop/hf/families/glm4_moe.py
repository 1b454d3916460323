"""GLM-4.5, 4.6 and 4.7: experts with a router by sigmoid scores and a correction bias, and one that all tokens share.

Source: GLM-4.5 Team 2025 (arXiv:2508.06471), section 2.1.
"""

from collections.abc import Iterator
from dataclasses import field

from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.grouped_experts import balanced_experts, further_layers
from jaxlm.interop.hf.mtp import COPIES_BEHIND_LAYERS, mtp_behind_layers
from jaxlm.interop.hf.shared_keys import rope, usual_keys
from jaxlm.interop.hf.weights import (
    Tensor,
    attention,
    correction_bias,
    embeddings_and_head,
    expert_rows,
    gated_mlp,
    pre_norms,
    qk_norms,
    rows_by_stack,
    shared_expert_rows,
)
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.moe_decoder import BalancedMoeConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "glm4_moe")
class Glm4MoeConfig(LlamaAttention, BalancedMoeConfig):
    """GLM-4.5 to 4.7. The defaults are GLM-4.5 Air.

    Attributes:
        attention_bias: add biases to the query, key and value projections.
        use_qk_norm: norms on each head's queries and keys.
        mtp: one more layer predicts the token after the next one, as `objective.mtp_weight` trains it. False leaves such a
            layer of a folder as it is.
    """

    seq_len: PositiveInt = 4096
    intermediate_dim: PositiveInt = 1408
    dense_intermediate_dim: PositiveInt | None = 10944
    num_layers: NumLayers = 46
    num_heads: PositiveInt = 96
    num_kv_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 128
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e6, partial_rotary_factor=0.5))
    num_experts: PositiveInt = 128
    num_experts_per_token: PositiveInt = 8
    attention_bias: bool = True
    use_qk_norm: bool = False
    mtp: bool = False
    attention_out_bias = False


def _attention(config: Glm4MoeConfig) -> Iterator[Tensor]:
    yield from pre_norms()
    yield from attention(qkv_bias=config.attention_bias)
    if config.use_qk_norm:
        yield from qk_norms()


def _experts() -> Iterator[Tensor]:
    yield from expert_rows()
    yield correction_bias("mlp.gate")
    yield from shared_expert_rows("shared_experts", gate=False)


FAMILY = Family(
    model_types=("glm4_moe",),
    architecture="Glm4MoeForCausalLM",
    config=Glm4MoeConfig,
    aliases={"num_local_experts": "n_routed_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    keys=(
        *usual_keys(length=131072, width=None, eps_default=1e-5, rotary=rope(partial=0.5, rotates_part=True)),
        *balanced_experts(width=1408, dense_width=10944, num_experts=128, chosen=8, num_dense=1),
        JsonKey("use_qk_norm", "use_qk_norm", False),
        JsonKey("attention_bias", "attention_bias", False),
        FixedKey("attention_dropout", 0.0),
        further_layers(),
    ),
    tensors=lambda config: (
        *rows_by_stack(
            config,
            embeddings_and_head(config),
            experts=(*_attention(config), *_experts()),
            dense=(*_attention(config), *gated_mlp()),
        ),
        *mtp_behind_layers(config, (*_attention(config), *_experts())),
    ),
    further="eh_proj.weight",
    copies=COPIES_BEHIND_LAYERS,
)
