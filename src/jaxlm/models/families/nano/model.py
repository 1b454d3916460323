"""nanochat's model: QK norm, squared ReLU, value embeddings in every other layer, a skip from the embedding into every layer.

Source: karpathy/nanochat (`nanochat/gpt.py`): the defaults are commit b7629ef, without lookup layers; every difference of
the revision 92d63d4 is a key. QK norm: Henry et al. 2020 (arXiv:2010.04245); squared ReLU: So et al. 2021
(arXiv:2109.08668); value embeddings: Zhou et al. 2024 (arXiv:2410.17897); soft cap: Gemma Team 2024 (arXiv:2408.00118).

Parameters by path, with L layers of which V have a value embedding. nanochat's names are on the right.

    tokens.weight                               {vocab, embed}                              transformer.wte
    head.weight                                 {vocab, embed}                              lm_head
    body.value_embedding                        {value_layers: V, vocab, value_embed}       value_embeds.N
    body.value_gates.weight                     {value_layers: V, kv_heads, gate_channels}  transformer.h.N.attn.ve_gate
    body.layers.stacked.attn.q_proj.weight      {layers: L, heads, head_size, embed}        transformer.h.N.attn.c_q
    body.layers.stacked.attn.{k,v}_proj.weight  {layers: L, kv_heads, head_size, embed}     transformer.h.N.attn.c_k, c_v
    body.layers.stacked.attn.o_proj.weight      {layers: L, embed, heads, head_size}        transformer.h.N.attn.c_proj
    body.layers.stacked.mlp.up_proj.weight      {layers: L, mlp, embed}                     transformer.h.N.mlp.c_fc
    body.layers.stacked.mlp.down_proj.weight    {layers: L, embed, mlp}                     transformer.h.N.mlp.c_proj
    body.resid_lambdas, body.x0_lambdas         {layers: L}                                 resid_lambdas, x0_lambdas
    smear_gate, smear_lambda                    {smear_channels}, {}                        smear_gate, smear_lambda
    backout_lambda                              {}                                          backout_lambda
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import (
    BATCH,
    EMBED,
    GATE_CHANNELS,
    HEAD_SIZE,
    HEADS,
    KEY_POSITION,
    KV_HEADS,
    LAYERS,
    MLP,
    POSITION,
    SMEAR_CHANNELS,
    VALUE_EMBED,
    VALUE_LAYERS,
)
from jaxlm.core.errors import ConfigError, check_divides
from jaxlm.core.field_types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    check_fields,
)
from jaxlm.core.matmul import Weight
from jaxlm.core.sharding import for_compute, for_lookup
from jaxlm.models.base import FINAL, Hidden, Inputs, KVCache, LanguageModel, ModelConfig
from jaxlm.models.families.nano.body import NanoBody
from jaxlm.models.families.nano.counts import parameter_counts
from jaxlm.models.families.nano.layers import NanoBlock, first_channels, uniform_linear, zero_linear
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.inference.kv_cache import UnstackedCache, empty_cache
from jaxlm.models.layers import Mlp, SelfAttention, embedding
from jaxlm.models.linear import Linear
from jaxlm.models.norms import UnweightedRMSNorm
from jaxlm.models.remat import parse_remat
from jaxlm.models.rope import DefaultRotary, RotaryConfig, check_rope
from jaxlm.models.stacks import LayerKind

_SMEAR_GATE_MAX = 0.02


@ModelConfig.register_subclass("nano")
@dataclass(frozen=True)
class NanoConfig(ModelConfig):
    """nanochat's model. The defaults are its 12 layers of February 2026, without lookup layers.

    Attributes:
        hidden_dim: width of the residual stream.
        num_layers: number of transformer blocks.
        num_heads: number of query heads; must divide `hidden_dim`.
        num_kv_heads: number of key/value heads; must divide `num_heads`. Null means `num_heads`.
        mlp_scale: hidden width of the MLP as a multiple of `hidden_dim`.
        window_pattern: one letter per layer, repeated over the layers: `L` attends to all previous tokens, `S` only to
            near ones. The last layer always attends to all.
        short_window_fraction: how far back an `S` layer attends, as a fraction of `seq_len`. A distance of w tokens means
            w + 1 keys, because a token attends to itself.
        short_window_multiple: round that distance up to a multiple of this. Null rounds down to a whole number.
        rope: rotary position embedding of queries and keys. nanochat rotates in the other direction than most models.
        rope_dtype: dtype that the cosines and sines of the rotary embedding are rounded to.
        qk_scale: factor of the normalized queries and of the normalized keys.
        value_gate_channels: number of features that the gate of a value embedding reads.
        value_gate_scale: largest value of that gate.
        smear_channels: number of features that the smear gate reads. With smear, part of the previous token's embedding is
            added to each token's. 0 means no smear.
        backout: initial value of the factor with which the residual stream after the middle layer is subtracted from the
            last. Null subtracts nothing.
        final_soft_cap: soft cap of the logits, `cap * tanh(logit / cap)`. Null applies no cap.
        layer_norm_epsilon: added to the mean square in norms, for numerical stability. The norms have no weights.
        embed_init_std: standard deviation of the normal initialization of the token embedding.
        head_init_std: standard deviation of the normal initialization of the head.
        mlp_init_scale: the first matrix of each MLP is initialized as uniformly as query, key and value (with standard
            deviation `1 / sqrt(hidden_dim)`), times this. The second, and the output of attention, are initialized to 0.
        gate_init_max: the gates of value embeddings are initialized uniformly between 0 and this.
        first_resid_lambda, last_resid_lambda: initial factor of the residual stream before the first and before the last
            layer; layers between them are interpolated.
        first_x0_lambda, last_x0_lambda: the same for the embedding, which is added to the residual stream before each layer.
    """

    seq_len: PositiveInt = 2048
    pad_vocab_to_multiple_of: PositiveInt | None = 64
    hidden_dim: PositiveInt = 768
    num_layers: PositiveInt = 12
    num_heads: PositiveInt = 6
    num_kv_heads: PositiveInt | None = None
    mlp_scale: PositiveInt = 4
    window_pattern: str = "SSSL"
    short_window_fraction: PositiveFraction = 0.5
    short_window_multiple: PositiveInt | None = None
    rope: RotaryConfig = field(default_factory=DefaultRotary)
    rope_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    qk_scale: PositiveFloat = 1.0
    value_gate_channels: PositiveInt = 32
    value_gate_scale: PositiveFloat = 2.0
    smear_channels: NonNegativeInt = 0
    backout: NonNegativeFloat | None = None
    final_soft_cap: PositiveFloat | None = 15.0
    layer_norm_epsilon: NonNegativeFloat = 1.1920929e-7
    embed_init_std: NonNegativeFloat = 1.0
    head_init_std: NonNegativeFloat = 0.001
    mlp_init_scale: NonNegativeFloat = 1.0
    gate_init_max: NonNegativeFloat = 0.0
    first_resid_lambda: NonNegativeFloat = 1.0
    last_resid_lambda: NonNegativeFloat = 1.0
    first_x0_lambda: NonNegativeFloat = 0.1
    last_x0_lambda: NonNegativeFloat = 0.1

    @property
    def Embed(self) -> Axis:
        return Axis(EMBED, self.hidden_dim)

    @property
    def Layers(self) -> Axis:
        """The axis that stacks the parameters of all blocks."""
        return Axis(LAYERS, self.num_layers)

    @property
    def ValueLayers(self) -> Axis:
        """The axis that stacks the value embeddings: every other layer has one, and the last layer does."""
        return Axis(VALUE_LAYERS, (self.num_layers + 1) // 2)

    @property
    def Heads(self) -> Axis:
        return Axis(HEADS, self.num_heads)

    @property
    def KVHeads(self) -> Axis:
        return Axis(KV_HEADS, self.num_heads if self.num_kv_heads is None else self.num_kv_heads)

    @property
    def HeadSize(self) -> Axis:
        return Axis(HEAD_SIZE, self.hidden_dim // self.num_heads)

    @property
    def Mlp(self) -> Axis:
        return Axis(MLP, self.mlp_scale * self.hidden_dim)

    @property
    def window_distances(self) -> tuple[int, ...]:
        """How many tokens back each layer attends; `seq_len` stands for all."""
        exact, multiple = self.seq_len * self.short_window_fraction, self.short_window_multiple
        short = math.floor(exact) if multiple is None else multiple * math.ceil(exact / multiple)
        letters = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.num_layers - 1)]
        return (*(short if letter == "S" else self.seq_len for letter in letters), self.seq_len)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, from first to last."""
        windows = [None if back + 1 >= self.seq_len else back + 1 for back in self.window_distances]
        return tuple(LayerKind(self.rope, window) for window in windows)

    def check(self) -> None:
        check_fields(self, "model")
        check_divides("model.num_heads", self.num_heads, "model.hidden_dim", self.hidden_dim)
        check_divides("model.num_kv_heads", self.KVHeads.size, "model.num_heads", self.num_heads)
        check_rope(self.rope, self.num_heads, self.HeadSize.size)
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise ConfigError(
                f"model.window_pattern: '{self.window_pattern}' given, a word of the letters S (short window) and L (all"
                " previous tokens) expected, as in SSSL"
            )
        for name in ("value_gate_channels", "smear_channels"):
            if (channels := getattr(self, name)) > self.hidden_dim:
                raise ConfigError(
                    f"model.{name}: {channels} given, at most model.hidden_dim = {self.hidden_dim} expected: it is a number"
                    " of features of the residual stream"
                )

    def build(self, Vocab: Axis, *, key: jax.Array) -> "Nano":
        k_tokens, k_head, k_layers, k_values, k_gates, k_smear = jax.random.split(key, 6)
        Channels, SmearChannels = (
            Axis(GATE_CHANNELS, self.value_gate_channels),
            Axis(SMEAR_CHANNELS, self.smear_channels),
        )
        ValueEmbed = Axis(VALUE_EMBED, self.KVHeads.size * self.HeadSize.size)
        bound = math.sqrt(3 / self.hidden_dim)
        gate_axes = (self.ValueLayers, self.KVHeads, Channels)
        gates = hax.random.uniform(k_gates, gate_axes, minval=0.0, maxval=self.gate_init_max)
        body = NanoBody(
            layers=hnn.Stacked.init(self.Layers, _BlockInit)(self, key=jax.random.split(k_layers, self.num_layers)),
            resid_lambdas=self._between_layers(self.first_resid_lambda, self.last_resid_lambda),
            x0_lambdas=self._between_layers(self.first_x0_lambda, self.last_x0_lambda),
            value_embedding=hax.random.uniform(
                k_values, (self.ValueLayers, Vocab, ValueEmbed), minval=-bound, maxval=bound
            ),
            value_gates=Linear(gates, None, Channels, self.KVHeads),
            kinds=self.kinds,
            HeadSize=self.HeadSize,
            seq_len=self.seq_len,
            rope_dtype=self.rope_dtype,
            gate_scale=self.value_gate_scale,
            keeps_middle=self.backout is not None,
            scan=self.scan_layers,
            remat_policy=parse_remat(self.gradient_checkpointing),
            attn_backend=self.attn_backend,
        )
        smears = self.smear_channels > 0
        return Nano(
            tokens=embedding(Vocab, self.Embed, std=self.embed_init_std, key=k_tokens),
            body=body,
            head=Linear.init(self.Embed, Vocab, std=self.head_init_std, key=k_head),
            smear_gate=hax.random.uniform(k_smear, (SmearChannels,), maxval=_SMEAR_GATE_MAX) if smears else None,
            smear_lambda=hax.zeros(()) if smears else None,
            backout_lambda=None if self.backout is None else hax.full((), self.backout),
            config=self,
            logit_soft_cap=self.final_soft_cap,
            vocab_multiple=self.vocab_multiple,
            reads_beyond=True,
        )

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """FLOPs per training token, with the rows of the head that are in the vocabulary."""
        return FlopsPerToken.of(
            weights=parameter_counts(self, vocab_size).transformer_matrices
            + vocab_size * self.hidden_dim
            + self.smear_channels,
            attention_dim=self.hidden_dim,
            seq_len=self.seq_len,
            windows=[kind.window for kind in self.kinds],
        )

    def _between_layers(self, first: float, last: float) -> NamedArray:
        return NamedArray(jnp.linspace(first, last, self.num_layers), (self.Layers,))


