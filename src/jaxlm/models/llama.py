"""Llama: rotary positions, grouped queries, RMSNorm, SwiGLU, no biases.

Source: Touvron et al. 2023 (arXiv:2302.13971 and arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from dataclasses import dataclass, field

import equinox as eqx
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import EMBED, HEAD_SIZE, HEADS, KV_HEADS, LAYERS, MLP
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import for_compute, for_lookup
from jaxlm.models.base import Cache, Hidden, Inputs, LanguageModel, ModelConfig
from jaxlm.models.cache import empty_cache
from jaxlm.models.checks import check_at_least, check_choice, check_divides
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.layers import (
    ACTIVATIONS,
    Context,
    GatedMlp,
    KeysValues,
    SelfAttention,
    embedding,
)
from jaxlm.models.linear import Linear
from jaxlm.models.norms import RMSNorm
from jaxlm.models.recompute import parse_keep
from jaxlm.models.rotary import DefaultRotary, RotaryConfig
from jaxlm.models.transformer import Transformer


@ModelConfig.register_subclass("llama")
@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """Llama's sizes; the defaults are Llama 2 7B at half its context.

    Attributes:
        hidden_dim: width of the residual stream.
        intermediate_dim: width of the feed-forward network.
        num_layers: blocks.
        num_heads: query heads; they share hidden_dim evenly.
        num_kv_heads: key/value heads; each serves num_heads / num_kv_heads query heads.
        activation_function: of the gate.
        initializer_range: standard deviation of every weight matrix.
        layer_norm_epsilon: added to the mean square.
        tie_word_embeddings: use the token embedding as the head.
        sliding_window: how many tokens a token sees, itself included; null means all before it.
        rope: how queries and keys are rotated.
    """

    seq_len: int = 2048
    hidden_dim: int = 4096
    intermediate_dim: int = 11008
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    activation_function: str = "silu"
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    rope: RotaryConfig = field(default_factory=DefaultRotary)

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
        return Axis(KV_HEADS, self.num_kv_heads)

    @property
    def HeadSize(self) -> Axis:
        """Features of one head."""
        return Axis(HEAD_SIZE, self.hidden_dim // self.num_heads)

    @property
    def Mlp(self) -> Axis:
        """Hidden features of the feed-forward network."""
        return Axis(MLP, self.intermediate_dim)

    def check(self) -> None:
        """Raises `ConfigError` where the numbers cannot make a model."""
        for name in ("seq_len", "hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_divides("model.num_heads", self.num_heads, "model.hidden_dim", self.hidden_dim)
        check_divides("model.num_kv_heads", self.num_kv_heads, "model.num_heads", self.num_heads)
        if self.HeadSize.size % 2:
            raise ConfigError(
                f"model.num_heads: {self.num_heads} heads of model.hidden_dim {self.hidden_dim} have"
                f" {self.HeadSize.size} features each; rotary positions need an even number. Change one of the two"
            )
        if self.sliding_window is not None:
            check_at_least("model.sliding_window", self.sliding_window, 1)
        check_choice("model.activation_function", self.activation_function, ACTIVATIONS)
        for name in ("initializer_range", "layer_norm_epsilon"):
            check_at_least(f"model.{name}", getattr(self, name), 0)
        self.rope.check()

    def build(self, Vocab: Axis, *, key: jax.Array) -> "Llama":
        """A freshly initialised model."""
        return Llama.init(self, Vocab, key=key)

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Floating-point operations of one training token."""
        kv_dim = self.num_kv_heads * self.HeadSize.size
        attention = 2 * self.hidden_dim * (self.hidden_dim + kv_dim)
        mlp = 3 * self.hidden_dim * self.intermediate_dim
        weights = self.num_layers * (attention + mlp) + vocab_size * self.hidden_dim
        return FlopsPerToken.of(
            weights=weights,
            layers=self.num_layers,
            attention_dim=self.hidden_dim,
            seq_len=self.seq_len,
            window=self.sliding_window,
        )


