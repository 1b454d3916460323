"""Qwen3.5 with experts (3.6 too): Qwen3.5's layers with a mixture of experts, and one that all tokens share, as their MLP.

Source: Qwen team 2025, "Qwen3-Next" and "Qwen3.5".
"""

from jaxlm.interop.hf.family import Family
from jaxlm.interop.hf.hybrids import qwen3_5_keys, qwen_hybrid_keys, qwen_hybrid_moe_keys, qwen_hybrid_tensors
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import expert_rows, shared_expert_rows, stacked_expert_rows
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.qwen_hybrid import QwenHybridMoeConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen3_5_moe")
class Qwen35MoeConfig(QwenHybridMoeConfig):
    """Qwen3.5 with experts. The defaults are Qwen3.5 35B-A3B."""


FAMILY = Family(
    model_types=("qwen3_5_moe_text",),
    architecture="Qwen3_5MoeForCausalLM",
    config=Qwen35MoeConfig,
    keys=(*qwen_hybrid_moe_keys(num_experts=256, chosen=8), *qwen_hybrid_keys(), *qwen3_5_keys()),
    tensors=lambda config: qwen_hybrid_tensors(config, (*stacked_expert_rows(), *shared_expert_rows())),
    layouts=(
        # As transformers and the folders in fp8 have them.
        lambda config: qwen_hybrid_tensors(config, (*expert_rows(), *shared_expert_rows())),
        # Qwen3.5's MTP layer; that of Qwen3.6 is like the others.
        lambda config: qwen_hybrid_tensors(
            config, (*stacked_expert_rows(), *shared_expert_rows()), mlp_of_mtp=(*expert_rows(), *shared_expert_rows())
        ),
    ),
    text=(
        TextPart(("qwen3_5_moe",), ("qwen3_5_moe_text", None), (r"(model\.)?visual\.",), {"num_key_value_heads": 2}),
    ),
    kept=(r"mtp\.",),
)
