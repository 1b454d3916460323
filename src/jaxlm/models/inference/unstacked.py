"""Layers apart: the form in which one device writes text.

Whatever reads a part of an array makes XLA on CPUs copy that part first. Over stacked layers this is every weight, and
every slot of the cache, once more for each token, which takes longer than reading them. An array of its own for each layer
is read where it lies, and written in place.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, CACHE_ROW, KV_HEADS, LAYERS
from jaxlm.core.sharding import current_layout, current_platform
from jaxlm.models.attention.choose import AUTO
from jaxlm.models.base import Hidden, Inputs, KVArray, KVCache, LanguageModel
from jaxlm.models.inference.kv_cache import UnstackedCache, by_cache_row, mask_with, slots_with
from jaxlm.models.layers import LayerCache
from jaxlm.models.linear import Linear, MatrixLinear
from jaxlm.models.norms import LayerNorm, RMSNorm
from jaxlm.models.stacks import Block, LayerKind, Transformer, layer_contexts

T = TypeVar("T")


class UnstackedTransformer(eqx.Module):
    """A `Transformer` that continues what a cache holds, and does nothing else. Its fields are those of the other."""

    layers: tuple[Block, ...]
    final_norm: LayerNorm | RMSNorm
    kinds: tuple[LayerKind, ...] = eqx.field(static=True)
    HeadSize: Axis = eqx.field(static=True)
    seq_len: int = eqx.field(static=True)

    def __call__(self, x: NamedArray, inputs: Inputs, cache: UnstackedCache, key: None) -> Hidden:
        """Embedded tokens {batch, position, embed} to normed ones; each layer writes to the cache before it reads."""
        contexts = layer_contexts(self.kinds, inputs, mask_with(cache, inputs), AUTO, self.HeadSize, self.seq_len)
        written = []
        for number, block in enumerate(self.layers):
            past = LayerCache(cache.keys[number], cache.values[number], cache.length)
            x, past, _ = block(x, contexts[number % len(contexts)], past, index=hax.named(number, ()), key=key)
            written.append(past)
        columns = (tuple(past.keys for past in written), tuple(past.values for past in written))
        return Hidden(self.final_norm(x), UnstackedCache(*columns, *slots_with(cache, inputs)))


def prefers_unstacked() -> bool:
    """Whether the current devices write faster so. On a mesh layers are gathered one by one, in a loop."""
    layout = current_layout()
    return current_platform() == "cpu" and (layout is None or layout.mesh.size == 1)


@dataclass(frozen=True)
class Generator:
    """A model and what it needs to write, which is made once for all of its texts.

    Attributes:
        model: reads prompts.
        stepping: goes on behind them token by token: the model itself, or a copy of it with its layers apart.
    """

    model: LanguageModel
    step_model: Any

    @staticmethod
    def of(model: LanguageModel) -> "Generator":
        """Of a model on the current devices. Call it inside `layout.use()`, where there is a layout."""
        return Generator(model, _unstacked_copy(model) if prefers_unstacked() else model)

    def in_step_layout(self, cache: T) -> T:
        """Whatever holds a cache that the model has written, as `stepping` reads it."""
        return cache if self.step_model is self.model else _unstacked_copy(cache)


def unstack(tree: T) -> T:
    """A copy with the layers of every `Transformer` and `KVCache` in arrays of their own."""
    return jax.tree.map(_unstack_node, tree, is_leaf=lambda node: isinstance(node, Transformer | KVCache))


_unstacked_copy = jax.jit(unstack)


def stack(cache: UnstackedCache) -> KVCache:
    """What `unstack` was given: a copy, for what reads many tokens at once."""
    Batch = cache.positions.resolve_axis(BATCH)

    def joined(*layers: NamedArray) -> NamedArray:
        behind = tuple(axis for axis in layers[0].axes if axis.name != CACHE_ROW)
        array = jnp.stack([layer.array for layer in layers])
        array = array.reshape(len(layers), Batch.size, -1, *(axis.size for axis in behind))
        return NamedArray(array, (Axis(LAYERS, len(layers)), Batch, Axis(KV_HEADS, array.shape[2]), *behind))

    keys, values = (
        jax.tree.map(joined, *columns, is_leaf=lambda x: isinstance(x, NamedArray))
        for columns in (cache.keys, cache.values)
    )
    return KVCache(keys, values, cache.positions, cache.segment_ids, cache.length)


def _unstack_node(node: Any) -> Any:
    if isinstance(node, Transformer):
        blocks = jax.tree.map(_as_matrix, tuple(node.layers.unstacked()), is_leaf=lambda x: isinstance(x, Linear))
        return UnstackedTransformer(blocks, node.final_norm, node.kinds, node.HeadSize, node.seq_len)
    if isinstance(node, KVCache):
        columns = (_columns(node.keys), _columns(node.values))
        return UnstackedCache(*columns, node.positions, node.segment_ids, node.length)
    return node


def _as_matrix(part: Any) -> Any:
    return MatrixLinear.of(part) if isinstance(part, Linear) else part


def _columns(stacked: KVArray) -> tuple[KVArray, ...]:
    flat = jax.tree.map(by_cache_row, stacked, is_leaf=lambda x: isinstance(x, NamedArray))
    layers = range(stacked.values.axis_size(LAYERS))
    return tuple(
        jax.tree.map(lambda x, i=i: x[LAYERS, i], flat, is_leaf=lambda x: isinstance(x, NamedArray)) for i in layers
    )
