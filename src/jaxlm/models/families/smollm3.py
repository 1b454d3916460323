"""SmolLM3: Llama's blocks, with a rotary position embedding in three of four layers.

Source: Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"; layers without one: Yang et al. 2025
(arXiv:2501.18795).
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, NonNegativeInt, NumLayers, PositiveInt
from jaxlm.core.rules import Rules, needs
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import renumbered
from jaxlm.models.decoders.pre_norm import BiasedConfig, check_layer_numbers, check_pre_norm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice


@choice(ModelConfig, "smollm3")
class SmolLm3Config(BiasedConfig):
    """SmolLM3. The defaults are SmolLM3 3B with half its context length.

    Attributes:
        no_rope_layer_interval: layers are grouped by this number; the last of each group has no rotary position
            embedding. `rope` applies to the others. Null if `unrotated_layers` is set.
        unrotated_layers: numbers of the layers without rotary position embedding, counted from 0, instead of
            `no_rope_layer_interval`.
        sliding_window: number of tokens that each token attends to, including itself, in local layers. Null means all
            previous tokens.
        local_layers: numbers of the local layers, counted from 0. Null means the layers without rotary position embedding.
    """

    seq_len: PositiveInt = 32768
    hidden_dim: PositiveInt = 2048
    num_layers: NumLayers = 36
    num_heads: PositiveInt = 16
    num_kv_heads: PositiveInt | None = 4
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=5e6))
    no_rope_layer_interval: PositiveInt | None = 4
    unrotated_layers: list[NonNegativeInt] | None = None
    sliding_window: PositiveInt | None = None
    local_layers: list[NonNegativeInt] | None = None
    key_rules: ClassVar[Rules] = (needs("sliding_window", when="local_layers"),)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        unrotated = self._unrotated
        local = unrotated if self.local_layers is None else self.local_layers
        return tuple(
            LayerKind(None if layer in unrotated else self.rope, self.sliding_window if layer in local else None)
            for layer in range(self.num_layers)
        )

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        local = {} if self.local_layers is None else {"local_layers": list(renumbered(self.local_layers, kept))}
        unrotated = renumbered(self._unrotated, kept)
        every = self.no_rope_layer_interval
        if every is not None and unrotated == tuple(range(every - 1, len(kept), every)):
            return local
        return local | {"no_rope_layer_interval": None, "unrotated_layers": list(unrotated)}

    @property
    def _unrotated(self) -> Sequence[int]:
        every = self.no_rope_layer_interval
        return self.unrotated_layers or () if every is None else range(every - 1, self.num_layers, every)

    def check(self) -> None:
        check_pre_norm(self)
        check_layer_numbers("model.local_layers", self.local_layers or (), self.num_layers)
        interval, layers = self.no_rope_layer_interval, self.unrotated_layers
        if (interval is None) == (layers is None):
            raise ConfigError(
                f"model.no_rope_layer_interval: {'null' if interval is None else interval} given, and unrotated_layers:"
                f" {'null' if layers is None else list(layers)}. Set one of the two, and the other to null"
            )
        check_layer_numbers("model.unrotated_layers", layers or (), self.num_layers)
