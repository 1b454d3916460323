"""Base configs of families with Llama's blocks: pre-norm, rotary position embeddings, layers with a sliding window."""

import abc
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveInt
from jaxlm.core.rules import Rules, excludes, needs, only
from jaxlm.models.decoder import (
    DecoderConfig,
    check_sizes,
    renumbered,
)
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.diffusion import TimeEmbeddingConfig
from jaxlm.models.mixers.base import Mixer
from jaxlm.models.rope import DefaultRotary, RotaryConfig, check_rope
from jaxlm.models.stacks import LayerKind


@dataclass(frozen=True)
class RotaryDecoderConfig(DecoderConfig):
    """A family whose layers differ only in their weights.

    Attributes:
        rope: rotary position embedding of queries and keys.
    """

    rope: RotaryConfig = field(default_factory=DefaultRotary)
    interleaved: ClassVar[bool] = False
    """Whether neighboring features are rotated, instead of pairs from the two halves."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return (LayerKind(self.rope, interleaved=self.interleaved),) * self.num_layers

    def check(self) -> None:
        check_sizes(self)
        check_rope(self.rope, self.num_heads, self.HeadSize.size)


def local_kinds(
    local_kind: LayerKind, global_kind: LayerKind, local: Collection[int], num_layers: int
) -> tuple[LayerKind, ...]:
    """The kind of each layer. Args: local: numbers of the local layers."""
    return tuple(local_kind if layer in local else global_kind for layer in range(num_layers))


def local_in_groups(num_layers: int, size: int, *, first_is_global: bool = False) -> list[int]:
    """The numbers of the local layers, if one of each group of layers is global: the last one, or the first one."""
    return [layer for layer in range(num_layers) if (layer + (not first_is_global)) % size]


def check_layer_numbers(key: str, layers: Sequence[int], num_layers: int) -> None:
    """Raises `ConfigError` if these are not numbers of layers, each at most once."""
    if any(layer >= num_layers for layer in layers) or len(set(layers)) < len(layers):
        raise ConfigError(
            f"{key}: {list(layers)} given, different numbers from 0 to {num_layers - 1} expected (num_layers - 1)"
        )


def check_one_of_layers(config: DecoderConfig, every: str, listed: str) -> None:
    """Raises `ConfigError` unless either the key for a number of layers or that for a list of them is null."""
    number, layers = getattr(config, every), getattr(config, listed)
    if (number is None) == (layers is None):
        raise ConfigError(
            f"model.{listed}: {'null' if layers is None else list(layers)} given, and {every}:"
            f" {'null' if number is None else number}. Set one of the two, and the other to null"
        )
    check_layer_numbers(f"model.{listed}", layers or (), config.num_layers)


@dataclass(frozen=True)
class PatternConfig(DecoderConfig):
    """A family with local and global layers. Subclasses define the rotary embeddings.

    Attributes:
        sliding_window: number of tokens that each token attends to in local layers, including itself. Null if all layers
            are global.
        sliding_window_pattern: layers are grouped by this number; the last of each group is global (full attention),
            the others are local (sliding window). Null if `local_layers` is set.
        local_layers: numbers of the local layers, counted from 0, instead of `sliding_window_pattern`.
    """

    sliding_window: PositiveInt | None = 4096
    sliding_window_pattern: PositiveInt | None = 2
    local_layers: list[NonNegativeInt] | None = None
    interleaved: ClassVar[bool] = False
    """Whether neighboring features are rotated, instead of pairs from the two halves."""
    first_is_global: ClassVar[bool] = False
    """Whether the first layer of each group is global, instead of the last one."""

    @property
    @abc.abstractmethod
    def rotations(self) -> tuple[RotaryConfig | None, RotaryConfig | None]:
        """The rotary embeddings of local and of global layers; None for none."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        local_rope, global_rope = self.rotations
        window = self.sliding_window
        if window is not None and not self.is_causal:  # half of the window on either side
            window = window // 2 + 1
        local, everywhere = (LayerKind(r, w, self.interleaved) for r, w in ((local_rope, window), (global_rope, None)))
        return local_kinds(local, everywhere, self._local, self.num_layers)

    @property
    def _local(self) -> Sequence[int]:
        if self.local_layers is not None:
            return self.local_layers
        assert self.sliding_window_pattern is not None, "`check` has refused this"
        return local_in_groups(self.num_layers, self.sliding_window_pattern, first_is_global=self.first_is_global)

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        """The pattern if the layers still follow it, their numbers otherwise."""
        every, local = self.sliding_window_pattern, renumbered(self._local, kept)
        if every is None:
            return {"local_layers": list(local)}
        if local == tuple(local_in_groups(len(kept), every, first_is_global=self.first_is_global)):
            return {}
        return {"sliding_window_pattern": None, "local_layers": list(local)}

    def check(self) -> None:
        check_sizes(self)
        check_one_of_layers(self, "sliding_window_pattern", "local_layers")
        if self.sliding_window is None and self._local:
            raise ConfigError(
                f"model.sliding_window: null given, but layers {list(self._local)} are local (sliding_window_pattern,"
                " local_layers). Set a window, or sliding_window_pattern: 1, which makes all layers global"
            )
        for rope in self.rotations:
            if rope is not None:
                check_rope(rope, self.num_heads, self.HeadSize.size)


