"""The decoder that Llama and related families share: sizes, attention and MLP blocks, embedding and head.

Each family is a config that assembles its own blocks. The model class is the same for all of them.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import EMBED, HEAD_SIZE, HEADS, KV_HEADS, LAYERS, MLP
from jaxlm.core.errors import ConfigError, check_choice, check_divides
from jaxlm.core.field_types import (
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    check_fields,
)
from jaxlm.core.products.stored_weights import Weight
from jaxlm.core.sharding import for_compute, for_lookup
from jaxlm.models.activations import ACTIVATIONS
from jaxlm.models.base import (
    Hidden,
    Inputs,
    LanguageModel,
    ModelConfig,
    ModelTraits,
    RotaryModel,
    with_context,
    with_traits,
)
from jaxlm.models.decoders.block import DecoderBlock, apply_norm
from jaxlm.models.decoders.layer_inputs import LayerInputs
from jaxlm.models.decoders.mtp import MtpLayer, initial_mtp, inputs_of_following, with_mtp
from jaxlm.models.diffusion import Denoiser, TimeEmbedding, TimeEmbeddingConfig, needed, routed, runs_whole
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.growth import grown_body
from jaxlm.models.inference.cache import DecodingCache, empty_cache
from jaxlm.models.layers import Embedding, GatedMlp, Mlp, check_tiles, dropout, token_embeddings
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.base import Mixer
from jaxlm.models.moe import num_multiplied
from jaxlm.models.norms import Norm, RMSNorm, UnweightedRMSNorm
from jaxlm.models.remat import parse_remat
from jaxlm.models.rope import RotaryConfig
from jaxlm.models.scan import shortest_period
from jaxlm.models.stacks import Block, Body, LayerKind, Stack, Stacks, numbers_by_stack, stacked, switch_lengths

_TIME, _MTP, LAYER_INPUTS = 3, 4, 7  # folded into a model's key, which is split for everything else


class SizedConfig(ModelConfig):
    """Names the axes of a stream, its layers and their heads, by the config keys that a family declares."""

    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: PositiveInt | None = None

    @property
    def Embed(self) -> Axis:
        return Axis(EMBED, self.hidden_dim)

    @property
    def Layers(self) -> Axis:
        """The axis that stacks the parameters of all blocks."""
        return Axis(LAYERS, self.num_layers)

    @property
    def Heads(self) -> Axis:
        return Axis(HEADS, self.num_heads)

    @property
    def KVHeads(self) -> Axis:
        return Axis(KV_HEADS, self.num_heads if self.num_kv_heads is None else self.num_kv_heads)


class TransformerConfig(SizedConfig):
    """The axes, layers and FLOPs of a decoder. Families declare these values as config keys, or keep those here.

    Attributes:
        embedding_multiplier: token embeddings are multiplied by this number.
        embedding_dropout: dropout probability of the token embeddings.
        logit_scale: logits are multiplied by this number.
        logits_scaling: logits are divided by this number.
        final_soft_cap: soft cap of the logits, `cap * tanh(logit / cap)`. Null applies no cap.
        layer_input_dim: each layer reads this many features of the tokens besides the residual stream. Null for none.
        mtp: one more layer predicts the token after the next one (`jaxlm.models.decoders.mtp`).
    """

    mtp: bool = False
    head_dim: PositiveInt | None = None
    local_layers: Sequence[NonNegativeInt] | None = None
    hybrid_norm: bool = False
    input_embedding_norm: bool = False
    use_layer_norm_weight: bool = True
    use_bidirectional_attention: bool = False
    tie_word_embeddings: bool = False
    time_embedding: TimeEmbeddingConfig | None = None
    rope: RotaryConfig | None = None
    embedding_multiplier: PositiveFloat = 1.0
    embedding_dropout: BelowOne = 0.0
    logit_scale: PositiveFloat = 1.0
    logits_scaling: PositiveFloat = 1.0
    final_soft_cap: PositiveFloat | None = None
    layer_input_dim: PositiveInt | None = None
    scales_embeddings: ClassVar[bool] = False
    """Token embeddings are multiplied by the square root of their width, in place of `embedding_multiplier`."""
    norm_offset: ClassVar[float] = 0.0
    """Added to the weights of RMSNorms before they multiply."""

    @property
    def rotary(self) -> RotaryConfig | None:
        return self.rope if any(kind.rope is not None for kind in self.kinds) else None

    @property
    def is_causal(self) -> bool:
        return not self.use_bidirectional_attention

    @property
    def HeadSize(self) -> Axis:
        return Axis(HEAD_SIZE, self.hidden_dim // self.num_heads if self.head_dim is None else self.head_dim)

    @property
    def KeyHeads(self) -> Axis:
        """The heads of keys: those of values (`KVHeads`), or fewer with the axis `key_heads`."""
        return self.KVHeads

    @property
    def RotarySize(self) -> Axis:
        """The features that the frequencies of the rotary embedding are those of."""
        return self.HeadSize

    @property
    @abc.abstractmethod
    def Mlp(self) -> Axis:
        """Hidden features of the MLP, or of each expert."""

    @property
    @abc.abstractmethod
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, from first to last."""

    @property
    def rotated_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds, each with the number of features that its frequencies are those of."""
        size = self.RotarySize.size
        return tuple(
            dataclasses.replace(kind, rotary_size=size) if kind.rotary_size is None else kind for kind in self.kinds
        )

    @abc.abstractmethod
    def block(self, *, key: jax.Array) -> Block:
        """Initializes one block."""

    def layer_block(self, layer: int) -> Callable[..., Block]:
        """Returns what initializes the block of a layer with a key."""
        return self.block

    def with_layers(self, kept: Sequence[int]) -> "TransformerConfig":
        changed = dataclasses.replace(self, num_layers=len(kept), **self.layer_keys(kept))
        assert changed.kinds == tuple(self.kinds[layer] for layer in kept), "layers keep their windows and rotation"
        assert changed.dense_layers == renumbered(self.dense_layers, kept), "layers keep their experts"
        return changed

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        """The keys that say in which layers something is, for a model with only these layers. Empty without such keys."""
        return {}

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The numbers of the layers without experts, in a family with experts."""
        return ()

    @property
    def stack_of_layer(self) -> tuple[int, ...]:
        """The number of the stack that each layer is in: one stack, or one with and one without experts."""
        is_dense = [layer in self.dense_layers for layer in range(self.num_layers)]
        return tuple(int(dense != is_dense[0]) for dense in is_dense)

    def transformer(self, final_norm: Norm, *, key: jax.Array) -> Body:
        """Initializes all blocks."""
        return initial_body(self, self.layer_block, self.rotated_kinds, final_norm, key=key)

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        flops = decoder_flops(self, self.layer_block, vocab_size, causal=self.is_causal)
        return with_mtp(flops, self, vocab_size) if self.mtp else flops


