"""Gemma 4: local and global layers of different shapes, normed values, experts beside the MLPs of some models, and in others
layers that share keys and values, and read embeddings of their own.

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
from jaxlm.core.field_types import NonNegativeFloat, NonNegativeInt, NumLayers, PositiveFloat, PositiveInt
from jaxlm.core.rules import Rules, ordered, together
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import Decoder, gated_mlp
from jaxlm.models.decoders.gemma4 import ExpertsBeside, Gemma4Block
from jaxlm.models.decoders.layer_inputs import LayerInputGate, LayerInputs
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.models.mixers.base import Mixer
from jaxlm.models.mixers.normed_values import NormedValueAttention, TakenKeyAttention
from jaxlm.models.moe import Experts
from jaxlm.models.norms import RMSNorm, UnweightedRMSNorm
from jaxlm.models.rope import DefaultRotary, ProportionalRotary, RotaryConfig, check_rope
from jaxlm.models.routing import SoftmaxRouting
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice

_LOCAL, _GLOBAL = "local", "global"
_LAYER_INPUTS = 7  # folded into keys, which are split for everything else


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
        num_kv_shared_layers: number of layers, the last ones, without keys and values of their own. They read those of the
            last earlier layer of their kind, local or global.
        double_wide_mlp: the MLPs of those layers are twice as wide.
        layer_input_dim: each layer reads this many features of the tokens besides the residual stream: an embedding of its
            own, and a projection of the usual one. Null for none.
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
    num_kv_shared_layers: NonNegativeInt = 0
    double_wide_mlp: bool = False
    layer_input_dim: PositiveInt | None = None
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
        names = [_LOCAL if layer in self._local else _GLOBAL for layer in range(self.num_layers)]
        own, taking = names[: self._num_own], names[self._num_own :]
        last = {len(own) - 1 - own[::-1].index(name) for name in set(own) & set(taking)}
        sizes = {_LOCAL: self.HeadSize.size, _GLOBAL: self.global_head_dim}
        return tuple(
            dataclasses.replace(
                kind,
                rotary_size=sizes[name],
                gives=name if layer in last else None,
                takes=name if layer >= len(own) else None,
            )
            for layer, (kind, name) in enumerate(zip(super().kinds, names, strict=True))
        )

    @property
    def _num_own(self) -> int:
        return max(0, self.num_layers - self.num_kv_shared_layers)

    @property
    def stack_of_layer(self) -> tuple[int, ...]:
        forms = [(layer in self._local, layer < self._num_own) for layer in range(self.num_layers)]
        return tuple(list(dict.fromkeys(forms)).index(form) for form in forms)

    def layer_block(self, layer: int) -> Callable[..., Gemma4Block]:
        if layer >= self._num_own:
            return self.taking_block if layer in self._local else self.global_taking_block
        return self.block if layer in self._local else self.global_block

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        if (self.num_kv_shared_layers or self.layer_input_dim) and list(kept) != list(range(self.num_layers)):
            raise ConfigError(
                f"layers {list(kept)} of this model's {self.num_layers}, but they share keys and values"
                " (model.num_kv_shared_layers) or have embeddings of their own (model.layer_input_dim), so that none can be"
                " taken out, added, or run without the others. Remove what asks for that, or use a model without these keys"
            )
        if kept and kept[-1] in self._local:
            raise ConfigError(
                f"the last layer of Gemma 4 attends to all earlier tokens, but layer {kept[-1]} has a sliding window, and no"
                " layer behind it is kept. Keep a global layer as the last one"
            )
        return super().layer_keys(kept)

    def block(self, *, key: jax.Array) -> Gemma4Block:
        """Initializes one local layer."""
        return self._block(self._attention(self.KVHeads, self.HeadSize, keys_are_values=False), self.Mlp, key)

    def global_block(self, *, key: jax.Array) -> Gemma4Block:
        """Initializes one global layer."""
        attention = self._attention(self.GlobalKVHeads, self.GlobalHeadSize, keys_are_values=self.keys_are_values)
        return self._block(attention, self.Mlp, key)

    def taking_block(self, *, key: jax.Array) -> Gemma4Block:
        """Initializes one local layer with the keys and values of an earlier one."""
        return self._block(self._taking_attention(self.KVHeads, self.HeadSize), self.TakingMlp, key)

    def global_taking_block(self, *, key: jax.Array) -> Gemma4Block:
        """Initializes one global layer with the keys and values of an earlier one."""
        return self._block(self._taking_attention(self.GlobalKVHeads, self.GlobalHeadSize), self.TakingMlp, key)

    @property
    def GlobalKVHeads(self) -> Axis:
        """The heads of keys and values in global layers."""
        return self.KVHeads if self.num_global_kv_heads is None else Axis(KV_HEADS, self.num_global_kv_heads)

    @property
    def GlobalHeadSize(self) -> Axis:
        """Features of a head in global layers."""
        return Axis(HEAD_SIZE, self.global_head_dim)

    @property
    def TakingMlp(self) -> Axis:
        """Hidden features of the MLP in layers with the keys and values of earlier ones."""
        return self.Mlp.resize(self.Mlp.size * 2) if self.double_wide_mlp else self.Mlp

    def build(self, Vocab: Axis, *, key: jax.Array) -> Decoder:
        options: dict[str, Any] = {"embed_scale": self.hidden_dim**0.5, "logit_soft_cap": self.final_soft_cap}
        model = Decoder.init(self, Vocab, final_norm=self.norm(), key=key, **options)
        if self.layer_input_dim is None:
            return model
        sizes = {"std": self.initializer_range, "eps": self.layer_norm_epsilon}
        key = jax.random.fold_in(key, _LAYER_INPUTS)
        own = LayerInputs.init(Vocab, self.Embed, self.Layers, self.layer_input_dim, **sizes, key=key)
        return dataclasses.replace(model, layer_inputs=own)

    def check(self) -> None:
        super().check()
        check_divides("model.num_global_kv_heads", self.GlobalKVHeads.size, "model.num_heads", self.num_heads)
        check_rope(self.rope, self.num_heads, self.global_head_dim)
        if not self.num_kv_shared_layers:
            if self.double_wide_mlp:
                raise ConfigError(
                    "model.double_wide_mlp: true given, but no layers share keys and values, whose MLPs it is about. Set"
                    " num_kv_shared_layers, or remove it"
                )
            return
        kinds = self.kinds
        given, taken = ({getattr(kind, name) for kind in kinds} for name in ("gives", "takes"))
        if missing := sorted(name for name in taken - given if name is not None):
            raise ConfigError(
                f"model.num_kv_shared_layers: {self.num_kv_shared_layers} given, but no layer before the last"
                f" {self.num_kv_shared_layers} of {self.num_layers} is {missing[0]}, so that the {missing[0]} ones of these"
                " have no keys and values to read. Set a smaller number"
            )

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        projected = self.num_layers * (self.layer_input_dim or 0)  # the embeddings beside it are looked up
        return super().flops_per_token(vocab_size).plus(6.0 * self.hidden_dim * projected)

    def _attention(self, KVHeads: Axis, Size: Axis, *, keys_are_values: bool) -> Callable[[jax.Array], Mixer]:
        """Returns what initializes the attention of a layer with four keys."""
        linear = functools.partial(Linear.init, std=self.initializer_range)
        norm = functools.partial(RMSNorm.init, Size, self.layer_norm_epsilon)
        return lambda keys: NormedValueAttention(
            q_proj=linear(self.Embed, (self.Heads, Size), key=keys[0]),
            k_proj=linear(self.Embed, (KVHeads, Size), key=keys[1]),
            v_proj=None if keys_are_values else linear(self.Embed, (KVHeads, Size), key=keys[2]),
            o_proj=linear((self.Heads, Size), self.Embed, key=keys[3]),
            q_norm=norm(),
            k_norm=norm(),
            v_norm=UnweightedRMSNorm(Size, self.layer_norm_epsilon),
        )

    def _taking_attention(self, KVHeads: Axis, Size: Axis) -> Callable[[jax.Array], Mixer]:
        """Returns what initializes the attention to an earlier layer's keys and values, with four keys."""
        linear = functools.partial(Linear.init, std=self.initializer_range)
        return lambda keys: TakenKeyAttention(
            q_proj=linear(self.Embed, (self.Heads, Size), key=keys[0]),
            o_proj=linear((self.Heads, Size), self.Embed, key=keys[3]),
            q_norm=RMSNorm.init(Size, self.layer_norm_epsilon),
            KVHeads=KVHeads,
        )

    def _block(self, attention: Callable[[jax.Array], Mixer], Features: Axis, key: jax.Array) -> Gemma4Block:
        """Args: attention: four keys -> the layer's attention. Features: hidden features of its MLP."""
        keys, norm = jax.random.split(key, 8), functools.partial(RMSNorm.init, eps=self.layer_norm_epsilon)
        norms = [norm(self.Embed) for _ in range(4)]
        mlp, one = gated_mlp(self, keys[4:7], Features=Features), hax.named(jax.numpy.ones(()), ())
        beside = None if self.num_experts is None else self._experts(self.num_experts, jax.random.split(keys[7], 4))
        gate = None
        if self.layer_input_dim is not None:
            gate = LayerInputGate.init(
                self.Embed,
                self.layer_input_dim,
                activation=self.activation_function,
                std=self.initializer_range,
                eps=self.layer_norm_epsilon,
                key=jax.random.fold_in(key, _LAYER_INPUTS),
            )
        return Gemma4Block(norms[0], attention(keys[:4]), norms[1], norms[2], mlp, norms[3], one, beside, gate)

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
