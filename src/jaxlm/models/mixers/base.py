"""The interface of mixers: what a layer does over positions, and what it keeps of earlier tokens for decoding.

Attention is one mixer. A block calls its mixer `attn`, and the mixer its last projection `o_proj`.
"""

import abc
import math
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, HEAD_SIZE, KEY_POSITION
from jaxlm.core.tree import is_named
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.attention.choose import AUTO
from jaxlm.models.flops import MixerWork
from jaxlm.models.rope import Rotation

ForCache = Any
"""What a mixer returns for the cache: named arrays that `LayerCache.extended` takes, or its cache extended by them."""


class Taken(eqx.Module):
    """What a layer takes from an earlier one, in place of keys and values of its own.

    Attributes:
        new: what that one's mixer has returned for the cache, of the new tokens.
        cache: its `LayerCache`; None if there are no earlier tokens. Slots that the mask hides may have the new ones.
    """

    new: ForCache
    cache: Any


class LayerContext(eqx.Module):
    """Inputs of a layer besides the residual stream. All layers of one kind share all but `taken` and `layer_input`.

    Attributes:
        attention_mask: which tokens attend to which.
        rotation: the rotation of queries and keys; None for none.
        window: number of tokens that each token attends to, including itself; None means all previous tokens.
        attn_backend: backend of attention, or `auto`.
        order: the tokens' indices in the text (`jaxlm.core.values.permutation`); None for text order.
        start: the slot of the cache from which a layer itself writes its new tokens, before it reads the cache (XLA then
            updates in place). None if the caller writes those of all layers at once, after the last layer.
        query_scale: factor of the queries, {batch, position}; None for none.
        score_factor: of the scores of latent attention, besides that of the head size.
        taken: what it takes from an earlier layer; None for nothing, or if that layer has not run.
        layer_input: {batch, position, layer_input}, what only this layer reads of the tokens; None for nothing.
    """

    attention_mask: AttentionMask
    rotation: Rotation | None
    window: int | None = eqx.field(static=True)
    attn_backend: str = eqx.field(static=True, default=AUTO)
    order: NamedArray | None = None
    start: jax.Array | None = None
    query_scale: NamedArray | None = None
    score_factor: float = eqx.field(static=True, default=1.0)
    taken: Taken | None = None
    layer_input: NamedArray | None = None


class LayerCache(eqx.Module):
    """What one layer keeps of earlier tokens; with an axis `layers` in every array, what the layers of a stack keep.

    All leaves are named arrays with an axis `batch`. Those with an axis `key_position` have a slot for each token. The others
    are a state after the last token. An empty cache is zero everywhere.
    """

    @abc.abstractmethod
    def extended(self, new: Any, start: jax.Array | None) -> "LayerCache":
        """The cache after new tokens.

        Args:
            new: what the mixer has returned for them; with an axis `layers` if the cache has it.
            start: the first empty slot; None if all are, which is known when the program is traced.
        """

    @abc.abstractmethod
    def flattened(self) -> "LayerCache":
        """The form in which unstacked layers read it on a CPU. It may have no axis `batch`."""

    @abc.abstractmethod
    def unflattened(self, Batch: Axis) -> "LayerCache":
        """The inverse of `flattened`."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a slot of a row, of all its layers."""
        return sum(
            _num_bytes(leaf) // math.prod(leaf.axis_size(name) for name in (BATCH, KEY_POSITION))
            for leaf in self._leaves
            if leaf.has_axis(KEY_POSITION)
        )

    @property
    def bytes_per_row(self) -> int:
        """Bytes of the state of a row, of all its layers."""
        return sum(
            _num_bytes(leaf) // leaf.axis_size(BATCH) for leaf in self._leaves if not leaf.has_axis(KEY_POSITION)
        )

    @property
    def _leaves(self) -> list[NamedArray]:
        return jax.tree.leaves(self, is_leaf=is_named)


class NoCache(LayerCache):
    """The cache of a layer that reads another layer's: slots with nothing in them.

    Attributes:
        slots: {batch, key_position, head_size} without features.
    """

    slots: NamedArray

    @staticmethod
    def empty(Batch: Axis, capacity: int) -> "NoCache":
        return NoCache(hax.zeros((Batch, Axis(KEY_POSITION, capacity), Axis(HEAD_SIZE, 0))))

    def extended(self, new: None, start: jax.Array | None) -> "NoCache":
        return self

    def flattened(self) -> "NoCache":
        return self

    def unflattened(self, Batch: Axis) -> "NoCache":
        return self


def _num_bytes(leaf: NamedArray) -> int:
    return math.prod(axis.size for axis in leaf.axes) * leaf.dtype.itemsize


class Mixer(eqx.Module):
    """What a layer does over positions, such as attention. Its last projection is `o_proj`."""

    @abc.abstractmethod
    def __call__(
        self, x: NamedArray, context: LayerContext, cache: Any, *, key: jax.Array | None = None
    ) -> tuple[NamedArray, ForCache]:
        """Maps {batch, position, embed} to the same shape; also returns what the cache keeps of these tokens.

        Tokens of segment 0 are padding, in front of the others as well as behind them: they change nothing.

        Args:
            cache: the layer's `LayerCache`; None if there are no earlier tokens. Unless `context.start` is None, the mixer
                returns the extended cache.
            key: for dropout; None means no dropout.
        """

    @abc.abstractmethod
    def init_cache(self, Batch: Axis, capacity: int, dtype: Any) -> LayerCache:
        """The empty cache of one layer, with `capacity` slots per row.

        Args:
            dtype: dtype of keys and values. int8 adds a quantization scale per head and token.
        """

    @property
    @abc.abstractmethod
    def takes_order(self) -> bool:
        """Tells whether tokens may be in another order than the text, which `LayerContext.order` says."""

    @abc.abstractmethod
    def work(self, window: int | None) -> MixerWork:
        """What it computes of a token. Args: window: as in `LayerContext`."""