def initial_body(
    config: Any, block: Callable[[int], Any], kinds: Sequence[LayerKind], final_norm: Norm, *, key: jax.Array
) -> Body:
    """Initializes the layers of a config with `stack_of_layer`.

    Args:
        block: number of a layer -> what initializes it with a key. The same for all layers of a stack.
        kinds: of each layer, with the features that it rotates.
    """
    keys, count = jax.random.split(key, len(kinds)), len(kinds)
    stacks = [
        Stack(
            stacked(
                block(layers[0]), Axis(LAYERS, len(layers)), keys if len(layers) == count else keys[np.asarray(layers)]
            ),
            final_norm,
            kinds=shortest_period([kinds[layer] for layer in layers]),
            scan=config.scan_layers,
            remat_policy=parse_remat(config.gradient_checkpointing),
            attn_backend=config.attn_backend,
            mlp_tile_tokens=config.mlp_tile_tokens,
            structure=number,
        )
        for number, layers in enumerate(numbers_by_stack(config.stack_of_layer))
    ]
    check_tiles(config.mlp_tile_tokens, stacks)
    return stacks[0] if len(stacks) == 1 else Stacks.of(stacks, config.stack_of_layer, final_norm)


def decoder_flops(config: Any, block: Callable[[int], Any], vocab_size: int, *, causal: bool = True) -> FlopsPerToken:
    """FLOPs of the layers of a config and of its head. Args: block: as in `initial_body`."""
    key = jax.random.key(0)
    shapes = [jax.eval_shape(block(layers[0]), key=key) for layers in numbers_by_stack(config.stack_of_layer)]
    layers = [shapes[stack] for stack in config.stack_of_layer]
    return FlopsPerToken.of(
        weights=sum(num_multiplied(layer, layer) for layer in layers) + vocab_size * config.hidden_dim,
        mixers=[
            mixer.work(kind.window)
            for layer, kind in zip(layers, config.kinds, strict=True)
            for mixer in tree.modules(layer, Mixer)
        ],
        seq_len=config.seq_len,
        causal=causal,
    )


