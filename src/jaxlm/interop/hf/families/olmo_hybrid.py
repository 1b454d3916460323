"""OLMo Hybrid: Gated DeltaNet in three of four layers, with norms before it, and OLMo 2's layers without rotation.

Source: Ai2 2026, "OLMo Hybrid"; negative eigenvalues: Grazzi et al. 2024 (arXiv:2411.12537).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.hybrids import GDN, OUTPUTS, hybrid_layers, state_tensors
from jaxlm.interop.hf.shared_keys import activation, kv_heads, rope, size_keys
from jaxlm.interop.hf.weights import (
    BLOCK,
    Tensor,
    attention,
    block_norms,
    embeddings_and_head,
    gated_mlp,
    in_stacks,
    qk_norms,
    single,
)
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, pre_norm_block
from jaxlm.models.decoders.hybrid import HybridConfig, gated_delta_net
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.reading.choices import choice


@choice(ModelConfig, "olmo_hybrid")
class OlmoHybridConfig(HybridConfig, LlamaBlocks):
    """OLMo Hybrid. The defaults are OLMo Hybrid 7B.

    Attributes:
        negative_eigenvalues: a token may move what a state has for its key past its value, to the other side.
    """

    seq_len: PositiveInt = 65536
    hidden_dim: PositiveInt = 3840
    num_layers: NumLayers = 32
    num_heads: PositiveInt = 30
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    num_state_heads: PositiveInt = 30
    num_value_heads: PositiveInt = 30
    state_key_dim: PositiveInt = 96
    state_value_dim: PositiveInt = 192
    negative_eigenvalues: bool = True
    use_qk_norm = True
    norms_all_heads = True
    norms_only_follow = True

    def recurrent_block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 5)
        # softplus(dt_bias) is log-uniform between these.
        times = jnp.exp(jax.random.uniform(keys[4], (self.num_value_heads,), minval=jnp.log(1e-3), maxval=jnp.log(0.1)))
        mixer = gated_delta_net(self, keys[0], norm_eps=1e-5, max_beta=2.0 if self.negative_eigenvalues else 1.0)
        bias = (times + jnp.log(-jnp.expm1(-times))).reshape(mixer.dt_bias.array.shape)
        mixer = dataclasses.replace(mixer, dt_bias=hax.named(bias, mixer.dt_bias.axes))
        return pre_norm_block(self, mixer, self.mlp(keys[1:4]))


def _attention_tensors(norm: str) -> Iterator[Tensor]:
    yield from block_norms(attn_post_norm=norm, mlp_post_norm="post_feedforward_layernorm")
    yield from attention()
    yield from qk_norms("heads head_size", "kv_heads head_size")


def _recurrent_tensors() -> Iterator[Tensor]:
    yield from block_norms(attn_norm="attention_layer_norm", mlp_norm="feedforward_layer_norm")
    heads = "state_heads state_group"
    outputs = {**OUTPUTS, "gate": OUTPUTS["v"], "decay": heads, "beta": heads}
    for theirs, ours in zip("qkvgab", outputs, strict=True):
        yield single(f"{GDN}{theirs}_proj.weight", f"{BLOCK}attn.{ours}_proj.weight", f"{outputs[ours]} | embed")
    for name, out in OUTPUTS.items():
        yield single(f"{GDN}{name}_conv1d.weight", f"{BLOCK}attn.{name}_conv", f"{out} | | conv_taps")
    yield from state_tensors("o_norm", "o_proj")


def _tensors(config: OlmoHybridConfig, norm: str = "post_attention_layernorm") -> tuple[Tensor, ...]:
    """Args: norm: name of the norm after attention."""

    def rows(layer: int) -> tuple[Tensor, ...]:
        attends = layer in config.with_attention
        return (*(_attention_tensors(norm) if attends else _recurrent_tensors()), *gated_mlp())

    return tuple(in_stacks(config, embeddings_and_head(config), rows))


def _state_sizes(theirs: Mapping[str, Any]) -> Json:
    heads = theirs["num_attention_heads"]
    keys, values = (theirs.get(f"linear_num_{name}_heads") or heads for name in ("key", "value"))
    size = theirs.get("linear_key_head_dim") or int(0.75 * theirs["hidden_size"] / keys)
    sizes = {"state_key_dim": size, "state_value_dim": theirs.get("linear_value_head_dim") or 2 * size}
    return {"num_state_heads": keys, "num_value_heads": values, **sizes}


def _rotation() -> KeyGroup:
    """A rotary embedding, or none if theta is null. If it is missing, transformers rotates."""
    usual = rope()

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
        theta = given.get("rope_theta", theirs.get("rope_theta", 10000.0))
        return {"rope": None} if theta is None else usual.to_ours(theirs)

    def to_theirs(config: OlmoHybridConfig) -> Json:
        none = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
        return none if config.rope is None else usual.to_theirs(config)

    notes = lambda theirs: usual.notes(theirs) if to_ours(theirs)["rope"] else ()  # noqa: E731
    return KeyGroup(usual.theirs, to_ours, to_theirs, notes)


_SIZES = ("num_state_heads", "num_value_heads", "state_key_dim", "state_value_dim")
_IN_FILES = tuple(f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
_INITIAL = tuple(f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor"))

FAMILY = Family(
    model_types=("olmo_hybrid",),
    architecture="OlmoHybridForCausalLM",
    config=OlmoHybridConfig,
    keys=(
        *size_keys(length=65536),
        kv_heads(),
        _rotation(),
        activation("hidden_act", "silu"),
        hybrid_layers(),
        KeyGroup(
            _IN_FILES,
            _state_sizes,
            lambda config: dict(zip(_IN_FILES, (getattr(config, name) for name in _SIZES), strict=True)),
        ),
        JsonKey("linear_conv_kernel_dim", "conv_size", 4),
        JsonKey("linear_allow_neg_eigval", "negative_eigenvalues", True),
        KeyGroup(_INITIAL, lambda _: {}, lambda _: {}),  # of new models
        FixedKey("attention_bias", False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=_tensors,
    # As transformers 5.23 saves them. It also cuts the filters into equal parts, which are refused if they should not be.
    layouts=(lambda config: _tensors(config, "feedforward_layer_norm"),),
)
