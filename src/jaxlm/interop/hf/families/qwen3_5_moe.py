"""Qwen3.5 with experts (3.6 too): Qwen3.5's layers with a mixture of experts, and one that all tokens share, as their MLP.

Source: Qwen team 2025, "Qwen3-Next" and "Qwen3.5".
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxlm.core.axes import SHARED_MLP
from jaxlm.core.errors import check_at_least
from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.families.qwen3_5 import (
    QwenHybridConfig,
    attention_tensors,
    qwen3_5_keys,
    qwen_hybrid_keys,
    recurrent_tensors,
)
from jaxlm.interop.hf.family import Family, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import rope, router, usual_keys
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import (
    BLOCK,
    Tensor,
    embeddings_and_head,
    experts,
    gated_mlp,
    in_stacks,
    pre_norms,
    single,
    stacked_experts,
)
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.moe_decoder import MoeBlock, shared_expert, softmax_routing
from jaxlm.models.decoders.moe_decoder import experts as initial_experts
from jaxlm.models.mixers.base import Mixer
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.models.routers import Router, SoftmaxRouter
from jaxlm.reading.choices import choice


@dataclass(frozen=True)
class QwenHybridMoeConfig(QwenHybridConfig):
    """Keys of Qwen's hybrid families with experts.

    Attributes:
        num_experts: number of experts per layer.
        num_experts_per_token: number of experts that each token is routed to.
        shared_expert_intermediate_dim: width of the expert that all tokens share.
        router_aux_loss_coef: coefficient of the load-balancing loss, computed over a microbatch on all devices.
        router_z_loss_coef: coefficient of the router z-loss, the squared logsumexp of the router logits. It keeps the
            logits small.
    """

    seq_len: PositiveInt = 32768
    hidden_dim: PositiveInt = 2048
    intermediate_dim: PositiveInt = 512
    num_layers: NumLayers = 40
    num_heads: PositiveInt = 16
    num_kv_heads: PositiveInt | None = 2
    head_dim: PositiveInt | None = 256
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e7, partial_rotary_factor=0.25))
    num_value_heads: PositiveInt = 32
    num_experts: PositiveInt = 256
    num_experts_per_token: PositiveInt = 8
    shared_expert_intermediate_dim: PositiveInt = 512
    router_aux_loss_coef: NonNegativeFloat = 0.001
    router_z_loss_coef: NonNegativeFloat = 0.0

    def check(self) -> None:
        super().check()
        check_at_least("model.num_experts", self.num_experts, self.num_experts_per_token)

    @abc.abstractmethod
    def routing(self) -> Router:
        """Initializes what chooses the experts of a layer."""

    def layer(self, mixer: Mixer, *, key: jax.Array) -> MoeBlock:
        keys = jax.random.split(key, 5)
        shared = shared_expert(self, keys[4], gate=True)
        return MoeBlock(self.norm(), mixer, self.norm(), initial_experts(self, keys[:4]), shared)

    @property
    def mlp_weights(self) -> int:
        """Of the experts, only those that the token is routed to and the shared one count."""
        width = self.num_experts_per_token * self.intermediate_dim + self.shared_expert_intermediate_dim
        return self.num_layers * self.hidden_dim * (self.mlp_matrices * width + self.num_experts + 1)


@choice(ModelConfig, "qwen3_5_moe")
class Qwen35MoeConfig(QwenHybridMoeConfig):
    """Qwen3.5 with experts. The defaults are Qwen3.5 35B-A3B."""

    def routing(self) -> SoftmaxRouter:
        return softmax_routing(self, normalised=True)


def shared_tensors() -> Iterator[Tensor]:
    """The expert that all tokens share, and its gate."""
    yield from gated_mlp(theirs="mlp.shared_expert", ours="shared_expert.mlp", features=SHARED_MLP)
    yield single("model.layers.{layer}.mlp.shared_expert_gate.weight", f"{BLOCK}shared_expert.gate", "| embed")


def expert_keys(*, num_experts: int, chosen: int) -> tuple[Any, ...]:
    """The keys of experts, and the width of MLPs, which no layer has. Args: defaults for keys that are missing."""
    return (
        JsonKey("moe_intermediate_size", "intermediate_dim", 512),
        JsonKey("shared_expert_intermediate_size", "shared_expert_intermediate_dim", 512),
        *router("num_experts", num_experts=num_experts, chosen=chosen),
        KeyGroup(("intermediate_size",), lambda _: {}, lambda config: {"intermediate_size": config.intermediate_dim}),
    )


def hybrid_sizes(theta: float = 10000.0) -> tuple[JsonKey | KeyGroup, ...]:
    """The usual keys without the width of an MLP."""
    keys = usual_keys(length=32768, head=256, rotary=rope(theta, partial=0.25, rotates_part=True))
    return tuple(key for key in keys if key.theirs != "intermediate_size")


def _tensors(experts: Callable[[], Iterable[Tensor]]) -> Callable[[Qwen35MoeConfig], Sequence[Tensor]]:
    def rows(config: Qwen35MoeConfig, layer: int) -> Iterator[Tensor]:
        yield from pre_norms()
        yield from experts()
        yield from shared_tensors()
        yield from attention_tensors() if layer in config.with_attention else recurrent_tensors()

    return lambda config: tuple(in_stacks(config, embeddings_and_head(config), lambda layer: rows(config, layer)))


FAMILY = Family(
    model_types=("qwen3_5_moe_text",),
    architecture="Qwen3_5MoeForCausalLM",
    config=Qwen35MoeConfig,
    keys=(*hybrid_sizes(), *expert_keys(num_experts=256, chosen=8), *qwen_hybrid_keys(), *qwen3_5_keys()),
    tensors=_tensors(lambda: stacked_experts("mlp")),
    # As transformers and the folders in fp8 have them.
    layouts=(_tensors(lambda: experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")),),
    text=(
        TextPart(("qwen3_5_moe",), ("qwen3_5_moe_text", None), (r"(model\.)?visual\.",), {"num_key_value_heads": 2}),
    ),
    kept=(r"mtp\.",),
)
