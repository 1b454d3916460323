"""nanochat's model: QK norm, squared ReLU, value embeddings in every other layer, a skip from the embedding to every layer.

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

and with lookup layers, of which number I follows layer N:

    body.lookups.I.keys_embedding               {lookup_entries, embed}                     l3_layers.N.kv_weight (k_weight)
    body.lookups.I.values_embedding             {lookup_entries, embed}                     l3_layers.N.v_weight, untied
    body.lookups.I.bounds                       int32 {lookup_bounds: vocab + 1}            l3_layers.N.bounds
    body.lookups.I.up_proj.weight               {lookup_mlp, embed}                         l3_layers.N.w_up
    body.lookups.I.mix_proj.weight              {embed, lookup_mix}                         l3_layers.N.w_mix

Counts of parameters, scaling parameters and FLOPs per token follow nanochat's own conventions (`ParameterCounts`,
`nanochat_flops_per_token`). Batch size and length of its runs follow from them, so they are exact here: they include the
rows that pad the vocabulary, and they count attention to every key of a window. `NanoConfig.flops_per_token` counts what is
computed.

Source: karpathy/nanochat (`nanochat/gpt.py`): the defaults are commit b7629ef, as are the counts (`num_scaling_params`,
`estimate_flops`); every difference of the revision 92d63d4 is a key. QK norm: Henry et al. 2020 (arXiv:2010.04245); squared
ReLU: So et al. 2021 (arXiv:2109.08668); value embeddings: Zhou et al. 2024 (arXiv:2410.17897); soft cap: Gemma Team 2024
(arXiv:2408.00118).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core.axes import (
    GATE_CHANNELS,
    HEAD_SIZE,
    MLP,
    SMEAR_CHANNELS,
    VALUE_EMBED,
    VALUE_LAYERS,
)
from jaxlm.core.errors import ConfigError, check_divides
from jaxlm.core.field_types import (
    NonNegativeFloat,
    NonNegativeInt,
    NumLayers,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    check_fields,
)
from jaxlm.core.parameters import SCALE, DeclaresParameters, Parameter
from jaxlm.core.products.float32_sums import scaled
from jaxlm.core.products.stored_weights import Weight
from jaxlm.core.rules import Rules, unused
from jaxlm.core.sharding import for_compute, for_lookup
from jaxlm.models.base import (
    FINAL,
    Hidden,
    Inputs,
    LeavesFromTokens,
    ModelConfig,
    RotaryModel,
    token_leaves,
    with_context,
    with_traits,
)
from jaxlm.models.decoder import SizedConfig, transformer_traits
from jaxlm.models.flops import FlopsPerToken, MixerWork
from jaxlm.models.inference.cache import DecodingCache, empty_cache
from jaxlm.models.layers import Embedding, Mlp, token_embeddings
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.norms import UnweightedRMSNorm
from jaxlm.models.remat import RematModules, parse_remat
from jaxlm.models.rope import DefaultRotary, RotaryConfig, check_rope
from jaxlm.models.stacks import LayerKind, stacked, switch_lengths
from jaxlm.reading.choices import choice
from jaxlm.systems.nanochat.body import NanoBody
from jaxlm.systems.nanochat.layers import NanoBlock, first_channels, previous_embeddings, uniform_linear, zero_linear
from jaxlm.systems.nanochat.lookup import LookupConfig, LookupLayer, lookup_width

_SMEAR_GATE_MAX = 0.02
_LOOKUPS = 1  # folded into the key, so that the other parameters are the same without lookup layers


@choice(ModelConfig, "nano")
class NanoConfig(SizedConfig):
    """nanochat's model. The defaults are its 12 layers of February 2026.

    Attributes:
        hidden_dim: width of the residual stream.
        num_layers: number of transformer blocks.
        num_heads: number of query heads; must divide `hidden_dim`.
        num_kv_heads: number of key/value heads; must divide `num_heads`. Null means `num_heads`.
        mlp_scale: hidden width of the MLP as a multiple of `hidden_dim`.
        window_pattern: one letter per layer, repeated over the layers: `L` attends to all previous tokens, `S` only to
            near ones. The last layer always attends to all. In an input longer than `seq_len`, `L` attends `seq_len` tokens
            back.
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
        lookup: lookup layers (nanochat's L3): tables of which each token has some entries. Null has none.
    """

    seq_len: PositiveInt = 2048
    pad_vocab_to_multiple_of: PositiveInt | None = 64
    hidden_dim: PositiveInt = 768
    num_layers: NumLayers = 12
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
    lookup: LookupConfig | None = None
    key_rules: ClassVar[Rules] = (unused("mlp_tile_tokens", why="the MLPs of nano compute all tokens at once"),)

    @property
    def ValueLayers(self) -> Axis:
        """The axis that stacks the value embeddings: every other layer has one, and the last layer does."""
        return Axis(VALUE_LAYERS, (self.num_layers + 1) // 2)

    @property
    def HeadSize(self) -> Axis:
        return Axis(HEAD_SIZE, self.hidden_dim // self.num_heads)

    @property
    def Mlp(self) -> Axis:
        return Axis(MLP, self.mlp_scale * self.hidden_dim)

    @property
    def window_distances(self) -> tuple[int, ...]:
        """The number of tokens over which each layer attends back; `seq_len` stands for all."""
        exact, multiple = self.seq_len * self.short_window_fraction, self.short_window_multiple
        short = math.floor(exact) if multiple is None else multiple * math.ceil(exact / multiple)
        letters = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.num_layers - 1)]
        return (*(short if letter == "S" else self.seq_len for letter in letters), self.seq_len)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, from first to last."""
        windows = [None if back == self.seq_len else back + 1 for back in self.window_distances]
        return tuple(LayerKind(self.rope, window, rotary_size=self.HeadSize.size) for window in windows)

    @property
    def rotary(self) -> RotaryConfig:
        return self.rope

    def with_layers(self, kept: Sequence[int]) -> "NanoConfig":
        raise ConfigError(
            "layers of nano depend on their number: every other one has a value embedding, the windows follow"
            " model.window_pattern and the last is always global"
        )

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
        if isinstance(parse_remat(self.gradient_checkpointing), RematModules):
            raise ConfigError(
                "model.gradient_checkpointing: modules given, but the layers of nano are checkpointed as a whole. Allowed:"
                " auto, none, cheap, full, or a list of activations to save"
            )
        for name in ("value_gate_channels", "smear_channels"):
            if (channels := getattr(self, name)) > self.hidden_dim:
                raise ConfigError(
                    f"model.{name}: {channels} given, at most model.hidden_dim = {self.hidden_dim} expected: it is a number"
                    " of features of the residual stream"
                )
        if self.lookup is not None:
            self.lookup.check(self.num_layers)

    def build(self, Vocab: Axis, *, key: jax.Array) -> "Nano":
        k_tokens, k_head, k_layers, k_values, k_gates, k_smear = jax.random.split(key, 6)
        lookups = self._lookups(Vocab, jax.random.fold_in(key, _LOOKUPS))
        Channels, SmearChannels = (
            Axis(GATE_CHANNELS, self.value_gate_channels),
            Axis(SMEAR_CHANNELS, self.smear_channels),
        )
        ValueEmbed = Axis(VALUE_EMBED, self.KVHeads.size * self.HeadSize.size)
        bound = math.sqrt(3 / self.hidden_dim)
        gate_axes = (self.ValueLayers, self.KVHeads, Channels)
        gates = hax.random.uniform(k_gates, gate_axes, minval=0.0, maxval=self.gate_init_max)
        body = NanoBody(
            layers=stacked(functools.partial(_block, self), self.Layers, jax.random.split(k_layers, self.num_layers)),
            resid_lambdas=self._between_layers(self.first_resid_lambda, self.last_resid_lambda),
            x0_lambdas=self._between_layers(self.first_x0_lambda, self.last_x0_lambda),
            value_embedding=hax.random.uniform(
                k_values, (self.ValueLayers, Vocab, ValueEmbed), minval=-bound, maxval=bound
            ),
            value_gates=Linear(gates, None, Channels, self.KVHeads),
            lookups=tuple(lookups.values()),
            lookup_numbers=tuple(lookups),
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
            tokens=Embedding.init(Vocab, self.Embed, std=self.embed_init_std, key=k_tokens),
            body=body,
            head=Linear.init(self.Embed, Vocab, std=self.head_init_std, key=k_head),
            smear_gate=hax.random.uniform(k_smear, (SmearChannels,), maxval=_SMEAR_GATE_MAX) if smears else None,
            smear_lambda=hax.zeros(()) if smears else None,
            backout_lambda=None if self.backout is None else hax.full((), self.backout),
            config=self,
            traits=replace(transformer_traits(self), logit_soft_cap=self.final_soft_cap, reads_beyond=True),
        )

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """FLOPs per training token, with the rows of the head that are in the vocabulary.

        A token is taken to read as many entries of a lookup layer as tokens have on average.
        """
        counts = parameter_counts(self, vocab_size)
        layers = FlopsPerToken.of(
            weights=counts.transformer_matrices
            + counts.l3_matrices
            + vocab_size * self.hidden_dim
            + self.smear_channels,
            mixers=[MixerWork(attention_dim=self.hidden_dim, window=kind.window) for kind in self.kinds],
            seq_len=self.seq_len,
        )
        num_lookups = 0 if self.lookup is None else len(self.lookup.layers)
        return layers.plus(12 * self.hidden_dim * num_lookups * num_lookup_entries(self, vocab_size) / vocab_size)

    def _lookups(self, Vocab: Axis, key: jax.Array) -> dict[int, LookupLayer]:
        """The lookup layers by the number of the layer that each of them follows."""
        if self.lookup is None:
            return {}
        num_entries = num_lookup_entries(self, Vocab.size)
        make = functools.partial(LookupLayer.init, self.lookup, Vocab, self.Embed, num_entries, self.layer_norm_epsilon)
        return {number: make(key=jax.random.fold_in(key, number)) for number in sorted(self.lookup.layers)}

    def _between_layers(self, first: float, last: float) -> NamedArray:
        return NamedArray(jnp.linspace(first, last, self.num_layers), (self.Layers,))


@token_leaves.register
def _lookup_bounds(config: NanoConfig, vocab_size: int) -> LeavesFromTokens | None:
    lookup = config.lookup
    if lookup is None:
        return None
    num_entries = num_lookup_entries(config, vocab_size)
    lookup.check_entries(num_entries, vocab_size)
    if lookup.allocation == "uniform":
        return None  # as it is initialized

    paths = tuple(f"body.lookups.{number}.bounds" for number in range(len(lookup.layers)))
    key = {"version": 1, "allocation": lookup.allocation, "entries": num_entries, "most": lookup.max_entries}

    def compute(sequences: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        return dict.fromkeys(paths, lookup.bounds_of(sequences, num_entries, vocab_size))

    return LeavesFromTokens(paths, lookup.sample_tokens, key, compute)


def _block(config: NanoConfig, *, key: jax.Array) -> NanoBlock:
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


class Nano(RotaryModel, DeclaresParameters):
    """Token embedding, layers and head. The input of the layers is added to the residual stream before each of them.

    Attributes:
        smear_gate, smear_lambda: {smear_channels} and {}. With smear, `smear_lambda * sigmoid(gate)` times the embedding of
            the previous token of the document is added to each token's embedding. None means no smear.
        backout_lambda: {}, factor of the residual stream after layer L // 2, which is subtracted from the last. None
            subtracts nothing.
    """

    tokens: Embedding
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

    def parameters(self) -> dict[str, Parameter]:
        return dict.fromkeys(("smear_gate", "smear_lambda", "backout_lambda"), SCALE)

    def hidden(
        self,
        inputs: Inputs,
        *,
        cache: DecodingCache | None = None,
        taps: Sequence[str] = (),
        key: jax.Array | None = None,
    ) -> Hidden:
        norm = UnweightedRMSNorm(self.config.Embed, self.config.layer_norm_epsilon)
        table = for_lookup(self.tokens)
        x = norm(token_embeddings(table, inputs))
        if self.smear_gate is not None and self.smear_lambda is not None:
            gate, factor = for_compute((self.smear_gate, self.smear_lambda))
            previous = previous_embeddings(x, inputs, cache, lambda tokens: norm(table(tokens)))
            opened = scaled(hnn.sigmoid(hax.dot(first_channels(x, gate.axes[0]), gate, axis=gate.axes)), factor)
            x = (x + opened * previous).rearrange(x.axes).astype(x.dtype)
        out = self.body(x, inputs, cache, key, taps)
        last = out.last
        if self.backout_lambda is not None and out.middle is not None:
            last = (last - scaled(out.middle, for_compute(self.backout_lambda))).rearrange(last.axes).astype(last.dtype)
        final = norm(last)
        return Hidden(final, out.cache, taps={name: (out.taps | {FINAL: final})[name] for name in taps})

    def with_context(self, seq_len: int, rope: RotaryConfig | None) -> "Nano":
        config = with_context(self.config, seq_len, rope)
        body = replace(self.body, kinds=config.kinds, seq_len=seq_len)
        return with_traits(replace(self, config=config, body=body), switch_lengths=switch_lengths(config.kinds))

    def lm_head(self) -> Weight:
        return for_compute(self.head).weight

    def init_cache(self, Batch: Axis, capacity: int, dtype) -> DecodingCache:
        reads_tokens = self.smear_gate is not None or bool(self.traits.switch_lengths)
        return empty_cache([self.body.layers], Batch, capacity, dtype, with_tokens=reads_tokens)


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters by group, by nanochat's names.

    Attributes:
        transformer_matrices: all matrices of the blocks, and the gates of the value embeddings.
        scalars: factors of the residual stream and of the embedding, smear and backout.
        l3_embeds, l3_matrices: the tables and the matrices of the lookup layers.
    """

    wte: int
    value_embeds: int
    lm_head: int
    transformer_matrices: int
    scalars: int
    l3_embeds: int = 0
    l3_matrices: int = 0

    @property
    def total(self) -> int:
        embeddings = self.wte + self.value_embeds + self.l3_embeds
        return embeddings + self.lm_head + self.transformer_matrices + self.l3_matrices + self.scalars

    @property
    def scaling(self) -> int:
        """The parameters by which nanochat's scaling laws measure a model: matrices and head, without lookup layers."""
        return self.transformer_matrices + self.lm_head


def padded_vocab_size(config: "NanoConfig", vocab_size: int) -> int:
    """Rows of nanochat's tables for a vocabulary."""
    multiple = config.pad_vocab_to_multiple_of or 1
    return -(-vocab_size // multiple) * multiple


def parameter_counts(config: "NanoConfig", vocab_size: int) -> ParameterCounts:
    """nanochat's `num_scaling_params`."""
    width, rows = config.hidden_dim, padded_vocab_size(config, vocab_size)
    kv_width, num_value_layers = config.KVHeads.size * config.HeadSize.size, config.ValueLayers.size
    block = 2 * width * (width + kv_width) + 2 * width * config.Mlp.size
    gate = config.KVHeads.size * config.value_gate_channels
    smear = config.smear_channels + bool(config.smear_channels)
    return ParameterCounts(
        wte=rows * width,
        value_embeds=num_value_layers * rows * kv_width,
        lm_head=rows * width,
        transformer_matrices=config.num_layers * block + num_value_layers * gate,
        scalars=2 * config.num_layers + smear + (config.backout is not None),
        l3_embeds=num_lookup_rows(config, vocab_size) * width,
        l3_matrices=_num_lookups(config) * _lookup_matrices(config),
    )


def num_lookup_entries(config: "NanoConfig", vocab_size: int) -> int:
    """Entries in the table of each lookup layer; 0 without such layers."""
    lookup = config.lookup
    if lookup is None:
        return 0
    if lookup.num_entries is not None:
        return lookup.num_entries
    one_each = replace(config, lookup=replace(lookup, num_entries=vocab_size))
    return max(vocab_size, parameter_counts(one_each, vocab_size).total // 1000)


def num_lookup_rows(config: "NanoConfig", vocab_size: int) -> int:
    """Entries of all lookup layers, those of keys and values counted separately."""
    tables = 2 if config.lookup is not None and not config.lookup.tied else 1
    return _num_lookups(config) * tables * num_lookup_entries(config, vocab_size)


def _num_lookups(config: "NanoConfig") -> int:
    return 0 if config.lookup is None else len(config.lookup.layers)


def _lookup_matrices(config: "NanoConfig") -> int:
    """Weights in the matrices of one lookup layer."""
    width = config.hidden_dim
    hidden = 0 if config.lookup is None else lookup_width(config.lookup, width)
    return width * hidden + (hidden + width) * width


def nanochat_flops_per_token(config: "NanoConfig", vocab_size: int) -> int:
    """nanochat's `estimate_flops`: 6 per weight in a matrix product (the smear gate is one), 12 per feature and key.

    It counts the forward products of lookup layers once more, and of what they read only the scores.
    """
    counts = parameter_counts(config, vocab_size)
    num_keys = sum(min(back, config.seq_len) for back in config.window_distances)
    weights = counts.scaling + config.smear_channels + counts.l3_matrices
    scores = 2 * num_lookup_entries(config, vocab_size) / vocab_size * config.hidden_dim
    again = int(_num_lookups(config) * (scores + 2 * _lookup_matrices(config)))
    return 6 * weights + 12 * config.hidden_dim * num_keys + again
