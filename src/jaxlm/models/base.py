"""What a language model is to the rest of the house."""

import abc
from dataclasses import dataclass
from typing import Any, Literal

import draccus
import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import EMBED, POSITION, VOCAB
from jaxlm.core.types import Sum
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.loss import soft_capped
from jaxlm.models.remat import AUTO, parse_remat


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


class KVArray(eqx.Module):
    """The keys, or the values, in a cache. Head before position, so that a head's keys are one matrix.

    Attributes:
        values: {layers, batch, kv_heads, key_position, head_size}; without `layers` for one layer.
        scale: float32 {layers, batch, kv_heads, key_position}, what int8 entries are multiplied by; None where the
            entries are the keys or values themselves.
    """

    values: NamedArray
    scale: NamedArray | None = None


class KVCache(eqx.Module):
    """Keys and values of everything read so far, for decoding token by token.

    Attributes:
        keys, values: of all layers.
        positions, segment_ids: int32 {batch, key_position}; segment 0 marks a slot that holds nothing.
        length: scalar int32, the slots in use (the same for every row: prompts are padded on the left).
        fresh: nothing has been read yet: what comes first attends to itself alone, as in training.
    """

    keys: KVArray
    values: KVArray
    positions: NamedArray
    segment_ids: NamedArray
    length: jax.Array
    fresh: bool = eqx.field(static=True, default=False)


class AuxLoss(eqx.Module):
    """A number that layers find on their way: logged, and minimised with its coefficient.

    Attributes:
        sum: its weight is the number of tokens that are no padding.
        coefficient: what it is multiplied by in the objective; 0 only logs it.
    """

    sum: Sum
    coefficient: float = eqx.field(static=True)


class Hidden(eqx.Module):
    """What the body of a model returns.

    Attributes:
        final: {batch, position, embed}, after the last norm: what the head reads. Without a head, logits {.., vocab}.
        cache: the cache with these inputs in it, if one was given.
        aux: what else the layers found, by the name that it is logged under (a router's load balance, ...).
    """

    final: NamedArray
    cache: Any = None
    aux: dict[str, AuxLoss] = eqx.field(default_factory=dict)


class LanguageModel(eqx.Module):
    """Tokens to logits. Abstract; every model is final.

    Attributes:
        logit_soft_cap: what the family's logits stay below, for those that have a soft cap (`kernels.soft_capped`).
        notes: what is to be said of it at the start.
    """

    logit_soft_cap: float | None = eqx.field(static=True, default=None, kw_only=True)
    notes: tuple[str, ...] = eqx.field(static=True, default=(), kw_only=True)

    @property
    @abc.abstractmethod
    def Vocab(self) -> Axis:
        """The vocabulary axis of the head."""

    @property
    @abc.abstractmethod
    def Pos(self) -> Axis:
        """The position axis at full length: how many tokens of a document the model knows how to read."""

    @abc.abstractmethod
    def hidden(self, inputs: Inputs, *, cache: Any = None, key: jax.Array | None = None) -> Hidden:
        """Everything but the head. `cache` is of `init_cache`; `key` is for dropout, and None means no dropout."""

    @abc.abstractmethod
    def lm_head(self) -> NamedArray | None:
        """The head's weight, {vocab, embed}: the token embedding itself where the two are tied.

        None where `hidden` returns logits already.
        """

    def logits(self, hidden: NamedArray) -> NamedArray:
        """{..., embed} to {..., vocab}, below the soft cap."""
        head = self.lm_head()
        logits = hidden if head is None else hax.dot(hidden, head, axis=EMBED)
        return NamedArray(soft_capped(logits.array, self.logit_soft_cap), logits.axes)

    @abc.abstractmethod
    def init_cache(self, Batch: Axis, capacity: int, dtype) -> Any:
        """What the model keeps while it writes up to `capacity` tokens a row: usually a `KVCache`. Nothing is in it yet.

        Args:
            dtype: of its numbers; int8 keeps a scale for each head of each token beside them.
        """


# How checkpoints that were saved before these backends were renamed spell them.
_FORMER_BACKENDS = {"blocks": "blockwise", "plain": "reference"}


@dataclass(frozen=True)
class ModelConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.models.families"):
    """What all model families share. `type:` in YAML picks the family.

    Attributes:
        seq_len: tokens a training example.
        gradient_checkpointing: what the backward pass computes again instead of finding it: `none`, `cheap` (or false:
            norms and activations, but no matrix product), `full` (or true: all but each layer's input), a list of
            what to keep (query, key, value, attention, mlp, expert), or `auto`: the least that fits into memory.
        scan_layers: one compiled layer run in a loop (true), every layer compiled on its own (false), or `auto`. The
            parameters, and so the checkpoints, have the same layout either way.
        attn_backend: what attention runs on: `auto` takes the best that can do it here, and says which and why.
    """

    seq_len: int = 1024
    gradient_checkpointing: bool | str | list[str] = AUTO
    scan_layers: bool | Literal["auto"] = AUTO
    attn_backend: str = AUTO

    def __post_init__(self):
        if isinstance(self.gradient_checkpointing, list):  # a model carries its configuration: it must be hashable
            object.__setattr__(self, "gradient_checkpointing", tuple(self.gradient_checkpointing))
        parse_remat(self.gradient_checkpointing)
        object.__setattr__(self, "attn_backend", _FORMER_BACKENDS.get(self.attn_backend, self.attn_backend))

    @property
    def Pos(self) -> Axis:
        """The position axis at full length."""
        return Axis(POSITION, self.seq_len)

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `ConfigError` where the numbers cannot make a model (heads that do not divide, ...)."""

    @abc.abstractmethod
    def build(self, Vocab: Axis, *, key: jax.Array) -> LanguageModel:
        """A freshly initialised model. Pure: it can be traced by `jax.eval_shape` or jitted with sharded outputs."""

    @abc.abstractmethod
    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Floating-point operations of one training token."""


def vocab_axis(size: int) -> Axis:
    """The vocabulary axis of `size` tokens."""
    return Axis(VOCAB, size)