class _BlockInit:
    """Initializes the blocks, for `hnn.Stacked`."""

    @staticmethod
    def init(config: NanoConfig, *, key: jax.Array) -> NanoBlock:
        k_q, k_k, k_v, k_up = jax.random.split(key, 4)
        Embed, Heads, KVHeads, HeadSize = config.Embed, config.Heads, config.KVHeads, config.HeadSize
        std, eps = config.hidden_dim**-0.5, config.layer_norm_epsilon
        attn = SelfAttention(
            q_proj=uniform_linear(Embed, (Heads, HeadSize), std=std, key=k_q),
            k_proj=uniform_linear(Embed, (KVHeads, HeadSize), std=std, key=k_k),
            v_proj=uniform_linear(Embed, (KVHeads, HeadSize), std=std, key=k_v),
            o_proj=zero_linear((Heads, HeadSize), Embed),
            q_norm=UnweightedRMSNorm(HeadSize, eps),
            k_norm=UnweightedRMSNorm(HeadSize, eps),
            norms_follow_rotation=True,
            scale=config.qk_scale**2 * HeadSize.size**-0.5,
        )
        mlp = Mlp(
            up_proj=uniform_linear(Embed, config.Mlp, std=config.mlp_init_scale * std, key=k_up),
            down_proj=zero_linear(config.Mlp, Embed),
            activation="relu2",
        )
        return NanoBlock(attn, mlp, UnweightedRMSNorm(Embed, eps))


