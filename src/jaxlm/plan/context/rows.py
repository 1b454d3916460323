"""The rows that a run reads, and the attention that its models compute of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import HEADS, KV_HEADS, axes_of
from jaxlm.core.sharding import AttentionWork, Layout
from jaxlm.data.config import DataConfig
from jaxlm.engine.entry import StateBuilder
from jaxlm.models.base import LanguageModel
from jaxlm.models.layers import Attention
from jaxlm.models.linear import Linear
from jaxlm.models.stacks import HeterogeneousBody, Stack
from jaxlm.reading.decode import choice_name


@dataclass(frozen=True)
class Rows:
    """The rows that a run reads, and the attention that its models compute of them.

    Attributes:
        seq_lens: tokens of a row, in each phase.
        heads, kv_heads: the greatest numbers that divide those of all layers; 0 if the model computes attention by itself.
        kv_features: numbers in a token's keys and values, of the layer that has the most.
        work: the attention of all layers.
        is_packed: whether a row may have several documents.
        fixed_order: why tokens have to be in the order of the text; None if they need not.
    """

    seq_lens: tuple[int, ...]
    heads: int
    kv_heads: int
    kv_features: float
    work: AttentionWork = field(default_factory=AttentionWork)
    is_packed: bool = False
    fixed_order: str | None = None

    @staticmethod
    def of(state_builder: StateBuilder, data: Sequence[DataConfig]) -> "Rows":
        """The rows that the phases read. Args: data: section of each phase."""
        models = [state_builder.abstract_state(phase).model for phase in state_builder.phases]
        seq_lens = [phase.model.seq_len for phase in state_builder.phases]
        layers = [layer for model in models for layer in attention_sizes(model)]
        windows: dict[int | None, int] = {}
        for kind in (kind for model in models for kind in _kinds(model)):
            windows[kind.window] = windows.get(kind.window, 0) + 1
        unordered = [
            f"the batches of data.type: {choice_name(type(section))} have no column `order`"
            for section, seq_len in zip(data, seq_lens, strict=True)
            if not section.batch_spec(seq_len).takes_order
        ]
        opaque = [
            f"a model of type {type(model).__name__} computes attention by the index of each token in its row"
            for model in models
            if not attention_sizes(model)
        ]
        return Rows(
            seq_lens=tuple(dict.fromkeys(seq_lens)),
            heads=0 if opaque else math.gcd(*(layer.heads for layer in layers)),
            kv_heads=0 if opaque else math.gcd(*(layer.kv_heads for layer in layers)),
            kv_features=max((layer.kv_features for layer in layers), default=0),
            work=AttentionWork(tuple(windows.items()) or ((None, 1),), all(model.is_causal for model in models)),
            is_packed=any(section.packs_documents for section in data),
            fixed_order=next(iter([*opaque, *unordered]), None),
        )

    def on_device(self, layout: Layout) -> "Rows":
        """The rows with the heads that tensor parallelism leaves on a device. Where it divides only the query heads, each of
        them gets a copy of its key and value."""
        if not self.heads:
            return self
        num_shards = layout.num_shards(HEADS)
        heads = self.heads // num_shards
        kv_heads = self.kv_heads // num_shards if layout.num_shards(KV_HEADS) == num_shards else heads
        return replace(self, heads=heads, kv_heads=kv_heads, kv_features=self.kv_features * kv_heads / self.kv_heads)


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer's attention. Attributes: kv_features: numbers in a token's keys and values."""

    heads: int
    kv_heads: int
    kv_features: int


def attention_sizes(model: LanguageModel) -> list[LayerSizes]:
    """The sizes of the attention of a model's layers, each once; none if it computes attention by itself."""
    sizes_by_layer = {}
    for layer in tree.modules(model, Attention):
        # Of the axes, not of the weights: an adapted layer computes its weight.
        axes = [axis for one in tree.modules(layer, Linear) for spec in (one.Out, one.In) for axis in axes_of(spec)]
        sizes = {axis.name: axis.size for axis in axes}
        task = layer.task("cpu", None, np.dtype(np.float32), model.Pos.size, None)
        kv_heads = sizes.get(KV_HEADS, sizes[HEADS])
        value_size = task.head_size if task.value_size is None else task.value_size
        sizes_by_layer[LayerSizes(sizes[HEADS], kv_heads, kv_heads * (task.head_size + value_size))] = None
    return list(sizes_by_layer)


def _kinds(model: LanguageModel) -> list[Any]:
    stacks = tree.modules(model, Stack)
    return [
        *(kind for stack in stacks for kind in stack.kinds_between(0, stack.Layers.size)),
        *(kind for body in tree.modules(model, HeterogeneousBody) for kind in body.kinds),
    ]
