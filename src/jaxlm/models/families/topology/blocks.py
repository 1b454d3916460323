"""One layer of a body: what a topology has from one attention to the next."""

from dataclasses import dataclass
from typing import Any, Union

import equinox as eqx
import jax
from haliax import NamedArray

from jaxlm.models.families.topology.layers import Dropout, Projection
from jaxlm.models.layers import Attention, ForCache, GatedMlp, LayerCache, LayerContext, Mlp
from jaxlm.models.moe import Experts, RouterStats
from jaxlm.models.norms import Norm

Part = Union["Residual", Attention, Norm, Projection, Mlp, GatedMlp, Experts, Dropout]


class Residual(eqx.Module):
    """x + f(x).

    Attributes:
        parts: name -> part of f.
        order: the names, from first to last.
    """

    parts: dict[str, Part]
    order: tuple[str, ...] = eqx.field(static=True)


class TopologyBlock(eqx.Module):
    """Parts that run one after the other. At most one of them is, or contains, attention, and one experts.

    Attributes:
        parts: name -> part.
        order: the names, from first to last.
    """

    parts: dict[str, Part]
    order: tuple[str, ...] = eqx.field(static=True)

    def __call__(
        self, x: NamedArray, context: LayerContext, layer_cache: LayerCache | None, *, key: jax.Array | None, **_: Any
    ) -> tuple[NamedArray, ForCache, RouterStats | None]:
        run = _Run(context, layer_cache, key)
        out = run.sequence(self, x).rearrange(x.axes)
        assert run.new is not None, "every block has attention"
        return out, run.new, run.stats


@dataclass
class _Run:
    """A pass through one block, with what its attention and its experts return besides their output."""

    context: LayerContext
    layer_cache: LayerCache | None
    key: jax.Array | None
    new: ForCache | None = None
    stats: RouterStats | None = None
    num_keys: int = 0

    def sequence(self, whole: Residual | TopologyBlock, x: NamedArray) -> NamedArray:
        for name in whole.order:
            x = self._part(whole.parts[name], x)
        return x

    def _part(self, part: Any, x: NamedArray) -> NamedArray:
        match part:
            case Residual():
                return x + self.sequence(part, x)
            case Attention():
                out, self.new = part(x, self.context, self.layer_cache, key=self._next_key())
                return out
            case Experts():
                out, self.stats = part(x, self.context.attention_mask.segment_ids)
                return out
            case Dropout():
                return part(x, self._next_key())
            case _:
                return part(x)

    def _next_key(self) -> jax.Array | None:
        """A key for each part that has dropout."""
        self.num_keys += 1
        return None if self.key is None else jax.random.fold_in(self.key, self.num_keys)
