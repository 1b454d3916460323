"""Qwen3.5, dense (3.6 and 3.8 too): Gated DeltaNet in three of four layers, and attention with a gate in the others.

Source: Qwen team 2025, "Qwen3-Next" and "Qwen3.5"; gates after attention: Qiu et al. 2025 (arXiv:2505.06708).
"""

import abc
from collections.abc import Iterator
from dataclasses import field

import jax

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey, KeyGroup
from jaxlm.interop.hf.hybrid_keys import hybrid_layers
from jaxlm.interop.hf.shared_keys import rope, usual_keys
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import (
    BLOCK,
    Tensor,
    embeddings_and_head,
    fused,
    gated_mlp,
    in_stacks,
    pre_norms,
    qk_norms,
    single,
)
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, projections
from jaxlm.models.decoder import gated_mlp as initial_mlp
from jaxlm.models.decoders.hybrid import HybridConfig, gated_delta_net
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.mixers.base import Mixer
from jaxlm.models.norms import RMSNorm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.models.stacks import Block
from jaxlm.reading.choices import choice


class QwenHybridConfig(HybridConfig):
    """What Qwen's hybrid families share: norms that start as 1 + 0, gates after attention, and recurrent layers."""

    @abc.abstractmethod
    def layer(self, mixer: Mixer, *, key: jax.Array) -> Block:
        """Initializes a layer with this mixer."""

    def norm(self) -> RMSNorm:
        return RMSNorm.init(self.Embed, self.layer_norm_epsilon, offset=1.0)

    def attention(self, keys: jax.Array) -> SelfAttention:
        """Initializes the attention of one layer, with norms over each head and a gate for each feature. Takes five keys."""
        q_norm, k_norm = (RMSNorm.init(self.HeadSize, self.layer_norm_epsilon, offset=1.0) for _ in range(2))
        gate = Linear.init(self.Embed, (self.Heads, self.HeadSize), std=self.initializer_range, key=keys[4])
        maps = projections(self, keys[:4], qkv_bias=False, out_bias=False)
        return SelfAttention(**maps, q_norm=q_norm, k_norm=k_norm, gate_proj=gate)

    def block(self, *, key: jax.Array) -> Block:
        keys = jax.random.split(key, 6)
        return self.layer(self.attention(keys[:5]), key=keys[5])

    def recurrent_block(self, *, key: jax.Array) -> Block:
        keys = jax.random.split(key, 2)
        return self.layer(gated_delta_net(self, keys[0], norm_eps=self.layer_norm_epsilon), key=keys[1])

    @property
    def gate_weights(self) -> int:
        return self.hidden_dim * self.num_heads * self.HeadSize.size


@choice(ModelConfig, "qwen3_5")
class Qwen35Config(QwenHybridConfig):
    """Qwen3.5, dense. The defaults are Qwen3.5 0.8B with a shorter context length."""

    seq_len: PositiveInt = 32768
    hidden_dim: PositiveInt = 1024
    intermediate_dim: PositiveInt = 3584
    num_layers: NumLayers = 24
    num_heads: PositiveInt = 8
    num_kv_heads: PositiveInt | None = 2
    head_dim: PositiveInt | None = 256
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e7, partial_rotary_factor=0.25))

    def layer(self, mixer: Mixer, *, key: jax.Array) -> DecoderBlock:
        return DecoderBlock(self.norm(), mixer, self.norm(), initial_mlp(self, jax.random.split(key, 3)))


_SELF, _STATE = "model.layers.{layer}.self_attn.", "model.layers.{layer}.linear_attn."
_KEYS, _VALUES = "state_heads state_key", "state_heads state_group head_size"
_PARTS = {"q": _KEYS, "k": _KEYS, "v": _VALUES}


def attention_tensors() -> Iterator[Tensor]:
    """Projections, of which that of the queries has the gate beside each head, and norms."""
    per_head = {f"{BLOCK}attn.{name}.weight": "heads | head_size | embed" for name in ("q_proj", "gate_proj")}
    yield fused(f"{_SELF}q_proj.weight", per_head, along=1, merged=2)
    for name in ("k_proj", "v_proj"):
        yield single(f"{_SELF}{name}.weight", f"{BLOCK}attn.{name}.weight", "kv_heads head_size | embed")
    yield single(f"{_SELF}o_proj.weight", f"{BLOCK}attn.o_proj.weight", "embed | heads head_size")
    yield from qk_norms()


