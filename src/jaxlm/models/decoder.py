"""What Llama and its relatives share: sizes, blocks of attention and feed-forward network, embedding and head.

A family is a configuration that says how its blocks are put together; the model is the same for all.
"""

import abc
from dataclasses import dataclass

import equinox as eqx
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import EMBED, HEAD_SIZE, HEADS, KV_HEADS, LAYERS, MLP
from jaxlm.core.errors import check_at_least, check_choice, check_divides
from jaxlm.core.sharding import for_compute, for_lookup
from jaxlm.models.activations import ACTIVATIONS
from jaxlm.models.base import Hidden, Inputs, KVCache, LanguageModel, ModelConfig
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.inference.kv_cache import empty_cache
from jaxlm.models.layers import ForCache, GatedMlp, LayerCache, LayerContext, Mlp, SelfAttention, embedding
from jaxlm.models.linear import Linear
from jaxlm.models.norms import LayerNorm, RMSNorm
from jaxlm.models.remat import parse_remat
from jaxlm.models.stacks import Block, LayerKind, Transformer, shortest_period

Norm = LayerNorm | RMSNorm


class DecoderBlock(eqx.Module):
    """x + attention(x), then x + mlp(x), with a norm before or after either, or both; a norm that is None is left out.

    Attributes:
        attn_norm, mlp_norm: of what goes in.
        attn_post_norm, mlp_post_norm: of what comes out, before it is added.
        parallel: both read the same x, and both results are added to it.
    """

    attn_norm: Norm | None
    attn: SelfAttention
    mlp_norm: Norm | None
    mlp: Mlp | GatedMlp
    attn_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    parallel: bool = eqx.field(static=True, default=False)

    @staticmethod
    def init(config: "DecoderConfig", *, key: jax.Array) -> Block:
        """A block of the family."""
        return config.block(key=key)

    def __call__(
        self, x: NamedArray, context: LayerContext, past: LayerCache | None, *, index: NamedArray, key: jax.Array | None
    ) -> tuple[NamedArray, ForCache, None]:
        """{batch, position, embed} to the same, and the layer's keys and values of these positions."""
        del index, key  # what differs between layers is in the context, and none drops anything
        attended, new = self.attn(_through(self.attn_norm, x), context, past)
        attended = _through(self.attn_post_norm, attended)
        if self.parallel:
            return x + attended + self._fed_forward(x), new, None
        x = x + attended
        return x + self._fed_forward(x), new, None

    def _fed_forward(self, x: NamedArray) -> NamedArray:
        return _through(self.mlp_post_norm, self.mlp(_through(self.mlp_norm, x)))


