"""A stack of equal layers, run as one loop or unrolled, with one parameter layout for both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray

from jaxlm.core.sharding import current_layout, current_platform, for_compute
from jaxlm.models.attention import Visibility
from jaxlm.models.backends.choice import AUTO
from jaxlm.models.base import Auxiliary, Cache, Hidden, Inputs
from jaxlm.models.cache import extended, visible_with
from jaxlm.models.dropping import with_keys
from jaxlm.models.layers import Context, ForCache, Past
from jaxlm.models.norms import LayerNorm, RMSNorm
from jaxlm.models.recompute import Keep, keeping
from jaxlm.models.rotary import RotaryConfig
from jaxlm.models.stack import in_a_loop, scan_layers


class Seen(Protocol):
    """What a layer found on its way, as named arrays."""

    def auxiliaries(self) -> dict[str, Auxiliary]:
        """Of all layers, whose arrays are stacked."""
        ...


class Block(Protocol):
    """One layer of a family."""

    def __call__(
        self, x: NamedArray, context: Context, past: Past | None, *, index: NamedArray, key: jax.Array | None
    ) -> tuple[NamedArray, ForCache, Seen | None]:
        """{batch, position, embed} to the same, what the cache is to have of these positions, and what it found."""
        ...


@dataclass(frozen=True)
class LayerKind:
    """How a layer differs from others of the same shape.

    Attributes:
        rope: the rotation of queries and keys, if any.
        window: how many tokens a token sees, itself included; None means all before it.
    """

    rope: RotaryConfig | None = None
    window: int | None = None


def shortest_period(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The beginning of `kinds` that they repeat, the last time perhaps in part."""
    return next(
        tuple(kinds[:period])
        for period in range(1, len(kinds) + 1)
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds))
    )


def contexts_of(
    kinds: Sequence[LayerKind], inputs: Inputs, visibility: Visibility, backend: str, HeadSize: Axis, seq_len: int
) -> list[Context]:
    """What the layers of each kind share in one forward pass."""
    rotations = {
        rope: None if rope is None else rope.rotation(inputs.positions, HeadSize.size, seq_len)
        for rope in dict.fromkeys(kind.rope for kind in kinds)
    }
    return [Context(visibility, rotations[kind.rope], kind.window, backend) for kind in kinds]


class Transformer(eqx.Module):
    """The body of a decoder: layers, then a norm.

    Attributes:
        layers: the blocks, every parameter with the leading axis `layers`.
        final_norm: what the head reads through.
        kinds: what each layer is; they repeat after the last.
        HeadSize: features of a head, which are rotated.
        seq_len: the length that the model is for.
        scan: one compiled layer in a loop, or each layer on its own.
        keep: what each layer keeps for the backward pass.
        attn_backend: what attention runs on.
    """

    layers: hnn.Stacked
    final_norm: LayerNorm | RMSNorm
    kinds: tuple[LayerKind, ...] = eqx.field(static=True)
    HeadSize: Axis = eqx.field(static=True)
    seq_len: int = eqx.field(static=True)
    scan: bool | Literal["auto"] = eqx.field(static=True)
    keep: Keep = eqx.field(static=True)
    attn_backend: str = eqx.field(static=True)

    def __call__(self, x: NamedArray, inputs: Inputs, cache: Cache | None, key: jax.Array | None) -> Hidden:
        """Embedded tokens {batch, position, embed} to normed ones, through all layers."""
        Layers = self.layers.Block
        past = None if cache is None or cache.fresh else cache
        visibility = Visibility.within(inputs) if past is None else visible_with(past, inputs)
        backend = self.attn_backend if cache is None else AUTO  # a prompt has any length
        contexts = contexts_of(self.kinds, inputs, visibility, backend, self.HeadSize, self.seq_len)

        def layer(place: int, x: NamedArray, block: Block, index: NamedArray, past: Past | None, key):
            x, new, seen = with_keys(for_compute(block), key)(x, contexts[place], past, index=index, key=key)
            return hax.auto_sharded(x), (None if cache is None else new, seen)

        per_layer = (
            self.layers.stacked,
            hax.arange(Layers),
            None if past is None else Past(past.keys, past.values),
            None if key is None else jax.random.split(key, Layers.size),
        )
        layout = current_layout()
        num_devices = 1 if layout is None else layout.mesh.size
        scan, _ = in_a_loop(self.scan, Layers.size, platform=current_platform(), num_devices=num_devices)
        layer = keeping(self.keep, layer, scan=scan)
        x, out = scan_layers(layer, hax.auto_sharded(x), per_layer, Layers, unroll=not scan, period=len(self.kinds))
        new, seen = out
        final = for_compute(self.final_norm)(x)
        longer = None if cache is None else extended(cache, inputs, new.keys, new.values)
        return Hidden(final, longer, {} if seen is None else seen.auxiliaries())