@dataclass(frozen=True)
class PreNormConfig(DecoderConfig):
    """A pre-norm family. Subclasses define the attention of a layer and which layers use the sliding window.

    Attributes:
        sliding_window: number of tokens that each token attends to, including itself. Null means all previous tokens.
        rope: rotary position embedding of queries and keys.
    """

    sliding_window: PositiveInt | None = None
    rope: RotaryConfig = field(default_factory=DefaultRotary)

    @abc.abstractmethod
    def attention(self, keys: jax.Array) -> Mixer:
        """Initializes the attention of one layer. Takes four keys."""


def check_pre_norm(config: PreNormConfig) -> None:
    """Raises `ConfigError` if the keys of `PreNormConfig` are invalid."""
    check_sizes(config)
    if config.time_embedding is not None:
        config.time_embedding.check()
    if not config.is_causal and any(kind.window is not None for kind in config.kinds):
        raise ConfigError(
            f"model.sliding_window: {config.sliding_window} given together with use_bidirectional_attention, but a window of"
            " these families looks only back, and transformers gives it another width if it looks both ways. Remove one of"
            " them"
        )
    check_rope(config.rope, config.num_heads, config.RotarySize.size)


@dataclass(frozen=True)
class TwoWayConfig(PreNormConfig):
    """A family whose tokens may attend to later ones.

    Attributes:
        use_bidirectional_attention: tokens attend to later ones too, for masked and diffusion language models. Such a model
            does not generate token by token. In config.json it is `is_causal: false`, which transformers reads from version 5
            on.
        time_embedding: adds what the model knows of the time, such as `{type: sinusoidal}`: the fraction of hidden tokens in
            training, and of masks that are left in generation. It starts as zero. Such a model cannot be exported. Null adds
            nothing.
    """

    use_bidirectional_attention: bool = False
    time_embedding: TimeEmbeddingConfig | None = None
    key_rules: ClassVar[Rules] = (
        only(
            "time_embedding",
            when="use_bidirectional_attention",
            is_=True,
            why="because no tokens are hidden from a causal model",
        ),
    )


@dataclass(frozen=True)
class UniformConfig(PreNormConfig):
    """A family whose layers are all of the same kind."""

    def check(self) -> None:
        check_pre_norm(self)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return (LayerKind(self.rope, self.sliding_window),) * self.num_layers


@dataclass(frozen=True)
class LateWindowConfig(LlamaBlocks, TwoWayConfig):
    """A family with Llama's blocks whose first layers use full attention and whose other layers may use a sliding window.

    Attributes:
        max_window_layers: number of layers, counted from the first, that use full attention. `sliding_window` applies
            to the layers after them.
        local_layers: numbers of the layers that `sliding_window` applies to, counted from 0, instead of
            `max_window_layers`.
    """

    max_window_layers: NonNegativeInt = 0
    local_layers: list[NonNegativeInt] | None = None
    key_rules: ClassVar[Rules] = (
        needs("sliding_window", when="local_layers"),
        excludes("max_window_layers", "local_layers"),
    )

    def check(self) -> None:
        check_pre_norm(self)
        check_layer_numbers("model.local_layers", self.local_layers or (), self.num_layers)

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        if self.local_layers is not None:
            return {"local_layers": list(renumbered(self.local_layers, kept))}
        if self.sliding_window is None:
            return {}
        late = renumbered(range(self.max_window_layers, self.num_layers), kept)
        first = len(kept) - len(late)
        if late == tuple(range(first, len(kept))):
            return {"max_window_layers": first}
        return {"max_window_layers": 0, "local_layers": list(late)}

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        late = range(self.max_window_layers, self.num_layers)
        local = late if self.local_layers is None else self.local_layers
        return local_kinds(LayerKind(self.rope, self.sliding_window), LayerKind(self.rope), local, self.num_layers)
