"""OLMoE: Llama's blocks with query and key norms over all heads jointly, and a mixture of experts in place of the MLP.

Source: Muennighoff et al. 2024 (arXiv:2409.02060), section 2.
"""

from jaxlm.core.field_types import NumLayers, PositiveFloat, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import router, same_keys, usual_keys
from jaxlm.interop.hf.weights import expert_rows
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.moe_decoder import UniformMoeConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "olmoe")
class OlmoeConfig(LlamaAttention, UniformMoeConfig):
    """OLMoE. The defaults are OLMoE 1B-7B."""

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
    use_qk_norm = True
    norms_all_heads = True


FAMILY = Family(
    model_types=("olmoe",),
    architecture="OlmoeForCausalLM",
    config=OlmoeConfig,
    aliases={"num_local_experts": "num_experts"},
    keys=(
        *usual_keys(length=4096, eps_default=1e-5),
        *router("num_experts", num_experts=64, chosen=8, aux_loss_coef=0.01),
        *same_keys(norm_topk_prob=False, attention_bias=False, clip_qkv=None),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (*llama_rows(config, mlp=None), *expert_rows()),
)