class Nano(LanguageModel):
    """Token embedding, layers and head. The input of the layers is added to the residual stream before each of them.

    Attributes:
        smear_gate, smear_lambda: {smear_channels} and {}. With smear, `smear_lambda * sigmoid(gate)` times the embedding of
            the previous token of the document is added to each token's embedding. None means no smear.
        backout_lambda: {}, factor of the residual stream after layer L // 2, which is subtracted from the last. None
            subtracts nothing.
    """

    tokens: hnn.Embedding
    body: NanoBody
    head: Linear
    smear_gate: NamedArray | None
    smear_lambda: NamedArray | None
    backout_lambda: NamedArray | None
    config: NanoConfig = eqx.field(static=True)

    @property
    def Vocab(self) -> Axis:
        return self.tokens.Vocab

    @property
    def Pos(self) -> Axis:
        return self.config.Pos

    def hidden(
        self, inputs: Inputs, *, cache: KVCache | None = None, taps: Sequence[str] = (), key: jax.Array | None = None
    ) -> Hidden:
        norm = UnweightedRMSNorm(self.config.Embed, self.config.layer_norm_epsilon)
        table = for_lookup(self.tokens)
        x = norm(table(inputs.tokens))
        if self.smear_gate is not None and self.smear_lambda is not None:
            gate, factor = for_compute((self.smear_gate, self.smear_lambda))
            previous = _previous(x, inputs, cache, lambda tokens: norm(table(tokens)))
            opened = factor * hnn.sigmoid(hax.dot(first_channels(x, gate.axes[0]), gate, axis=gate.axes))
            x = (x + opened * previous).rearrange(x.axes).astype(x.dtype)
        out = self.body(x, inputs, cache, key, taps)
        last = out.last
        if self.backout_lambda is not None and out.middle is not None:
            last = (last - for_compute(self.backout_lambda) * out.middle).rearrange(last.axes).astype(last.dtype)
        final = norm(last)
        return Hidden(final, out.cache, taps={name: (out.taps | {FINAL: final})[name] for name in taps})

    def lm_head(self) -> Weight:
        return for_compute(self.head).weight

    def init_cache(self, Batch: Axis, capacity: int, dtype) -> KVCache:
        config, smears = self.config, self.smear_gate is not None
        return empty_cache([config.Layers], Batch, capacity, config.KVHeads, config.HeadSize, dtype, with_tokens=smears)