@dataclass(frozen=True)
class DecoderConfig(TransformerConfig):
    """Keys that Llama and related families share.

    Attributes:
        hidden_dim: width of the residual stream.
        intermediate_dim: hidden width of the MLP.
        num_layers: number of transformer blocks.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; must divide `num_heads`. Null means `num_heads`.
        head_dim: features per head. Null means `hidden_dim / num_heads`.
        activation_function: activation of the MLP (of its gate, if the MLP is gated).
        initializer_range: standard deviation of the normal initialization of every weight matrix.
        layer_norm_epsilon: added to the variance (or mean square) in norms, for numerical stability.
        tie_word_embeddings: use the token embedding as the output head.
    """

    seq_len: PositiveInt = 2048
    hidden_dim: PositiveInt = 4096
    intermediate_dim: PositiveInt = 11008
    num_layers: NumLayers = 32
    num_heads: PositiveInt = 32
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    activation_function: str = "silu"
    initializer_range: NonNegativeFloat = 0.02
    layer_norm_epsilon: NonNegativeFloat = 1e-5
    tie_word_embeddings: bool = False

    @property
    def Mlp(self) -> Axis:
        return Axis(MLP, self.intermediate_dim)

    def norm(self) -> Norm:
        """Initializes a norm over the residual stream, such as the one before the head."""
        return rms_norm(self)

    def build(self, Vocab: Axis, *, key: jax.Array) -> "Decoder":
        k_tokens, k_layers, k_head = jax.random.split(key, 3)
        k_own = functools.partial(jax.random.fold_in, key)
        std, Embed, size = self.initializer_range, self.Embed, self.layer_input_dim
        head, time, layer_inputs, mtp = None, None, None, None
        body = self.transformer(self.norm(), key=k_layers)
        if not self.tie_word_embeddings:
            head = Linear.init(Embed, Vocab, std=std, key=k_head)
        tokens = Embedding.init(Vocab, Embed, std=std, key=k_tokens)
        embed_norm = rms_norm(self) if self.input_embedding_norm else None
        if self.time_embedding is not None:
            time = TimeEmbedding.init(self.time_embedding, Embed, key=k_own(_TIME))
        if size is not None:
            sizes = {"std": std, "eps": self.layer_norm_epsilon}
            layer_inputs = LayerInputs.init(Vocab, Embed, self.Layers, size, **sizes, key=k_own(LAYER_INPUTS))
        if self.mtp:
            mtp = initial_mtp(self, key=k_own(_MTP))
        embed_scale = self.hidden_dim**0.5 if self.scales_embeddings else self.embedding_multiplier
        final_scale = self.logit_scale / self.logits_scaling
        return Decoder(
            tokens=tokens,
            body=body,
            head=head,
            config=self,
            embed_scale=None if embed_scale == 1.0 else embed_scale,
            embed_norm=embed_norm,
            embed_dropout=self.embedding_dropout,
            time=time,
            final_scale=None if final_scale == 1.0 else final_scale,
            layer_inputs=layer_inputs,
            mtp=mtp,
            is_causal=self.is_causal,
            traits=dataclasses.replace(transformer_traits(self), logit_soft_cap=self.final_soft_cap, reads_beyond=True),
        )


