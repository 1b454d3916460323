"""What a language model is to the rest of the house."""

import abc
from dataclasses import dataclass

import draccus
import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import EMBED, POSITION, VOCAB
from jaxlm.core.types import Sum


class Inputs(eqx.Module):
    """What a model reads: tokens, where they stand, and which document they belong to. Never a dense mask.

    Attributes:
        tokens: int32 {batch, position}.
        positions: int32 {batch, position}, the position inside the document.
        segment_ids: int32 {batch, position}; tokens attend only within their own number, and 0 is padding.
    """

    tokens: NamedArray
    positions: NamedArray
    segment_ids: NamedArray


class Cache(eqx.Module):
    """Keys and values of everything read so far, for decoding token by token.

    Attributes:
        keys, values: {layers, batch, key_position, kv_heads, head_size}.
        positions, segment_ids: int32 {batch, key_position}; segment 0 marks a slot that holds nothing.
        length: scalar int32, the slots in use (the same for every row: prompts are padded on the left).
    """

    keys: NamedArray
    values: NamedArray
    positions: NamedArray
    segment_ids: NamedArray
    length: jax.Array


class Hidden(eqx.Module):
    """What the body of a model returns.

    Attributes:
        final: {batch, position, embed}, after the last norm: what the head reads.
        cache: the cache with these inputs in it, if one was given.
        aux: auxiliary losses by name (a router's load balance, ...), as sums.
    """

    final: NamedArray
    cache: Cache | None = None
    aux: dict[str, Sum] = eqx.field(default_factory=dict)


class LanguageModel(eqx.Module):
    """Tokens to logits. Abstract; every model is final."""

    @property
    @abc.abstractmethod
    def Vocab(self) -> Axis:
        """The vocabulary axis of the head."""

    @property
    @abc.abstractmethod
    def Pos(self) -> Axis:
        """The position axis at full length: how many tokens of a document the model knows how to read."""

    @abc.abstractmethod
    def hidden(self, inputs: Inputs, *, cache: Cache | None = None, key: jax.Array | None = None) -> Hidden:
        """Everything but the head. `key` is for dropout; None means no dropout."""

    @abc.abstractmethod
    def lm_head(self) -> NamedArray:
        """The head's weight, {vocab, embed}: the token embedding itself where the two are tied."""

    def logits(self, hidden: NamedArray) -> NamedArray:
        """{..., embed} to {..., vocab}."""
        return hax.dot(hidden, self.lm_head(), axis=EMBED)

    @abc.abstractmethod
    def init_cache(self, Batch: Axis, capacity: int, dtype) -> Cache:
        """An empty cache for `capacity` tokens a row."""


@dataclass(frozen=True)
class ModelConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.models"):
    """What all model families share. `type:` in YAML picks the family.

    Attributes:
        seq_len: tokens a training example.
        gradient_checkpointing: recompute each layer's inside in the backward pass instead of keeping its matrix
            products (what is cheaper to compute again than to store is recomputed either way).
        scan_layers: one compiled layer run in a loop (true), or every layer compiled on its own (false). The
            parameters, and so the checkpoints, have the same layout either way.
    """

    seq_len: int = 1024
    gradient_checkpointing: bool = True
    scan_layers: bool = True

    @property
    def Pos(self) -> Axis:
        """The position axis at full length."""
        return Axis(POSITION, self.seq_len)

    @property
    @abc.abstractmethod
    def Embed(self) -> Axis:
        """The residual stream's axis."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `ConfigError` where the numbers cannot make a model (heads that do not divide, ...)."""

    @abc.abstractmethod
    def build(self, Vocab: Axis, *, key: jax.Array) -> LanguageModel:
        """A freshly initialised model. Pure: it can be traced by `jax.eval_shape` or jitted with sharded outputs."""

    @abc.abstractmethod
    def flops_per_token(self, vocab_size: int) -> float:
        """Floating-point operations of one training token (forward and backward), attention counted causally.

        6 x (matmul weights, head included, embedding look-up excluded) + 6 x layers x heads x head_size x seq_len.
        """


def vocab_axis(size: int) -> Axis:
    """The vocabulary axis of `size` tokens."""
    return Axis(VOCAB, size)
