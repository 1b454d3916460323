"""What all layers share in one forward pass, and what some of them give to later ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from haliax import NamedArray

from jaxlm.core.axes import LAYERS
from jaxlm.core.tree import is_named
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.base import Inputs
from jaxlm.models.inference.cache import DecodingCache
from jaxlm.models.mixers.base import LayerCache, Taken
from jaxlm.models.scan import Segment

T = TypeVar("T")


@dataclass(frozen=True)
class ForwardPass:
    """Holds what all layers share in one forward pass.

    Attributes:
        key: for dropout; None means no dropout.
        filled: the cache that the inputs extend; None if there is none, or it is empty.
        stores: whether there is a cache to write, so that layers return their keys and values.
        layer_inputs: {layers, batch, position, layer_input}, what each layer reads of the tokens; None for nothing.
        taken: by name, what later layers take from those that have run.
    """

    inputs: Inputs
    attention_mask: AttentionMask
    key: jax.Array | None
    filled: DecodingCache | None
    stores: bool
    layer_inputs: NamedArray | None = None
    taken: dict[str | None, Taken] = field(default_factory=dict)

    def cached(self, stack: int, start: int, stop: int) -> LayerCache | None:
        """The filled cache of layers `start` to `stop` of a stack; None if there is none."""
        if self.filled is None:
            return None
        return layers_between(self.filled.stacks[stack], start, stop)

    def layer_keys(self, layers: Sequence[int], num_layers: int) -> jax.Array | None:
        """One key per layer, of these layers. They do not depend on how the layers are divided into stacks."""
        if self.key is None:
            return None
        keys = jax.random.split(self.key, num_layers)
        return keys if len(layers) == num_layers else keys[np.asarray(layers)]

    def give(
        self, segment: Segment, out: Mapping[int, Any], layer_numbers: Sequence[Sequence[int]], *, keeps_streams: bool
    ) -> None:
        """Lets later layers take what those of a segment have returned for the cache.

        Args:
            out: for each stack, what its layers in the segment have returned for the cache, and auxiliary outputs; with
                `keeps_streams`, a pair of these two and streams.
            layer_numbers: as of a `Body`.
        """
        for layer in range(segment.start, segment.stop):
            number, kind = segment.pattern[(layer - segment.start) % len(segment.pattern)]
            if kind.gives is None:
                continue
            place, before = (sum(one < end for one in layer_numbers[number]) for end in (layer, segment.start))
            new, _ = out[number][0] if keeps_streams else out[number]
            cached = self.cached(number, place, place + 1)
            self.taken[kind.gives] = Taken(_layer(new, place - before), _layer(cached, 0))


def layers_between(tree: T, start: int, stop: int) -> T:
    """Layers `start` to `stop` of named arrays {layers, ...}."""
    is_whole = lambda leaf: (start, stop) == (0, leaf.axis_size(LAYERS))  # noqa: E731
    return jax.tree.map(lambda leaf: leaf if is_whole(leaf) else leaf[LAYERS, start:stop], tree, is_leaf=is_named)


def _layer(tree: T, place: int) -> T:
    return jax.tree.map(lambda leaf: leaf[LAYERS, place], tree, is_leaf=is_named)
