"""Mistral Small 4: multi-head latent attention with scores that grow with the position of the query, and experts in groups.

Source: Mistral AI 2026, "Mistral Small 4", and its code in transformers; attention: DeepSeek-V2 (arXiv:2405.04434), section
2.1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, NonNegativeInt, NumLayers, PositiveInt
from jaxlm.interop.hf.family import Family, Json, KeyGroup
from jaxlm.interop.hf.grouped_experts import grouped_experts
from jaxlm.interop.hf.latent import latent_keys, latent_moe_tensors
from jaxlm.interop.hf.shared_keys import rope
from jaxlm.interop.hf.text_part import pixtral_part
from jaxlm.interop.hf.weights import expert_rows, stacked_expert_rows
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.latent import LatentConfig
from jaxlm.models.decoders.moe_decoder import GroupedMoeConfig
from jaxlm.models.rope import QueryScaling, RotaryConfig, YarnRotary
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice

_YARN = {"factor": 128.0, "original_max_position_embeddings": 8192, "mscale": 1.0, "mscale_all_dim": 1.0}


@choice(ModelConfig, "mistral4")
class Mistral4Config(LatentConfig, GroupedMoeConfig):
    """Mistral Small 4, with a shorter context.

    Attributes:
        query_scaling: queries are multiplied by 1 + query_scaling * ln(1 + floor(position / original)), for the context
            length before extension. Positions count from the start of each document.
    """

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 4096
    intermediate_dim: PositiveInt = 2048
    shared_expert_intermediate_dim: PositiveInt = 2048
    num_layers: NumLayers = 36
    num_heads: PositiveInt = 32
    q_lora_rank: PositiveInt | None = 1024
    kv_lora_rank: PositiveInt = 256
    qk_nope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    rope: RotaryConfig = field(default_factory=lambda: YarnRotary(**_YARN))
    query_scaling: NonNegativeFloat = 0.1
    num_experts: PositiveInt = 128
    num_experts_per_token: PositiveInt = 4
    mlp_only_layers: list[NonNegativeInt] = field(default_factory=list)
    mtp: ClassVar[bool] = False

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        original = self.rope.original_length(self.seq_len)
        scaling = QueryScaling(self.query_scaling, original) if self.query_scaling else None
        rotated = {"interleaved": self.rope_interleave, "score_factor": self.rope.score_factor}
        return (LayerKind(self.rope, query_scaling=scaling, **rotated),) * self.num_layers


_PARTIAL = "partial_rotary_factor"
_INSIDE = {"llama_4_scaling_beta": "query_scaling", "max_position_embeddings": None}
_ROPE = rope(inside=_INSIDE, unset={"rope_type": "yarn", "llama_4_scaling_beta": 0.1, **_YARN})


def _rotary() -> KeyGroup:
    """The rotary embedding, whose partial factor is the part of a head that is rotated."""

    def part(theirs: Mapping[str, Any]) -> float:
        rotated = theirs.get("qk_rope_head_dim", 64)
        return rotated / (rotated + theirs.get("qk_nope_head_dim", 64))

    def without_part(theirs: Mapping[str, Any]) -> Json:
        sections = {key: dict(theirs[key]) for key in ("rope_scaling", "rope_parameters") if theirs.get(key)}
        rest = {**theirs, **sections}
        for given in (level.pop(_PARTIAL, None) for level in (rest, *sections.values())):
            if given not in (None, part(theirs)):
                raise ConfigError(f"{_PARTIAL}: {given} given, {part(theirs)} expected (qk_rope_head_dim of a head)")
        return rest

    def to_theirs(config: Any) -> Json:
        written = _ROPE.to_theirs(config)
        settings = {"rope_type": "default", "rope_theta": written["rope_theta"], **(written["rope_scaling"] or {})}
        sizes = {name: getattr(config, name) for name in ("qk_rope_head_dim", "qk_nope_head_dim")}
        return {"rope_parameters": {**settings, _PARTIAL: part(sizes)}}

    def notes(theirs: Mapping[str, Any]) -> Sequence[str]:
        return _ROPE.notes(without_part(theirs))

    return KeyGroup(_ROPE.theirs, lambda theirs: _ROPE.to_ours(without_part(theirs)), to_theirs, notes)


FAMILY = Family(
    model_types=("mistral4",),
    architecture="Mistral4ForCausalLM",
    config=Mistral4Config,
    aliases={"num_local_experts": "n_routed_experts"},
    keys=(
        *latent_keys(length=1048576, sizes=(1024, 256, 64, 64, 128), rotary=_rotary(), whole_head=True),
        *grouped_experts(width=2048, dense_width=12288, num_experts=128, chosen=4, num_dense=0),
    ),
    tensors=lambda config: latent_moe_tensors(config, stacked_expert_rows()),
    layouts=(lambda config: latent_moe_tensors(config, expert_rows()),),
    text=(pixtral_part("mistral4"),),
)