def recurrent_tensors() -> Iterator[Tensor]:
    """Queries, keys and values as one matrix and as one filter."""
    yield fused(
        f"{_STATE}in_proj_qkv.weight", {f"{BLOCK}attn.{n}_proj.weight": f"{out} | embed" for n, out in _PARTS.items()}
    )
    yield conv_tensor()
    yield single(f"{_STATE}in_proj_z.weight", f"{BLOCK}attn.gate_proj.weight", f"{_VALUES} | embed")
    yield single(f"{_STATE}in_proj_b.weight", f"{BLOCK}attn.beta_proj.weight", "state_heads state_group | embed")
    yield single(f"{_STATE}in_proj_a.weight", f"{BLOCK}attn.decay_proj.weight", "state_heads state_group | embed")
    yield from state_tensors("norm", "out_proj")


def conv_tensor() -> Tensor:
    """The filters of queries, keys and values, one after the other."""
    return fused(
        f"{_STATE}conv1d.weight", {f"{BLOCK}attn.{n}_conv": f"{out} | | conv_taps" for n, out in _PARTS.items()}
    )


def state_tensors(norm: str, out: str) -> Iterator[Tensor]:
    """What recurrent layers of all families have. Args: norm, out: names of the norm and of the last projection."""
    yield single(f"{_STATE}A_log", f"{BLOCK}attn.A_log", "state_heads state_group")
    yield single(f"{_STATE}dt_bias", f"{BLOCK}attn.dt_bias", "state_heads state_group")
    yield single(f"{_STATE}{norm}.weight", f"{BLOCK}attn.norm.weight", "head_size")
    yield single(f"{_STATE}{out}.weight", f"{BLOCK}attn.o_proj.weight", f"embed | {_VALUES}")


def qwen_hybrid_keys(*, state_heads: int = 16, value_heads: int = 32) -> tuple[JsonKey | FixedKey | KeyGroup, ...]:
    """The keys of Qwen's hybrid families, apart from those of MLPs and experts. Args: defaults for keys that are missing."""
    return (
        hybrid_layers(),
        JsonKey("linear_num_key_heads", "num_state_heads", state_heads),
        JsonKey("linear_num_value_heads", "num_value_heads", value_heads),
        JsonKey("linear_key_head_dim", "state_key_dim", 128),
        JsonKey("linear_value_head_dim", "state_value_dim", 128),
        JsonKey("linear_conv_kernel_dim", "conv_size", 4),
        FixedKey("attention_bias", False),
        FixedKey("attention_dropout", 0.0),
    )


def qwen3_5_keys() -> tuple[FixedKey | KeyGroup, ...]:
    """The keys of Qwen3.5 that others do not have."""
    return (
        FixedKey("attn_output_gate", True),
        # Of the norm's gate in recurrent layers, in 3.6 and 3.8. That of attention is a sigmoid all the same.
        FixedKey("output_gate_type", "swish", others=("silu",)),
        FixedKey("mamba_ssm_dtype", "float32"),
        # Its layers are kept, but not computed.
        KeyGroup(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), lambda _: {}, lambda _: {}),
    )


FAMILY = Family(
    model_types=("qwen3_5_text",),
    architecture="Qwen3_5ForCausalLM",
    config=Qwen35Config,
    keys=(
        *usual_keys(length=32768, head=256, rotary=rope(partial=0.25, rotates_part=True)),
        *qwen_hybrid_keys(),
        *qwen3_5_keys(),
    ),
    tensors=lambda config: tuple(
        in_stacks(
            config,
            embeddings_and_head(config),
            lambda layer: (
                *pre_norms(),
                *gated_mlp(),
                *(attention_tensors() if layer in config.with_attention else recurrent_tensors()),
            ),
        )
    ),
    text=(TextPart(("qwen3_5",), ("qwen3_5_text", None), (r"(model\.)?visual\.",), {"num_key_value_heads": 4}),),
    kept=(r"mtp\.",),
)
