"""gpt-oss: attention with sinks, every other layer with a window, and clamped experts with biases.

Source: OpenAI 2025, gpt-oss-120b and gpt-oss-20b model card (arXiv:2508.10925), section 2.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveFloat, PositiveInt
from jaxlm.core.rules import Rules, unused
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey, KeyGroup
from jaxlm.interop.hf.shared_keys import (
    RESPELLED_WINDOWS,
    head_dim,
    kv_heads,
    rope,
    router,
    same_keys,
    size_keys,
    window_pattern,
)
from jaxlm.interop.hf.weights import stacked_expert_rows
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.moe_decoder import MoeConfig
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.rope import RotaryConfig, YarnRotary
from jaxlm.reading.choices import choice

_STRETCHED = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@choice(ModelConfig, "gpt_oss")
class GptOssConfig(PatternConfig, LlamaAttention, MoeConfig):
    """gpt-oss. The defaults are gpt-oss-20b with a shorter context.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
    """

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 2880
    intermediate_dim: PositiveInt = 2880
    num_layers: NumLayers = 24
    num_heads: PositiveInt = 64
    num_kv_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 64
    rope: RotaryConfig = field(default_factory=lambda: YarnRotary(theta=150000.0, **_STRETCHED))
    sliding_window: PositiveInt | None = 128
    num_experts: PositiveInt = 32
    num_experts_per_token: PositiveInt = 4
    router_aux_loss_coef: NonNegativeFloat = 0.001
    swiglu_alpha: PositiveFloat = 1.702
    swiglu_limit: PositiveFloat = 7.0
    attention_bias: bool = True
    attention_sinks = True
    expert_bias = True
    scores = "logits"
    key_rules: ClassVar[Rules] = (
        unused("activation_function", why="gpt-oss has its own (swiglu_alpha, swiglu_limit)"),
    )

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        return self.rope, self.rope


def _balance_notes(theirs: Mapping[str, Any]) -> list[str]:
    """Published files have 0.9, so that this loss is larger than the other."""
    given = theirs.get(_BALANCE, 0.0)
    if theirs.get(_RETURNED) or not given:
        return []
    said = f"model.{_BALANCE}: {given} is minimized all the same, which transformers does not. Set 0 to do without"
    return [f"{_RETURNED}: false: {said}"]


_BALANCE, _RETURNED = "router_aux_loss_coef", "output_router_logits"

FAMILY = Family(
    model_types=("gpt_oss",),
    architecture="GptOssForCausalLM",
    config=GptOssConfig,
    aliases={"num_experts": "num_local_experts"},
    keys=(
        *size_keys(length=131072, eps_default=1e-5),
        kv_heads(),
        head_dim(64),
        rope(150000.0, unset={"rope_type": "yarn", **_STRETCHED}),
        window_pattern(2, window=128),
        *router("num_local_experts", num_experts=128, chosen=4),
        *same_keys(attention_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0),
        KeyGroup((_BALANCE, _RETURNED), lambda _: {}, lambda _: {}, _balance_notes),
        FixedKey("hidden_act", "silu"),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: (
        *llama_rows(config, mlp=None),
        *stacked_expert_rows(
            names=("router.weight", "experts.gate_up_proj", "experts.down_proj"),
            inputs_first=True,
            interleaved=True,
            use_bias=True,
        ),
    ),
    respelled=RESPELLED_WINDOWS,
    router="mlp.router",
)