def _through(norm: Norm | None, x: NamedArray) -> NamedArray:
    return x if norm is None else norm(x)


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """Sizes that Llama's relatives share.

    Attributes:
        hidden_dim: width of the residual stream.
        intermediate_dim: width of the feed-forward network.
        num_layers: blocks.
        num_heads: query heads.
        num_kv_heads: key/value heads; each serves num_heads / num_kv_heads query heads. Null means one each.
        head_dim: features of a head; null means that the heads share hidden_dim evenly.
        activation_function: of the feed-forward network (of its gate, where it has one).
        initializer_range: standard deviation of every weight matrix.
        layer_norm_epsilon: added to the mean square or variance in norms.
        tie_word_embeddings: use the token embedding as the head.
    """

    seq_len: int = 2048
    hidden_dim: int = 4096
    intermediate_dim: int = 11008
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int | None = None
    head_dim: int | None = None
    activation_function: str = "silu"
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False

    @property
    def Embed(self) -> Axis:
        """The residual stream's axis."""
        return Axis(EMBED, self.hidden_dim)

    @property
    def Layers(self) -> Axis:
        """The axis of stacked blocks."""
        return Axis(LAYERS, self.num_layers)

    @property
    def Heads(self) -> Axis:
        """Query heads."""
        return Axis(HEADS, self.num_heads)

    @property
    def KVHeads(self) -> Axis:
        """Heads of keys and values."""
        return Axis(KV_HEADS, self.num_heads if self.num_kv_heads is None else self.num_kv_heads)

    @property
    def HeadSize(self) -> Axis:
        """Features of one head."""
        return Axis(HEAD_SIZE, self.hidden_dim // self.num_heads if self.head_dim is None else self.head_dim)

    @property
    def Mlp(self) -> Axis:
        """Hidden features of the feed-forward network."""
        return Axis(MLP, self.intermediate_dim)

    @property
    @abc.abstractmethod
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is, first to last."""

    @abc.abstractmethod
    def block(self, *, key: jax.Array) -> Block:
        """One freshly initialised block."""


class Decoder(LanguageModel):
    """A token embedding, the blocks, and a head of its own or the embedding again.

    Attributes:
        embed_scale: what embeddings are multiplied by before the first block.
    """

    tokens: hnn.Embedding
    body: Transformer
    head: Linear | None
    config: DecoderConfig = eqx.field(static=True)
    embed_scale: float | None = eqx.field(static=True, default=None)

    @staticmethod
    def init(
        config: DecoderConfig,
        Vocab: Axis,
        *,
        final_norm: Norm,
        key: jax.Array,
        embed_scale: float | None = None,
        logit_soft_cap: float | None = None,
    ) -> "Decoder":
        """A model with N(0, initializer_range) weights."""
        k_tokens, k_layers, k_head = jax.random.split(key, 3)
        std = config.initializer_range
        body = Transformer(
            hnn.Stacked.init(config.Layers, DecoderBlock)(config, key=jax.random.split(k_layers, config.num_layers)),
            final_norm,
            kinds=shortest_period(config.kinds),
            HeadSize=config.HeadSize,
            seq_len=config.seq_len,
            scan=config.scan_layers,
            remat_policy=parse_remat(config.gradient_checkpointing),
            attn_backend=config.attn_backend,
        )
        head = None if config.tie_word_embeddings else Linear.init(config.Embed, Vocab, std=std, key=k_head)
        tokens = embedding(Vocab, config.Embed, std=std, key=k_tokens)
        return Decoder(tokens, body, head, config, embed_scale, logit_soft_cap=logit_soft_cap)

    @property
    def Vocab(self) -> Axis:
        """The vocabulary axis of the head."""
        return self.tokens.Vocab

    @property
    def Pos(self) -> Axis:
        """The position axis at full length."""
        return self.config.Pos

    def hidden(self, inputs: Inputs, *, cache: KVCache | None = None, key: jax.Array | None = None) -> Hidden:
        """Everything but the head."""
        x = for_lookup(self.tokens)(inputs.tokens)
        if self.embed_scale is not None:
            x = x * jax.numpy.asarray(self.embed_scale, x.dtype)
        return self.body(x, inputs, cache, key)

    def lm_head(self) -> NamedArray:
        """The head's weight, {vocab, embed}: the token embedding itself where the two are tied."""
        return for_compute(self.tokens if self.head is None else self.head).weight

    def init_cache(self, Batch: Axis, capacity: int, dtype) -> KVCache:
        """An empty cache for `capacity` tokens a row."""
        c = self.config
        return empty_cache(c.Layers, Batch, capacity, c.KVHeads, c.HeadSize, dtype)


def projections(config: DecoderConfig, keys: jax.Array, *, qkv_bias: bool, out_bias: bool) -> dict:
    """`SelfAttention`'s linear maps by name, of four keys."""
    std, Embed, HeadSize = config.initializer_range, config.Embed, config.HeadSize
    heads = {"q_proj": config.Heads, "k_proj": config.KVHeads, "v_proj": config.KVHeads}
    maps = {
        name: Linear.init(Embed, (axis, HeadSize), std=std, key=key, use_bias=qkv_bias)
        for (name, axis), key in zip(heads.items(), keys[:3], strict=True)
    }
    out = Linear.init((config.Heads, HeadSize), Embed, std=std, key=keys[3], use_bias=out_bias)
    return {**maps, "o_proj": out}


def gated_mlp(config: DecoderConfig, keys: jax.Array, *, use_bias: bool = False) -> GatedMlp:
    """A feed-forward network with a gate, of three keys."""
    std, Embed, Mlp_ = config.initializer_range, config.Embed, config.Mlp
    return GatedMlp(
        gate_proj=Linear.init(Embed, Mlp_, std=std, use_bias=use_bias, key=keys[0]),
        up_proj=Linear.init(Embed, Mlp_, std=std, use_bias=use_bias, key=keys[1]),
        down_proj=Linear.init(Mlp_, Embed, std=std, use_bias=use_bias, key=keys[2]),
        activation=config.activation_function,
    )


def plain_mlp(config: DecoderConfig, keys: jax.Array, *, use_bias: bool) -> Mlp:
    """A feed-forward network without a gate, of two keys."""
    std, Embed, Mlp_ = config.initializer_range, config.Embed, config.Mlp
    return Mlp(
        up_proj=Linear.init(Embed, Mlp_, std=std, key=keys[0], use_bias=use_bias),
        down_proj=Linear.init(Mlp_, Embed, std=std, key=keys[1], use_bias=use_bias),
        activation=config.activation_function,
    )


def pre_norm_block(config: DecoderConfig, attn: SelfAttention, mlp: Mlp | GatedMlp) -> DecoderBlock:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    return DecoderBlock(rms_norm(config), attn, rms_norm(config), mlp)


def rms_norm(config: DecoderConfig) -> RMSNorm:
    """A norm over the residual stream."""
    return RMSNorm.init(config.Embed, config.layer_norm_epsilon)


def check_sizes(config: DecoderConfig) -> None:
    """Raises `ConfigError` where the shared numbers cannot make a model."""
    for name in ("seq_len", "hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
        if getattr(config, name) is not None:
            check_at_least(f"model.{name}", getattr(config, name), 1)
    if config.head_dim is None:
        check_divides("model.num_heads", config.num_heads, "model.hidden_dim", config.hidden_dim)
    check_divides("model.num_kv_heads", config.KVHeads.size, "model.num_heads", config.num_heads)
    check_choice("model.activation_function", config.activation_function, ACTIVATIONS)
    for name in ("initializer_range", "layer_norm_epsilon"):
        check_at_least(f"model.{name}", getattr(config, name), 0)


def check_window(window: int | None) -> None:
    """Raises `ConfigError` for a window that shows nothing."""
    if window is not None:
        check_at_least("model.sliding_window", window, 1)


def decoder_flops(config: DecoderConfig, vocab_size: int, *, mlp_matrices: int) -> FlopsPerToken:
    """Floating-point operations of one training token. Args: mlp_matrices: 3 with a gate, 2 without."""
    return active_flops(config, vocab_size, mlp_weights=mlp_matrices * config.hidden_dim * config.intermediate_dim)


def active_flops(config: DecoderConfig, vocab_size: int, *, mlp_weights: int) -> FlopsPerToken:
    """Floating-point operations of one training token. Args: mlp_weights: that a token meets behind a layer's attention."""
    head_size = config.HeadSize.size
    attention = 2 * config.hidden_dim * (config.num_heads + config.KVHeads.size) * head_size
    return FlopsPerToken.of(
        weights=config.num_layers * (attention + mlp_weights) + vocab_size * config.hidden_dim,
        attention_dim=config.num_heads * head_size,
        seq_len=config.seq_len,
        windows=[kind.window for kind in config.kinds],
    )
