"""Qwen3-Next: as Qwen3.5 with experts, with the projections of recurrent layers as one matrix.

Source: Qwen team 2025, "Qwen3-Next".
"""

from collections.abc import Iterator

from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.hybrids import GDN, qwen_hybrid_keys, qwen_hybrid_moe_keys, qwen_hybrid_tensors
from jaxlm.interop.hf.weights import BLOCK, Tensor, expert_rows, fused, shared_expert_rows
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.qwen_hybrid import QwenHybridMoeConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen3_next")
class Qwen3NextConfig(QwenHybridMoeConfig):
    """Qwen3-Next. The defaults are Qwen3-Next 80B-A3B."""

    num_layers: NumLayers = 48
    num_experts: PositiveInt = 512
    num_experts_per_token: PositiveInt = 10
    norm_topk_prob: bool = True


def _projections() -> Iterator[Tensor]:
    """Of recurrent layers: queries, keys, values and gates take turns by key head, as do the other two."""
    outputs = {"q": "state_key", "k": "state_key", "v": "state_group head_size", "gate": "state_group head_size"}
    for name, ours in (("qkvz", outputs), ("ba", dict.fromkeys(("beta", "decay"), "state_group"))):
        parts = {f"{BLOCK}attn.{n}_proj.weight": f"state_heads | {out} | embed" for n, out in ours.items()}
        yield fused(f"{GDN}in_proj_{name}.weight", parts, along=1, merged=2)


FAMILY = Family(
    model_types=("qwen3_next",),
    architecture="Qwen3NextForCausalLM",
    config=Qwen3NextConfig,
    keys=(
        *qwen_hybrid_moe_keys(num_experts=512, chosen=10),
        *qwen_hybrid_keys(),
        JsonKey("norm_topk_prob", "norm_topk_prob", True),
        # Layers without experts.
        FixedKey("decoder_sparse_step", 1),
        FixedKey("mlp_only_layers", [], others=(None,)),
    ),
    tensors=lambda config: qwen_hybrid_tensors(config, (*expert_rows(), *shared_expert_rows()), _projections),
    kept=(r"mtp\.",),
)
