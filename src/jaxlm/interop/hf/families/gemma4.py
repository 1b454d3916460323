"""Gemma 4, alone or in a multimodal folder: local and global layers of different shapes, normed values, experts beside the
MLPs of some models, and in others layers that share keys and values, and read embeddings of their own.

Source: Gemma 4 in transformers (`models/gemma4`), the text model.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

import haliax as hax
import jax
from haliax import Axis

from jaxlm.core.axes import EXPERTS, HEAD_SIZE, KV_HEADS, MLP, ROUTES
from jaxlm.core.errors import ConfigError, check_divides
from jaxlm.core.field_types import NonNegativeFloat, NonNegativeInt, NumLayers, PositiveFloat, PositiveInt
from jaxlm.core.rules import Rules, only, ordered, together
from jaxlm.interop.hf.families.gemma import GEMMA_NORMS
from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import (
    RESPELLED_WINDOWS,
    activation,
    head_dim,
    kv_heads,
    layer_ropes,
    size_keys,
    window_pattern,
)
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import (
    BLOCK,
    Tensor,
    attention,
    block_norms,
    embeddings_and_head,
    fused,
    gated_mlp,
    in_stacks,
    qk_norms,
    single,
)
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import LAYER_INPUTS
from jaxlm.models.decoder import gated_mlp as initial_mlp
from jaxlm.models.decoders.gemma4 import ExpertsBeside, Gemma4Block
from jaxlm.models.decoders.layer_inputs import LayerInputGate
from jaxlm.models.decoders.moe_decoder import DispatchConfig
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


@choice(ModelConfig, "gemma4")
class Gemma4Config(DispatchConfig, PatternConfig):
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
        num_experts: number of experts beside the MLP of each layer. Null for none.
        num_experts_per_token: number of experts that each token is routed to.
        expert_dim: hidden width of an expert.
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
    scales_embeddings = True
    key_rules: ClassVar[Rules] = (
        together("num_experts", "num_experts_per_token", "expert_dim"),
        ordered("num_experts_per_token", "num_experts"),
        only("expert_dispatch", "expert_capacity", "expert_products", "expert_parts", when="num_experts"),
        only("double_wide_mlp", when="num_kv_shared_layers", why="whose MLPs it is about"),
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

    def check(self) -> None:
        super().check()
        check_divides("model.num_global_kv_heads", self.GlobalKVHeads.size, "model.num_heads", self.num_heads)
        check_rope(self.rope, self.num_heads, self.global_head_dim)
        if not self.num_kv_shared_layers:
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
        mlp, one = initial_mlp(self, keys[4:7], Features=Features), hax.named(jax.numpy.ones(()), ())
        beside = None if self.num_experts is None else self._experts(self.num_experts, jax.random.split(keys[7], 4))
        gate = None
        if self.layer_input_dim is not None:
            gate = LayerInputGate.init(
                self.Embed,
                self.layer_input_dim,
                activation=self.activation_function,
                std=self.initializer_range,
                eps=self.layer_norm_epsilon,
                key=jax.random.fold_in(key, LAYER_INPUTS),
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
            **self.balance(),
            expert_scale=hax.ones(Route),
        )
        chosen = Experts(
            router=Linear.init(Embed, Route, std=std, key=keys[0]),
            gate_proj=ExpertLinear.init(Expert, Embed, Mlp, std=std, key=keys[1]),
            up_proj=ExpertLinear.init(Expert, Embed, Mlp, std=std, key=keys[2]),
            down_proj=ExpertLinear.init(Expert, Mlp, Embed, std=std, key=keys[3]),
            routing=routing,
            activation=self.activation_function,
            **self.dispatched(),
        )
        norms = [RMSNorm.init(Embed, self.layer_norm_epsilon) for _ in range(4)]
        return ExpertsBeside(norms[0], norms[1], norms[2], chosen, norms[3])


_LAYER, _FULL = "model.layers.{layer}.", "full_attention"
_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def _rotations() -> KeyGroup:
    """The rotary embeddings of both kinds of layers. There are no older files with other keys."""
    usual = layer_ropes(theta=1e6, local_theta=10000.0)

    def read(theirs: Mapping[str, Any]) -> Json:
        length = theirs.get("max_position_embeddings")
        return {"rope_parameters": _ROPES | (theirs.get(_ROTATIONS) or {}), "max_position_embeddings": length}

    to_ours, notes = (lambda theirs: usual.to_ours(read(theirs))), (lambda theirs: usual.notes(read(theirs)))
    return KeyGroup((_ROTATIONS,), to_ours, usual.to_theirs, notes)


_ROTATIONS = "rope_parameters"


def _global_heads() -> KeyGroup:
    """The heads of global layers. transformers writes them as settings of single layers (`per_layer_config`)."""
    keys = ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config")

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        same = theirs.get("attention_k_eq_v", False)
        size, count = theirs.get("global_head_dim", 512), theirs.get("num_global_key_value_heads") if same else None
        if (by_layer := theirs.get("per_layer_config")) is not None:
            size, count = _of_layers(by_layer, theirs)
        return {"global_head_dim": size, "num_global_kv_heads": count, "keys_are_values": same}

    def to_theirs(config: Gemma4Config) -> Json:
        heads = {"global_head_dim": config.global_head_dim, "num_global_key_value_heads": config.num_global_kv_heads}
        return {**heads, "attention_k_eq_v": config.keys_are_values}

    return KeyGroup(keys, to_ours, to_theirs)


def _of_layers(by_layer: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[int, int | None]:
    """Head size and number of key/value heads of global layers, by the settings of single layers."""
    types = theirs["layer_types"]
    layers = {str(layer) for layer, kind in enumerate(types) if kind == _FULL}
    settings = [by_layer[layer] for layer in sorted(by_layer)]
    if {str(layer) for layer in by_layer} != layers or any(one != settings[0] for one in settings):
        raise ConfigError(f"per_layer_config: {by_layer} given, the same keys for each layer of {_FULL} expected")
    if unknown := sorted({*settings[0]} - {"head_dim", "num_key_value_heads"}):
        raise ConfigError(f"per_layer_config: {', '.join(unknown)} given; head_dim and num_key_value_heads expected")
    return settings[0].get("head_dim", theirs.get("head_dim", 256)), settings[0].get("num_key_value_heads")


def _experts() -> KeyGroup:
    """Experts, if there are any. transformers has no loss that balances them."""
    names = {"num_experts": "num_experts", "top_k_experts": "num_experts_per_token"}
    names |= {"moe_intermediate_size": "expert_dim"}

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        if not theirs.get("enable_moe_block", False):
            return {}
        balance = theirs.get("router_aux_loss_coef", 0.0)
        return {ours: theirs[key] for key, ours in names.items()} | {"router_aux_loss_coef": balance}

    def to_theirs(config: Gemma4Config) -> Json:
        on = config.num_experts is not None
        written = {key: getattr(config, ours) for key, ours in names.items()} | {"enable_moe_block": on}
        return {**written, "router_aux_loss_coef": config.router_aux_loss_coef} if on else written

    return KeyGroup((*names, "enable_moe_block", "router_aux_loss_coef"), to_ours, to_theirs)


def _layer_inputs() -> KeyGroup:
    """What each layer reads of the tokens besides the residual stream."""
    size, rows, vocab = "hidden_size_per_layer_input", "vocab_size_per_layer_input", "vocab_size"

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        features = theirs.get(size, 256) or None
        if features and (given := theirs.get(rows, 262144)) != theirs.get(vocab, given):
            raise ConfigError(f"{rows}: {given} given, {theirs[vocab]} expected, as {vocab}")
        return {"layer_input_dim": features}

    return KeyGroup((size, rows), to_ours, lambda config: {size: config.layer_input_dim or 0})


def _shared_layers() -> KeyGroup:
    """Layers with the keys and values of earlier ones. Without any, it does not say how wide their MLPs are."""
    count, wide = "num_kv_shared_layers", "use_double_wide_mlp"

    def to_ours(theirs: Mapping[str, Any]) -> Json:
        num_shared = theirs.get(count, 0) or 0
        return {"num_kv_shared_layers": num_shared, "double_wide_mlp": bool(num_shared and theirs.get(wide, False))}

    def to_theirs(config: Gemma4Config) -> Json:
        return {count: config.num_kv_shared_layers, wide: config.double_wide_mlp}

    return KeyGroup((count, wide), to_ours, to_theirs)


def _tensors(config: Gemma4Config) -> Iterator[Tensor]:
    kinds = config.kinds

    def rows(layer: int) -> Iterator[Tensor]:
        without = {"v_proj"} if config.keys_are_values and kinds[layer].window is None else set()
        without = _UNUSED if kinds[layer].takes else without
        yield from block_norms(attn_norm="input_layernorm", **GEMMA_NORMS)
        yield from (row for row in (*attention(), *qk_norms()) if row.name.split(".")[-2] not in without)
        yield from gated_mlp()
        yield single(f"{_LAYER}layer_scalar", f"{BLOCK}layer_scalar", "")
        if config.num_experts is not None:
            yield from _expert_rows()
        if config.layer_input_dim is not None:
            yield from _layer_input_rows()

    return in_stacks(config, (*embeddings_and_head(config), *_table_rows(config)), rows)


def _table_rows(config: Gemma4Config) -> Iterator[Tensor]:
    if config.layer_input_dim is not None:
        yield single("model.embed_tokens_per_layer.weight", "layer_inputs.table", "vocab | layer_inputs")
        projection = "layer_inputs.projection.weight"
        yield single("model.per_layer_model_projection.weight", projection, "layer_inputs | embed")
        yield single("model.per_layer_projection_norm.weight", "layer_inputs.norm.weight", "layer_input")


def _layer_input_rows() -> Iterator[Tensor]:
    ours = f"{BLOCK}layer_input."
    yield single(f"{_LAYER}per_layer_input_gate.weight", f"{ours}input_gate.weight", "layer_input | embed")
    yield single(f"{_LAYER}per_layer_projection.weight", f"{ours}input_projection.weight", "embed | layer_input")
    yield single(f"{_LAYER}post_per_layer_input_norm.weight", f"{ours}post_norm.weight", "embed")


_UNUSED = {"k_proj", "v_proj", "k_norm"}
"""Of layers with the keys and values of earlier ones. Published files have them, and transformers ignores them."""


def _idle(config: Gemma4Config) -> list[str]:
    layers = "|".join(str(layer) for layer, kind in enumerate(config.kinds) if kind.takes)
    return [rf"(.*\.)?layers\.({layers})\.self_attn\.({'|'.join(sorted(_UNUSED))})\."] if layers else []


def _expert_rows() -> Iterator[Tensor]:
    beside = f"{BLOCK}beside."
    norms = {"mlp_post_norm": "post_feedforward_layernorm_1", "norm": "pre_feedforward_layernorm_2"}
    for ours, theirs in {**norms, "post_norm": "post_feedforward_layernorm_2"}.items():
        yield single(f"{_LAYER}{theirs}.weight", f"{beside}{ours}.weight", "embed")
    yield single(f"{_LAYER}router.scale", f"{beside}router_norm.weight", "embed")
    yield single(f"{_LAYER}router.proj.weight", f"{beside}experts.router.weight", "routes | embed")
    yield single(f"{_LAYER}router.per_expert_scale", f"{beside}experts.routing.expert_scale", "routes")
    gate_up = {f"{beside}experts.{name}_proj.weight": "experts | mlp | embed" for name in ("gate", "up")}
    yield fused(f"{_LAYER}experts.gate_up_proj", gate_up, along=1)
    yield single(f"{_LAYER}experts.down_proj", f"{beside}experts.down_proj.weight", "experts | embed | mlp")


FAMILY = Family(
    model_types=("gemma4_text",),
    architecture="Gemma4ForCausalLM",
    config=Gemma4Config,
    keys=(
        *size_keys(length=131072, tied=True),
        kv_heads(),
        head_dim(256),
        _global_heads(),
        activation("hidden_activation", "gelu_pytorch_tanh", written={"gelu_new": "gelu_pytorch_tanh"}),
        window_pattern(6, window=512),
        _rotations(),
        JsonKey("final_logit_softcapping", "final_soft_cap", None),
        _experts(),
        # Images are seen by their own tokens in both directions, text is not.
        FixedKey("use_bidirectional_attention", None, others=("vision",)),
        FixedKey("attention_bias", False),
        FixedKey("attention_dropout", 0.0),
        _layer_inputs(),
        _shared_layers(),
    ),
    tensors=lambda config: tuple(_tensors(config)),
    respelled=RESPELLED_WINDOWS,
    idle=_idle,
    experts="experts",
    router="",
    vocab_keys=("vocab_size", "vocab_size_per_layer_input"),
    text=(
        TextPart(
            ("gemma4",),
            ("gemma4_text", None),
            kept=(r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\.",),
        ),
    ),
)
