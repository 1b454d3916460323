"""SmolLM3: Llama's blocks, with a rotary position embedding in three of four layers.

Source: Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"; layers without one: Yang et al. 2025
(arXiv:2501.18795).
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, NonNegativeInt, NumLayers, PositiveInt
from jaxlm.core.rules import Rules, needs
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey, Json, KeyGroup
from jaxlm.interop.hf.shared_keys import check_has_window, layer_types, local_layers, rope, same_keys, usual_keys
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import renumbered
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import PreNormConfig, check_layer_numbers, check_pre_norm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice


@choice(ModelConfig, "smollm3")
class SmolLm3Config(LlamaBlocks, PreNormConfig):
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
    attention_bias: bool = False
    mlp_bias: bool = False
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


_EVERY = 4


def _rotated(num_layers: int, every: int) -> list[int]:
    """1 for layers with a rotary embedding, 0 for those without."""
    return [int((i + 1) % every != 0) for i in range(num_layers)]


def _layers_to_ours(theirs: Mapping[str, Any]) -> Json:
    num_layers, every = theirs["num_hidden_layers"], theirs.get("no_rope_layer_interval", _EVERY)
    no_rope_layers = theirs.get("no_rope_layers")
    rotated = _rotated(num_layers, every) if no_rope_layers is None else no_rope_layers
    if len(rotated) != num_layers or not set(rotated) <= {0, 1}:
        raise ConfigError(f"no_rope_layers: {rotated} given; 0 or 1 expected for each of {num_layers} layers")
    local, unrotated = local_layers(theirs), [layer for layer, one in enumerate(rotated) if not one]
    # The mask of listed layers has the window in any case.
    window = theirs.get("sliding_window") if local or theirs.get("use_sliding_window", False) else None
    if window is not None and local == unrotated:
        local = None
    check_has_window(local or [], window)
    every = rotated.index(0) + 1 if 0 in rotated else max(every, num_layers + 1)
    is_regular = list(rotated) == _rotated(num_layers, every)
    return {
        "no_rope_layer_interval": every if is_regular else None,
        "unrotated_layers": None if is_regular else unrotated,
        "sliding_window": window,
        "local_layers": local if window is not None else None,
    }


def _layers_to_theirs(config: SmolLm3Config) -> Json:
    rotated, window = [int(kind.rope is not None) for kind in config.kinds], config.sliding_window
    return {
        "no_rope_layer_interval": config.no_rope_layer_interval or _EVERY,
        "no_rope_layers": rotated,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": layer_types(config),
    }


_LAYERS = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types")

FAMILY = Family(
    model_types=("smollm3",),
    architecture="SmolLM3ForCausalLM",
    config=SmolLm3Config,
    keys=(
        *usual_keys(length=32768, tied=True, rotary=rope(2e6)),
        KeyGroup(_LAYERS, _layers_to_ours, _layers_to_theirs),
        *same_keys(attention_bias=False, mlp_bias=False),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config, norms_first=True)),
    respelled=("no_rope_layer_interval", "unrotated_layers", "local_layers"),
)
