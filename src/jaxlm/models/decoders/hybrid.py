"""Base config of hybrid families: most layers are Gated DeltaNet, and a few attend to all earlier tokens."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis

from jaxlm.core.axes import CONV_TAPS, HEAD_SIZE, STATE_GROUP, STATE_HEADS, STATE_KEY
from jaxlm.core.errors import check_divides
from jaxlm.core.field_types import FilterSize, NonNegativeInt, PositiveInt
from jaxlm.models.decoder import DecoderConfig, check_sizes, renumbered
from jaxlm.models.decoders.pre_norm import check_one_of_layers
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.gated_delta_net import GatedDeltaNet
from jaxlm.models.norms import RMSNorm
from jaxlm.models.rope import RotaryConfig, check_rope
from jaxlm.models.stacks import Block, LayerKind


@dataclass(frozen=True)
class HybridConfig(DecoderConfig):
    """A family with layers of Gated DeltaNet (recurrent layers) and of attention.

    Attributes:
        rope: rotary position embedding of queries and keys in attention layers.
        attention_interval: layers are grouped by this number; the last of each group has attention, the others are recurrent.
            Null if `attention_layers` is set.
        attention_layers: numbers of the layers with attention, counted from 0, instead of `attention_interval`.
        num_state_heads: heads of queries and keys in recurrent layers.
        num_value_heads: heads of values there, each with a state; a multiple of `num_state_heads`.
        state_key_dim, state_value_dim: features of a key and of a value there.
        conv_size: tokens that the short convolution there reads: the token itself and those before it.
    """

    rope: RotaryConfig | None = None
    attention_interval: PositiveInt | None = 4
    attention_layers: list[NonNegativeInt] | None = None
    num_state_heads: PositiveInt = 16
    num_value_heads: PositiveInt = 16
    state_key_dim: PositiveInt = 128
    state_value_dim: PositiveInt = 128
    conv_size: FilterSize = 4

    @abc.abstractmethod
    def recurrent_block(self, *, key: jax.Array) -> Block:
        """Initializes one recurrent layer. `block` initializes one with attention."""

    @property
    def with_attention(self) -> tuple[int, ...]:
        """The numbers of the layers with attention."""
        if self.attention_layers is not None:
            return tuple(sorted(self.attention_layers))
        assert self.attention_interval is not None, "`check` has refused this"
        return tuple(range(self.attention_interval - 1, self.num_layers, self.attention_interval))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(LayerKind(self.rope if layer in self.with_attention else None) for layer in range(self.num_layers))

    @property
    def stack_of_layer(self) -> tuple[int, ...]:
        attends = [layer in self.with_attention for layer in range(self.num_layers)]
        return tuple(int(one != attends[0]) for one in attends)

    def layer_block(self, layer: int) -> Callable[..., Block]:
        return self.block if layer in self.with_attention else self.recurrent_block

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        """The interval if the layers still follow it, their numbers otherwise."""
        every, left = self.attention_interval, renumbered(self.with_attention, kept)
        if every is not None and left == tuple(range(every - 1, len(kept), every)):
            return {}
        return {"attention_interval": None, "attention_layers": list(left)}

    def check(self) -> None:
        check_sizes(self)
        check_divides("model.num_state_heads", self.num_state_heads, "model.num_value_heads", self.num_value_heads)
        check_one_of_layers(self, "attention_interval", "attention_layers")
        if self.rope is not None:
            check_rope(self.rope, self.num_heads, self.HeadSize.size)


def gated_delta_net(config: HybridConfig, key: jax.Array, *, norm_eps: float, **options: Any) -> GatedDeltaNet:
    """Initializes the mixer of a recurrent layer.

    The rates of decay are uniform between 0.01 and 16, and filters as those of PyTorch's `Conv1d`.

    Args:
        norm_eps: of the norm over each value head.
        options: fields of `GatedDeltaNet` with other values.
    """
    keys = jax.random.split(key, 11)
    Heads, Group = (
        Axis(STATE_HEADS, config.num_state_heads),
        Axis(STATE_GROUP, config.num_value_heads // config.num_state_heads),
    )
    Keys, Values = (
        (Heads, Axis(STATE_KEY, config.state_key_dim)),
        (Heads, Group, Axis(HEAD_SIZE, config.state_value_dim)),
    )
    outputs = {"q_proj": Keys, "k_proj": Keys, "v_proj": Values, "gate_proj": Values, "decay_proj": (Heads, Group)}
    outputs["beta_proj"] = (Heads, Group)
    std, bound = config.initializer_range, config.conv_size**-0.5
    layers = {
        name: Linear.init(config.Embed, Out, std=std, key=one)
        for (name, Out), one in zip(outputs.items(), keys, strict=False)
    }
    Taps = Axis(CONV_TAPS, config.conv_size)
    convs = {
        f"{name}_conv": hax.random.uniform(one, (*axes, Taps), minval=-bound, maxval=bound)
        for name, axes, one in zip("qkv", (Keys, Keys, Values), keys[6:], strict=False)
    }
    rates = hax.random.uniform(keys[9], (Heads, Group), minval=0.01, maxval=16.0)
    given = {
        "o_proj": Linear.init(Values, config.Embed, std=std, key=keys[10]),
        "A_log": hax.log(rates),
        "dt_bias": hax.ones((Heads, Group), jnp.float32),
        "norm": RMSNorm.init(Values[-1], norm_eps),
        **options,
    }
    return GatedDeltaNet(**layers, **convs, **given)
