"""Qwen3-Next: as Qwen3.5 with experts, with the projections of recurrent layers as one matrix.

Source: Qwen team 2025, "Qwen3-Next".
"""

from collections.abc import Iterator

from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.interop.hf.families.qwen3_5 import attention_tensors, conv_tensor, qwen_hybrid_keys, state_tensors
from jaxlm.interop.hf.families.qwen3_5_moe import QwenHybridMoeConfig, expert_keys, hybrid_sizes, shared_tensors
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.weights import BLOCK, Tensor, embeddings_and_head, experts, fused, in_stacks, pre_norms
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.moe_decoder import softmax_routing
from jaxlm.models.routers import SoftmaxRouter
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen3_next")
class Qwen3NextConfig(QwenHybridMoeConfig):
    """Qwen3-Next. The defaults are Qwen3-Next 80B-A3B.

    Attributes:
        norm_topk_prob: normalize the probabilities of a token's experts to sum to 1.
    """

    num_layers: NumLayers = 48
    num_experts: PositiveInt = 512
    num_experts_per_token: PositiveInt = 10
    norm_topk_prob: bool = True

    def routing(self) -> SoftmaxRouter:
        return softmax_routing(self, normalised=self.norm_topk_prob)


def _recurrent_tensors() -> Iterator[Tensor]:
    """Queries, keys, values and gates take turns by key head, as do the other two projections; filters do not."""
    layer, ours = "model.layers.{layer}.linear_attn.", f"{BLOCK}attn."
    values = "state_heads | state_group head_size | embed"
    of_keys = {f"{ours}{name}_proj.weight": "state_heads | state_key | embed" for name in "qk"}
    of_values = {f"{ours}{name}_proj.weight": values for name in ("v", "gate")}
    of_heads = {f"{ours}{name}_proj.weight": "state_heads | state_group | embed" for name in ("beta", "decay")}
    yield fused(f"{layer}in_proj_qkvz.weight", {**of_keys, **of_values}, along=1, merged=2)
    yield fused(f"{layer}in_proj_ba.weight", of_heads, along=1, merged=2)
    yield conv_tensor()
    yield from state_tensors("norm", "out_proj")


def _tensors(config: Qwen3NextConfig) -> tuple[Tensor, ...]:
    def rows(layer: int) -> Iterator[Tensor]:
        yield from pre_norms()
        yield from experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
        yield from shared_tensors()
        yield from attention_tensors() if layer in config.with_attention else _recurrent_tensors()

    return tuple(in_stacks(config, embeddings_and_head(config), rows))


FAMILY = Family(
    model_types=("qwen3_next",),
    architecture="Qwen3NextForCausalLM",
    config=Qwen3NextConfig,
    keys=(
        *hybrid_sizes(),
        *expert_keys(num_experts=512, chosen=10),
        *qwen_hybrid_keys(),
        JsonKey("norm_topk_prob", "norm_topk_prob", True),
        # Layers without experts.
        FixedKey("decoder_sparse_step", 1),
        FixedKey("mlp_only_layers", [], others=(None,)),
    ),
    tensors=_tensors,
    kept=(r"mtp\.",),
)