def _previous(
    x: NamedArray, inputs: Inputs, cache: KVCache | UnstackedCache | None, embedded: Callable[[NamedArray], NamedArray]
) -> NamedArray:
    """The embedding of the token before each token, {batch, position, embed}; 0 for the first token of a document.

    Args:
        x: embeddings of the inputs.
        cache: holds the tokens before the inputs.
        embedded: embeds tokens.
    """
    segments = inputs.segment_ids
    axes = (segments.resolve_axis(BATCH), segments.resolve_axis(POSITION), x.resolve_axis(EMBED))
    First = axes[1].resize(1)
    x, segments = x.rearrange(axes), segments.rearrange(axes[:2])
    if cache is None or cache.tokens is None:
        first, first_segment = (
            hax.zeros((axes[0], First, axes[2]), dtype=x.dtype),
            hax.zeros((axes[0], First), dtype=jnp.int32),
        )
    else:
        token, first_segment = (_slot_before(slots, cache.length, First) for slots in (cache.tokens, cache.segment_ids))
        first = embedded(token).rearrange((axes[0], First, axes[2]))
    before, before_segments = (_shifted(*pair, axes[1]) for pair in ((first, x), (first_segment, segments)))
    same = NamedArray((before_segments.array == segments.array) & (segments.array != 0), segments.axes)
    return hax.where(same, before, 0.0).rearrange(axes).astype(x.dtype)


def _shifted(first: NamedArray, x: NamedArray, Position: Axis) -> NamedArray:
    """x moved to the right along positions, with `first` at the left."""
    array = jnp.concatenate([first.array, x.array[:, : Position.size - 1]], axis=1)
    return NamedArray(array, x.axes)


def _slot_before(slots: NamedArray, length: jax.Array, First: Axis) -> NamedArray:
    """The last slot in use, {batch, position}; of an empty cache, its first slot, which has segment 0."""
    slots = slots.rearrange((BATCH, KEY_POSITION))
    array = jax.lax.dynamic_slice_in_dim(slots.array, jnp.maximum(length - 1, 0), 1, axis=1)
    return NamedArray(array, (slots.axes[0], First))
