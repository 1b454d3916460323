"""A stack of equal layers, run as one loop or unrolled, with one parameter layout for both."""

from typing import Literal, Protocol

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray

from jaxlm.core.sharding import current_layout, current_platform, for_compute
from jaxlm.models.attention import Visibility
from jaxlm.models.base import Cache, Hidden, Inputs
from jaxlm.models.cache import extended, visible_with
from jaxlm.models.layers import Context, KeysValues
from jaxlm.models.norms import LayerNorm, RMSNorm
from jaxlm.models.recompute import Keep, keeping
from jaxlm.models.rotary import RotaryConfig
from jaxlm.models.stack import in_a_loop, scan_layers


class Block(Protocol):
    """One layer of a family."""

    def __call__(
        self, x: NamedArray, context: Context, past: KeysValues | None, *, index: NamedArray, key: jax.Array | None
    ) -> tuple[NamedArray, KeysValues]:
        """{batch, position, embed} to the same, and the layer's keys and values of these positions."""
        ...


class Transformer(eqx.Module):
    """The body of a decoder: layers, then a norm.

    Attributes:
        layers: the blocks, every parameter with the leading axis `layers`.
        final_norm: what the head reads through.
        rope: the rotation of queries and keys, if any, over `head_size` features.
        scan: one compiled layer in a loop, or each layer on its own.
        keep: what each layer keeps for the backward pass.
        attn_backend: what attention runs on.
    """

    layers: hnn.Stacked
    final_norm: LayerNorm | RMSNorm
    rope: RotaryConfig | None = eqx.field(static=True)
    HeadSize: Axis = eqx.field(static=True)
    scan: bool | Literal["auto"] = eqx.field(static=True)
    keep: Keep = eqx.field(static=True)
    attn_backend: str = eqx.field(static=True)

    def __call__(self, x: NamedArray, inputs: Inputs, cache: Cache | None, key: jax.Array | None) -> Hidden:
        """Embedded tokens {batch, position, embed} to normed ones, through all layers."""
        Layers = self.layers.Block
        visibility = Visibility.within(inputs) if cache is None else visible_with(cache, inputs)
        rotation = None if self.rope is None else self.rope.rotation(inputs.positions, self.HeadSize.size)
        context = Context(visibility, rotation, None if cache is None else cache.length, self.attn_backend)

        def layer(x: NamedArray, block: Block, index: NamedArray, past: KeysValues | None, key: jax.Array | None):
            x, new = for_compute(block)(x, context, past, index=index, key=key)
            return hax.auto_sharded(x), None if cache is None else new

        per_layer = (
            self.layers.stacked,
            hax.arange(Layers),
            None if cache is None else KeysValues(cache.keys, cache.values),
            None if key is None else jax.random.split(key, Layers.size),
        )
        layout = current_layout()
        num_devices = 1 if layout is None else layout.mesh.size
        scan, _ = in_a_loop(self.scan, Layers.size, platform=current_platform(), num_devices=num_devices)
        layer = keeping(self.keep, layer, scan=scan)
        x, new = scan_layers(layer, hax.auto_sharded(x), per_layer, Layers, unroll=not scan)
        final = for_compute(self.final_norm)(x)
        return Hidden(final, None if cache is None else extended(cache, visibility, new.keys, new.values))