class TransformerModel(LanguageModel):
    """A token embedding, a body of blocks, and a head (None if it is tied to the token embedding).

    Attributes:
        final_scale: factor that the output of the final norm is multiplied by before the head.
        layer_inputs: what each layer reads of the tokens besides the residual stream; None for nothing.
        mtp: the layer that predicts the token after the next one; None if there is none.
    """

    tokens: eqx.AbstractVar[Embedding]
    body: eqx.AbstractVar[Body]
    head: eqx.AbstractVar[Linear | None]
    config: eqx.AbstractVar[Any]

    @property
    def Vocab(self) -> Axis:
        return self.tokens.Vocab

    @property
    def Pos(self) -> Axis:
        return self.config.Pos

    final_scale: float | None = eqx.field(static=True, default=None, kw_only=True)
    layer_inputs: LayerInputs | None = eqx.field(default=None, kw_only=True)
    mtp: MtpLayer | None = eqx.field(default=None, kw_only=True)

    @abc.abstractmethod
    def embedded(
        self, inputs: Inputs, stream: NamedArray | None, key: jax.Array | None
    ) -> tuple[NamedArray, jax.Array | None]:
        """The input of the layers, {batch, position, embed}: `stream` if it is given. And the key for their dropout."""

    def hidden(
        self,
        inputs: Inputs,
        *,
        cache: DecodingCache | None = None,
        taps: Sequence[str] = (),
        key: jax.Array | None = None,
    ) -> Hidden:
        denoisers = self.traits.denoisers
        by_share = inputs.mask_fractions is not None and not taps
        if not denoisers or (not by_share and runs_whole(denoisers)):
            x, key = self.embedded(inputs, None, key)
            own = self.layer_inputs and self.layer_inputs(inputs, x)
            return self._scaled(self.body(x, inputs, cache, key, taps, layer_inputs=own))
        if not by_share or cache is not None:
            raise ConfigError(
                "which layers of this model compute a text depends on the share of its tokens that is hidden (surgery"
                " denoisers), so it has no logits or hidden states of a text without that. Generate text with it, or measure"
                " its loss on hidden tokens"
            )
        assert inputs.mask_fractions is not None
        parts = needed(denoisers, inputs.mask_range)
        if len(parts) == 1:
            return self.forward_layers(parts[0].first, parts[0].stop, inputs, key=key)

        def run(denoiser: Denoiser) -> NamedArray:
            hidden = self.forward_layers(denoiser.first, denoiser.stop, inputs, key=key)
            assert not hidden.aux, "no family with experts attends to later tokens"
            return hax.auto_sharded(hidden.final)

        return Hidden(routed(parts, inputs.mask_fractions, run))

    def forward_layers(
        self,
        first: int,
        stop: int | None,
        inputs: Inputs,
        stream: NamedArray | None = None,
        *,
        taps: Sequence[str] = (),
        key: jax.Array | None = None,
    ) -> Hidden:
        """As `hidden`, with only some of the layers, for all rows.

        Args:
            first, stop: numbers of the first layer that runs, and of the one after the last; None for all from the first on.
            stream: {batch, position, embed}, its input: the tap of the layer before it. None for the embeddings.
            taps: of layers that run. None if `stop` is given.
        """
        x, key = self.embedded(inputs, stream, key)
        start = x if stream is None or self.layer_inputs is None else self.embedded(inputs, None, None)[0]
        own = self.layer_inputs and self.layer_inputs(inputs, start)
        return self._scaled(self.body(x, inputs, None, key, taps, first, stop, own))

    def hidden_of_mtp(self, inputs: Inputs, final: NamedArray, *, key: jax.Array | None = None) -> Hidden:
        """The input of the head for the token after the next one. Args: inputs, final: of `hidden`, and its output."""
        assert self.mtp is not None, "the objective has checked this"
        after = inputs_of_following(inputs)
        x, key = self.embedded(after, None, key)
        return self._scaled(self.mtp(x, final, after, self.config, key))

    def init_cache(self, Batch: Axis, capacity: int, dtype) -> DecodingCache:
        stacks = [stack.layers for stack in self.body.stacks]
        return empty_cache(stacks, Batch, capacity, dtype, with_tokens=bool(self.traits.switch_lengths))

    def _scaled(self, hidden: Hidden) -> Hidden:
        return (
            hidden if self.final_scale is None else dataclasses.replace(hidden, final=hidden.final * self.final_scale)
        )

    def with_layers(self, kept: Sequence[int]) -> Self:
        """The same model with only some of its layers; its config is `ModelConfig.with_layers`. Leaves may be missing (None).

        Args:
            kept: numbers of the layers, from 0, in ascending order.

        Raises:
            ConfigError: the layers cannot be separated.
        """
        return self._with_body(self.config.with_layers(kept), self.body.with_layers(kept))

    def grown(self, sources: Sequence[int], added: range, *, key: jax.Array | None) -> Self:
        """The same model with more layers, in a stack of their own; its config is `ModelConfig.with_layers(sources)`.

        Args:
            sources: for each layer of the larger model, the number of a layer of the same kind in this one.
            added: the numbers of the new layers in the larger model, the first or the last ones.
            key: initializes them as those of a new model; None leaves their leaves out. Others may be missing too (None).

        Raises:
            ConfigError: the model cannot have more layers.
        """
        config = self.config.with_layers(sources)
        return self._with_body(config, grown_body(self.body, config, self.Vocab, added, key))

    def _with_body(self, config: Any, body: Body) -> Self:
        changed = dataclasses.replace(self, config=config, body=body)
        return with_traits(changed, switch_lengths=switch_lengths(config.kinds), denoisers=())

    def lm_head(self) -> Weight:
        return for_compute(self.tokens if self.head is None else self.head).weight


