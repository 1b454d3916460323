"""A model with a recurrent layer before each layer with attention, as small as one can be: sums that decay."""

from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, HEAD_SIZE, HEADS, POSITION, axes_of
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.decoder import gated_mlp, pre_norm_block
from jaxlm.models.flops import MixerWork
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.base import LayerCache, Mixer


class SumCache(LayerCache):
    """float32 {batch, heads, head_size}, and int32 {batch}, the document that it belongs to."""

    total: NamedArray
    segment: NamedArray

    def extended(self, new, start):
        return new

    def flattened(self):
        return self

    def unflattened(self, Batch):
        return self


class DecayingSum(Mixer):
    """total = rate * total + v, from the beginning of each document on."""

    v_proj: Linear
    o_proj: Linear
    rate: NamedArray

    def __call__(self, x, context, cache, *, key=None):
        v = self.v_proj(x).rearrange((POSITION, BATCH, HEADS, HEAD_SIZE))
        segments = context.attention_mask.segment_ids.rearrange((POSITION, BATCH))
        cache = self.init_cache(v.resolve_axis(BATCH), 0, None) if cache is None else cache
        rate = jax.nn.sigmoid(self.rate.array.astype(jnp.float32))[:, None]

        def step(carry, token):
            total, segment = carry
            v_BNH, own_B = token
            new = jnp.where((own_B == segment)[:, None, None], rate * total, 0) + v_BNH
            carry = jnp.where((own_B != 0)[:, None, None], new, total), jnp.where(own_B != 0, own_B, segment)
            return carry, new

        start = cache.total.array, cache.segment.array
        (total, segment), out = jax.lax.scan(step, start, (v.array.astype(jnp.float32), segments.array))
        new = SumCache(NamedArray(total, cache.total.axes), NamedArray(segment, cache.segment.axes))
        return self.o_proj(hax.auto_sharded(NamedArray(out.astype(x.dtype), v.axes))), new

    @property
    def takes_order(self):
        return False

    def work(self, window):
        return MixerWork()

    def init_cache(self, Batch, capacity, dtype):
        axes = (Batch, *axes_of(self.v_proj.Out))
        return SumCache(hax.zeros(axes, dtype=jnp.float32), hax.zeros(Batch, dtype=jnp.int32))


@dataclass(frozen=True)
class RecurrentConfig(LlamaConfig):
    """A Llama in which every other layer is recurrent, beginning with the first one."""

    @property
    def stack_of_layer(self):
        return tuple(layer % 2 for layer in range(self.num_layers))

    def layer_block(self, layer):
        return self.block if layer % 2 else self._recurrent_block

    def _recurrent_block(self, *, key):
        keys = jax.random.split(key, 5)
        Values: tuple[Axis, Axis] = (self.Heads, self.HeadSize)
        layers = (
            Linear.init(self.Embed, Values, std=0.2, key=keys[0]),
            Linear.init(Values, self.Embed, std=0.2, key=keys[1]),
        )
        return pre_norm_block(self, DecayingSum(*layers, hax.zeros(self.Heads)), gated_mlp(self, keys[2:]))
