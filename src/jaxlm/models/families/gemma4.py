"""Gemma 4: local and global layers of different shapes, normed values, and experts beside the MLPs of some models.

Source: Gemma 4 in transformers (`models/gemma4`), the text model.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, ClassVar

import haliax as hax
import jax
from haliax import Axis

from jaxlm.core.axes import EXPERTS, HEAD_SIZE, KV_HEADS, MLP, ROUTES
from jaxlm.core.errors import ConfigError, check_divides
from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveFloat, PositiveInt
from jaxlm.core.rules import Rules, ordered, together
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import Decoder, gated_mlp
from jaxlm.models.decoders.gemma4 import ExpertsBeside, Gemma4Block
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.models.mixers.normed_values import NormedValueAttention
from jaxlm.models.moe import Experts
from jaxlm.models.norms import RMSNorm, UnweightedRMSNorm
from jaxlm.models.rope import DefaultRotary, ProportionalRotary, RotaryConfig, check_rope
from jaxlm.models.routing import SoftmaxRouting
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice


@choice(ModelConfig, "gemma4")
class Gemma4Config(PatternConfig):
    """Gemma 4 (text only). The defaults are Gemma 4 31B with a shorter context. The last layer is always global.

    Attributes:
        head_dim: features per head in local layers.
        rope: rotary position embedding of global layers.
        local_rope: rotary position embedding of local layers (those with a sliding window).
        global_head_dim: features per head in global layers.
        num_global_kv_heads: number of key/value heads there. Null means `num_kv_heads`.
        keys_are_values: the values of global layers are their keys, before norm and rotation.
        final_soft_cap: soft cap of the logits, `cap * tanh(logit / cap)`. Null applies no cap.
        num_experts: number of experts beside the MLP of each layer. Null for none.
        num_experts_per_token: number of experts that each token is routed to.
        expert_dim: hidden width of an expert.
        router_aux_loss_coef: coefficient of the load-balancing loss, computed over a microbatch on all devices.
        router_z_loss_coef: coefficient of the router z-loss, the squared logsumexp of the router logits.
    """

    seq_len: PositiveInt = 8192
    hidden_dim: PositiveInt = 5376
    intermediate_dim: PositiveInt = 21504
    num_layers: NumLayers = 60
    num_heads: PositiveInt = 32
    num_kv_heads: PositiveInt | None = 16
    head_dim: PositiveInt | None = 256
    activation_function: str = "gelu_new"
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    sliding_window: PositiveInt | None = 1024
    sliding_window_pattern: PositiveInt | None = 6
    rope: RotaryConfig = field(default_factory=lambda: ProportionalRotary(theta=1e6, partial_rotary_factor=0.25))
    local_rope: RotaryConfig = field(default_factory=DefaultRotary)
    global_head_dim: PositiveInt = 512
    num_global_kv_heads: PositiveInt | None = 4
    keys_are_values: bool = True
    final_soft_cap: PositiveFloat | None = 30.0
    num_experts: PositiveInt | None = None
    num_experts_per_token: PositiveInt | None = None
    expert_dim: PositiveInt | None = None
    router_aux_loss_coef: NonNegativeFloat = 0.001
    router_z_loss_coef: NonNegativeFloat = 0.0
    key_rules: ClassVar[Rules] = (
        together("num_experts", "num_experts_per_token", "expert_dim"),
        ordered("num_experts_per_token", "num_experts"),
    )

    @property
    def rotations(self) -> tuple[RotaryConfig, RotaryConfig]:
        return self.local_rope, self.rope

    @property
    def _local(self) -> Sequence[int]:
        return [layer for layer in super()._local if layer < self.num_layers - 1]

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        sizes = (
            self.HeadSize.size if layer in self._local else self.global_head_dim for layer in range(self.num_layers)
        )
        pairs = zip(super().kinds, sizes, strict=True)
        return tuple(dataclasses.replace(kind, rotary_size=size) for kind, size in pairs)

    @property
    def stack_of_layer(self) -> tuple[int, ...]:
        is_local = [layer in self._local for layer in range(self.num_layers)]
        return tuple(int(one != is_local[0]) for one in is_local)

    def layer_block(self, layer: int) -> Callable[..., Gemma4Block]:
        return self.block if layer in self._local else self.global_block

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        if kept and kept[-1] in self._local:
            raise ConfigError(
                f"the last layer of Gemma 4 attends to all earlier tokens, but layer {kept[-1]} has a sliding window, and no"
                " layer behind it is kept. Keep a global layer as the last one"
            )
        return super().layer_keys(kept)

    def block(self, *, key: jax.Array) -> Gemma4Block:
        """Initializes one local layer."""
        return self._block(self.KVHeads, self.HeadSize, False, key)

    def global_block(self, *, key: jax.Array) -> Gemma4Block:
        """Initializes one global layer."""
        return self._block(self.GlobalKVHeads, Axis(HEAD_SIZE, self.global_head_dim), self.keys_are_values, key)

    @property
    def GlobalKVHeads(self) -> Axis:
        """The heads of keys and values in global layers."""
        return self.KVHeads if self.num_global_kv_heads is None else Axis(KV_HEADS, self.num_global_kv_heads)

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        options: dict[str, Any] = {"embed_scale": self.hidden_dim**0.5, "logit_soft_cap": self.final_soft_cap}
        return Decoder.init(self, Vocab, final_norm=self.norm(), key=key, **options)

    def check(self) -> None:
        super().check()
        check_divides("model.num_global_kv_heads", self.GlobalKVHeads.size, "model.num_heads", self.num_heads)
        check_rope(self.rope, self.num_heads, self.global_head_dim)

    def _block(self, KVHeads: Axis, Size: Axis, keys_are_values: bool, key: jax.Array) -> Gemma4Block:
        keys, linear = jax.random.split(key, 8), functools.partial(Linear.init, std=self.initializer_range)
        norm = functools.partial(RMSNorm.init, eps=self.layer_norm_epsilon)
        attn = NormedValueAttention(
            q_proj=linear(self.Embed, (self.Heads, Size), key=keys[0]),
            k_proj=linear(self.Embed, (KVHeads, Size), key=keys[1]),
            v_proj=None if keys_are_values else linear(self.Embed, (KVHeads, Size), key=keys[2]),
            o_proj=linear((self.Heads, Size), self.Embed, key=keys[3]),
            q_norm=norm(Size),
            k_norm=norm(Size),
            v_norm=UnweightedRMSNorm(Size, self.layer_norm_epsilon),
        )
        norms = [norm(self.Embed) for _ in range(4)]
        mlp, one = gated_mlp(self, keys[4:7]), hax.named(jax.numpy.ones(()), ())
        beside = None if self.num_experts is None else self._experts(self.num_experts, jax.random.split(keys[7], 4))
        return Gemma4Block(norms[0], attn, norms[1], norms[2], mlp, norms[3], one, beside)

    def _experts(self, num_experts: int, keys: jax.Array) -> ExpertsBeside:
        assert self.num_experts_per_token is not None, "the rules have refused this"
        assert self.expert_dim is not None, "the rules have refused this"
        std, Embed, Mlp = self.initializer_range, self.Embed, Axis(MLP, self.expert_dim)
        Expert, Route = Axis(EXPERTS, num_experts), Axis(ROUTES, num_experts)
        routing = SoftmaxRouting(
            num_chosen=self.num_experts_per_token,
            normalised=True,
            balance_weight=self.router_aux_loss_coef,
            z_weight=self.router_z_loss_coef,
            expert_scale=hax.ones(Route),
        )
        chosen = Experts(
            router=Linear.init(Embed, Route, std=std, key=keys[0]),
            gate_proj=ExpertLinear.init(Expert, Embed, Mlp, std=std, key=keys[1]),
            up_proj=ExpertLinear.init(Expert, Embed, Mlp, std=std, key=keys[2]),
            down_proj=ExpertLinear.init(Expert, Mlp, Embed, std=std, key=keys[3]),
            routing=routing,
            activation=self.activation_function,
        )
        norms = [RMSNorm.init(Embed, self.layer_norm_epsilon) for _ in range(4)]
        return ExpertsBeside(norms[0], norms[1], norms[2], chosen, norms[3])