class LlamaBlock(eqx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attn_norm: RMSNorm
    attn: SelfAttention
    mlp_norm: RMSNorm
    mlp: GatedMlp

    @staticmethod
    def init(config: LlamaConfig, *, key: jax.Array) -> "LlamaBlock":
        """A block with N(0, initializer_range) weights."""
        std = config.initializer_range
        Embed, Heads, KVHeads, HeadSize, Mlp = config.Embed, config.Heads, config.KVHeads, config.HeadSize, config.Mlp
        k_q, k_k, k_v, k_o, k_gate, k_up, k_down = jax.random.split(key, 7)
        attn = SelfAttention(
            q_proj=Linear.init(Embed, (Heads, HeadSize), std=std, key=k_q),
            k_proj=Linear.init(Embed, (KVHeads, HeadSize), std=std, key=k_k),
            v_proj=Linear.init(Embed, (KVHeads, HeadSize), std=std, key=k_v),
            o_proj=Linear.init((Heads, HeadSize), Embed, std=std, key=k_o),
            window=config.sliding_window,
        )
        mlp = GatedMlp(
            gate_proj=Linear.init(Embed, Mlp, std=std, key=k_gate),
            up_proj=Linear.init(Embed, Mlp, std=std, key=k_up),
            down_proj=Linear.init(Mlp, Embed, std=std, key=k_down),
            activation=config.activation_function,
        )
        norms = [RMSNorm.init(Embed, config.layer_norm_epsilon) for _ in range(2)]
        return LlamaBlock(norms[0], attn, norms[1], mlp)

    def __call__(
        self, x: NamedArray, context: Context, past: KeysValues | None, *, index: NamedArray, key: jax.Array | None
    ) -> tuple[NamedArray, KeysValues]:
        """{batch, position, embed} to the same, and the layer's keys and values of these positions."""
        del index, key  # every layer is the same, and none drops anything
        out, new = self.attn(self.attn_norm(x), context, past)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), new


class Llama(LanguageModel):
    """A token embedding, the blocks, and a head of its own or the embedding again."""

    tokens: hnn.Embedding
    body: Transformer
    head: Linear | None
    config: LlamaConfig = eqx.field(static=True)

    @staticmethod
    def init(config: LlamaConfig, Vocab: Axis, *, key: jax.Array) -> "Llama":
        """A model with N(0, initializer_range) weights."""
        k_tokens, k_layers, k_head = jax.random.split(key, 3)
        std = config.initializer_range
        body = Transformer(
            hnn.Stacked.init(config.Layers, LlamaBlock)(config, key=jax.random.split(k_layers, config.num_layers)),
            RMSNorm.init(config.Embed, config.layer_norm_epsilon),
            rope=config.rope,
            HeadSize=config.HeadSize,
            scan=config.scan_layers,
            keep=parse_keep(config.gradient_checkpointing),
            attn_backend=config.attn_backend,
        )
        head = None if config.tie_word_embeddings else Linear.init(config.Embed, Vocab, std=std, key=k_head)
        return Llama(embedding(Vocab, config.Embed, std=std, key=k_tokens), body, head, config)

    @property
    def Vocab(self) -> Axis:
        """The vocabulary axis of the head."""
        return self.tokens.Vocab

    @property
    def Pos(self) -> Axis:
        """The position axis at full length."""
        return self.config.Pos

    def hidden(self, inputs: Inputs, *, cache: Cache | None = None, key: jax.Array | None = None) -> Hidden:
        """Everything but the head."""
        return self.body(for_lookup(self.tokens)(inputs.tokens), inputs, cache, key)

    def lm_head(self) -> NamedArray:
        """The head's weight, {vocab, embed}: the token embedding itself where the two are tied."""
        return for_compute(self.tokens if self.head is None else self.head).weight

    def init_cache(self, Batch: Axis, capacity: int, dtype) -> Cache:
        """An empty cache for `capacity` tokens a row."""
        c = self.config
        return empty_cache(c.Layers, Batch, capacity, c.KVHeads, c.HeadSize, dtype)