def transformer_traits(config: Any) -> ModelTraits:
    """The traits of a model whose layers have `config.kinds`, with token embeddings from `token_embeddings`."""
    lengths, multiple = switch_lengths(config.kinds), config.pad_vocab_to_multiple_of or 1
    return ModelTraits(vocab_multiple=multiple, adds_noise=True, switch_lengths=lengths)


def as_transformer(model: LanguageModel, lacks: str) -> TransformerModel:
    """The model, whose layers can be changed. Raises `ConfigError` if they cannot. Args: lacks: what is wrong then."""
    if not isinstance(model, TransformerModel):
        raise ConfigError(f"a model of type {type(model).__name__} {lacks}")
    return model


class Decoder(TransformerModel, RotaryModel):
    """The model of Llama and related families.

    Attributes:
        embed_scale: factor that embeddings are multiplied by before the first block.
        embed_norm: applied to the embeddings before the first block. None applies no norm.
        embed_dropout: dropout probability of the embeddings.
        time: added to the embeddings of a sequence with hidden tokens. None adds nothing.
    """

    tokens: Embedding
    body: Body
    head: Linear | None
    config: DecoderConfig = eqx.field(static=True)
    embed_scale: float | None = eqx.field(static=True, default=None)
    embed_norm: Norm | None = None
    embed_dropout: float = eqx.field(static=True, default=0.0)
    time: TimeEmbedding | None = None

    def embedded(
        self, inputs: Inputs, stream: NamedArray | None, key: jax.Array | None
    ) -> tuple[NamedArray, jax.Array | None]:
        if stream is not None:
            return stream, key
        x = token_embeddings(for_lookup(self.tokens), inputs)
        if self.embed_scale is not None:
            x = x * jax.numpy.asarray(self.embed_scale, x.dtype)
        if self.time is not None and inputs.mask_fractions is not None:
            x = (x + for_compute(self.time)(inputs.mask_fractions)).rearrange(x.axes).astype(x.dtype)
        x = apply_norm(for_compute(self.embed_norm), x)
        if key is None or not self.embed_dropout:
            return x, key
        k_embed, key = jax.random.split(key)
        return dropout(x, self.embed_dropout, k_embed), key

    def with_context(self, seq_len: int, rope: RotaryConfig | None) -> "Decoder":
        config = with_context(self.config, seq_len, rope)
        kinds = iter([[config.rotated_kinds[layer] for layer in layers] for layers in self.body.layer_numbers])
        change = lambda stack: dataclasses.replace(stack, kinds=shortest_period(next(kinds)))  # noqa: E731
        body = jax.tree.map(change, self.body, is_leaf=lambda node: isinstance(node, Stack))
        changed = dataclasses.replace(self, config=config, body=body)
        return with_traits(changed, switch_lengths=switch_lengths(config.kinds))


def renumbered(layers: Collection[int], kept: Sequence[int]) -> tuple[int, ...]:
    """The new numbers of these layers in a model with only the layers `kept`."""
    return tuple(new for new, old in enumerate(kept) if old in layers)


def projections(config: DecoderConfig, keys: jax.Array, *, qkv_bias: bool = False, out_bias: bool = False) -> dict:
    """Initializes the linear layers of `SelfAttention`, by field name, and says whether it is causal. Takes four keys."""
    std, Embed, HeadSize = config.initializer_range, config.Embed, config.HeadSize
    heads = {"q_proj": config.Heads, "k_proj": config.KVHeads, "v_proj": config.KVHeads}
    layers = {
        name: Linear.init(Embed, (axis, HeadSize), std=std, key=key, use_bias=qkv_bias)
        for (name, axis), key in zip(heads.items(), keys[:3], strict=True)
    }
    out = Linear.init((config.Heads, HeadSize), Embed, std=std, key=keys[3], use_bias=out_bias)
    return {**layers, "o_proj": out, "causal": config.is_causal}


def gated_mlp(
    config: DecoderConfig, keys: jax.Array, *, use_bias: bool = False, Features: Axis | None = None
) -> GatedMlp:
    """Initializes a gated MLP with hidden features `config.Mlp`, or others. Takes three keys."""
    std, Embed, Mlp_ = config.initializer_range, config.Embed, config.Mlp if Features is None else Features
    return GatedMlp(
        gate_proj=Linear.init(Embed, Mlp_, std=std, use_bias=use_bias, key=keys[0]),
        up_proj=Linear.init(Embed, Mlp_, std=std, use_bias=use_bias, key=keys[1]),
        down_proj=Linear.init(Mlp_, Embed, std=std, use_bias=use_bias, key=keys[2]),
        activation=config.activation_function,
    )


def plain_mlp(config: DecoderConfig, keys: jax.Array, *, use_bias: bool = False) -> Mlp:
    """Initializes an MLP without a gate. Takes two keys."""
    std, Embed, Mlp_ = config.initializer_range, config.Embed, config.Mlp
    return Mlp(
        up_proj=Linear.init(Embed, Mlp_, std=std, key=keys[0], use_bias=use_bias),
        down_proj=Linear.init(Mlp_, Embed, std=std, key=keys[1], use_bias=use_bias),
        activation=config.activation_function,
    )


def pre_norm_block(
    config: DecoderConfig, attn: Mixer, mlp: Mlp | GatedMlp, *, residual_scale: float = 1.0, dropout: float = 0.0
) -> DecoderBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); with `hybrid_norm`, another norm follows attention and MLP."""
    post = (config.norm(), config.norm()) if config.hybrid_norm else (None, None)
    return DecoderBlock(config.norm(), attn, config.norm(), mlp, *post, residual_scale=residual_scale, dropout=dropout)


def rms_norm(config: DecoderConfig) -> RMSNorm | UnweightedRMSNorm:
    """Initializes an RMSNorm over the residual stream."""
    if not config.use_layer_norm_weight:
        return UnweightedRMSNorm(config.Embed, config.layer_norm_epsilon)
    return RMSNorm.init(config.Embed, config.layer_norm_epsilon, offset=config.norm_offset)


def check_sizes(config: DecoderConfig) -> None:
    """Raises `ConfigError` if the keys of `DecoderConfig` are invalid."""
    check_fields(config, "model")
    if config.head_dim is None:
        check_divides("model.num_heads", config.num_heads, "model.hidden_dim", config.hidden_dim)
    check_divides("model.num_kv_heads", config.KVHeads.size, "model.num_heads", config.num_heads)
    check_choice("model.activation_function", config.activation_function, ACTIVATIONS)
