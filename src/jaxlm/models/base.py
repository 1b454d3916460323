"""The interface of language models: inputs, outputs, cache, model and config."""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import draccus
import equinox as eqx
import jax
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import EMBED, POSITION, VOCAB
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.parameters import SCALE, DeclaresParameters, Parameter
from jaxlm.core.products.fp8 import Fp8
from jaxlm.core.products.matmul import dot
from jaxlm.core.products.stored_weights import Weight
from jaxlm.core.sharding import for_compute
from jaxlm.core.values.sums import Sum
from jaxlm.models.chunked_loss import soft_capped
from jaxlm.models.diffusion import Denoiser
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.remat import AUTO, MLP, RematConfig, offloads, parse_remat, saves
from jaxlm.models.rope import RotaryConfig
from jaxlm.reading.choices import Registry
from jaxlm.reading.effects import field


class EmbeddingNoise(eqx.Module):
    """Noise that training adds to the token embeddings (`jaxlm.models.layers.token_embeddings`).

    Attributes:
        keys: uint32 {batch, key_word}, a random key for each row.
        alpha: size of the noise.
    """

    keys: NamedArray
    alpha: float = eqx.field(static=True)


class Inputs(eqx.Module):
    """Packed sequences as a model reads them. There is never a dense attention mask.

    Attributes:
        tokens: int32 {batch, position}.
        positions: int32 {batch, position}, the position inside the document.
        segment_ids: int32 {batch, position}. Tokens attend only to tokens with the same id; 0 is padding.
        noise: what to add to the token embeddings; None adds nothing. Only a model with `adds_noise` reads it.
        mask_fractions: float32 {batch}, the fraction of hidden tokens at the time of each row; None if none are hidden. Only
            a model with a time embedding, or with `denoisers`, reads it.
        mask_range: the smallest and the largest of them in all inputs of this kind, which says when the model is traced
            which `denoisers` are needed; None if that is not known.
        order: int32 {batch, position}, the index of each token in its row; None if tokens are in the order of the text.
    """

    tokens: NamedArray
    positions: NamedArray
    segment_ids: NamedArray
    noise: EmbeddingNoise | None = eqx.field(default=None, kw_only=True)
    mask_fractions: NamedArray | None = eqx.field(default=None, kw_only=True)
    mask_range: tuple[float, float] | None = eqx.field(static=True, default=None, kw_only=True)
    order: NamedArray | None = eqx.field(default=None, kw_only=True)

    @staticmethod
    def of(batch: Any, noise: EmbeddingNoise | None = None) -> "Inputs":
        """Selects what a model reads of a batch of sequences, as in `jaxlm.core.values.batch_types`."""
        return Inputs(
            batch.tokens,
            batch.positions,
            batch.segment_ids,
            noise=noise,
            mask_fractions=batch.mask_fractions,
            mask_range=batch.mask_range,
            order=batch.order,
        )


class AuxLoss(eqx.Module):
    """An auxiliary loss computed by layers. It is logged, and added to the objective with a coefficient.

    Attributes:
        sum: the loss summed over tokens; its weight is the number of tokens that are not padding.
        coefficient: weight of the loss in the objective; 0 only logs it.
    """

    sum: Sum
    coefficient: float = eqx.field(static=True)


class Hidden(eqx.Module):
    """The output of a model's body.

    Attributes:
        final: {batch, position, embed}, the input of the head, after the final norm. Without a head, logits {..,
            vocab}.
        cache: the given cache, extended by these inputs; None if none was given.
        aux: auxiliary losses of the layers by metric name (such as a router's load balance).
        taps: {batch, position, embed}, the residual stream at each requested tap.
    """

    final: NamedArray
    cache: Any = None
    aux: dict[str, AuxLoss] = eqx.field(default_factory=dict)
    taps: dict[str, NamedArray] = eqx.field(default_factory=dict)


EMBEDDING, FINAL = "embedding", "final"


def layer_tap(layer: int) -> str:
    """The name of the residual stream after a layer, counted from 0."""
    return f"layer_{layer}"


def tap_names(num_layers: int) -> tuple[str, ...]:
    """The taps of a body: the input of the first layer, the output of every layer, and the output of the final norm."""
    return (EMBEDDING, *map(layer_tap, range(num_layers)), FINAL)


def check_taps(taps: Sequence[str], known: Sequence[str]) -> None:
    """Raises `ConfigError` for a tap that the model does not have."""
    unknown = [name for name in taps if name not in known]
    if unknown:
        raise ConfigError(f"taps: '{unknown[0]}' given, but this model has: {', '.join(known) or 'no taps'}")


@dataclass(frozen=True)
class ModelTraits:
    """Static properties of a model. A model that wraps another passes them on.

    Attributes:
        logit_soft_cap: soft cap of the logits (`jaxlm.models.chunked_loss.soft_capped`); None applies no cap.
        vocab_multiple: the loss pads the vocabulary to a multiple of this.
        head_fp8: how the next-token loss quantizes the products of the head in training; None for not at all.
        notes: limitations of the model, logged at startup.
        reads_beyond: whether it can read sequences longer than `Pos`: it has no table with an entry for each position.
        adds_noise: whether it adds `Inputs.noise` to its token embeddings.
        switch_lengths: the lengths beyond which all tokens of a text are computed in another way, so that a cache has to be
            computed again when its text grows beyond one (`jaxlm.models.inference.length_switch`). The cache then holds
            the tokens too.
        denoisers: the layers that compute a text, by its mask fraction, from the fewest hidden tokens to the most; empty if
            all layers compute every text.
    """

    logit_soft_cap: float | None = None
    vocab_multiple: int = 1
    head_fp8: Fp8 | None = None
    notes: tuple[str, ...] = ()
    reads_beyond: bool = False
    adds_noise: bool = False
    switch_lengths: tuple[int, ...] = ()
    denoisers: tuple[Denoiser, ...] = ()

    @property
    def loss_options(self) -> dict[str, Any]:
        """The keyword arguments by which losses (`jaxlm.models.loss`) compute the logits."""
        return {"soft_cap": self.logit_soft_cap, "vocab_multiple": self.vocab_multiple}


class LanguageModel(eqx.Module):
    """Maps tokens to logits. Abstract; every model is final.

    Attributes:
        is_causal: whether the logits after a token depend on no later token, so that text can be generated token by token.
    """

    is_causal: bool = eqx.field(static=True, default=True, kw_only=True)
    traits: ModelTraits = eqx.field(static=True, default=ModelTraits(), kw_only=True)

    @property
    @abc.abstractmethod
    def Vocab(self) -> Axis:
        """The vocabulary axis of the logits."""

    @property
    @abc.abstractmethod
    def Pos(self) -> Axis:
        """The position axis. Its size is the maximum sequence length."""

    @abc.abstractmethod
    def hidden(
        self, inputs: Inputs, *, cache: Any = None, taps: Sequence[str] = (), key: jax.Array | None = None
    ) -> Hidden:
        """Runs everything except the head.

        Args:
            cache: from `init_cache`, or from the previous call's `Hidden.cache`. None uses no cache.
            taps: names of the hidden states to return in `Hidden.taps`: `embedding` is the input of the first layer,
                `layer_N` the output of layer N (from 0), and `final` the output of the final norm.
            key: for dropout. None means no dropout.

        Raises:
            ConfigError: the model has no tap of that name.
        """

    @abc.abstractmethod
    def lm_head(self) -> Weight | None:
        """The weight of the head, {vocab, embed}; the token embedding if the two are tied.

        None if `hidden` already returns logits.
        """

    def logits(self, hidden: NamedArray) -> NamedArray:
        """Maps {..., embed} to {..., vocab} and applies the soft cap."""
        head = self.lm_head()
        logits = hidden if head is None else dot(hidden, head, EMBED)
        return NamedArray(soft_capped(logits.array, self.traits.logit_soft_cap), logits.axes)

    @abc.abstractmethod
    def init_cache(self, Batch: Axis, capacity: int, dtype) -> Any:
        """Creates an empty cache with room for `capacity` tokens per row; usually a `DecodingCache`.

        Args:
            dtype: dtype of keys and values. int8 adds a quantization scale per head and token.
        """


M = TypeVar("M", bound=LanguageModel)


def with_traits(model: M, **changes: Any) -> M:
    """The same model with other `ModelTraits`."""
    return replace(model, traits=replace(model.traits, **changes))


class RotaryModel(LanguageModel):
    """A model whose positions are in rotary embeddings alone, so that it may read longer texts."""

    @abc.abstractmethod
    def with_context(self, seq_len: int, rope: RotaryConfig | None) -> "LanguageModel":
        """The same model for texts of another length, as of the function `with_context`. Leaves may be missing (None)."""


class WrappedModel(LanguageModel):
    """A model that has another one in it, and its vocabulary, positions, head and cache."""

    base: eqx.AbstractVar[LanguageModel]

    @property
    def Vocab(self) -> Axis:
        return self.base.Vocab

    @property
    def Pos(self) -> Axis:
        return self.base.Pos

    def lm_head(self) -> Weight | None:
        return self.base.lm_head()

    def init_cache(self, Batch: Axis, capacity: int, dtype) -> Any:
        return self.base.init_cache(Batch, capacity, dtype)


class RewardModel(WrappedModel, DeclaresParameters):
    """A model with a head of one output, which scores sequences, beside the head that predicts tokens.

    Attributes:
        base: the model.
        reward: {embed}, the weight of the reward head.
    """

    base: LanguageModel
    reward: NamedArray

    def hidden(
        self, inputs: Inputs, *, cache: Any = None, taps: Sequence[str] = (), key: jax.Array | None = None
    ) -> Hidden:
        return self.base.hidden(inputs, cache=cache, taps=taps, key=key)

    def parameters(self) -> dict[str, Parameter]:
        return {"reward": SCALE}


def reward_head(model: LanguageModel) -> NamedArray | None:
    """The weight of the head that scores sequences, {embed}; None if the model has none."""
    scored = tree.modules(model, RewardModel)
    return for_compute(scored[0].reward) if scored else None


@dataclass(frozen=True)
class LeavesFromTokens:
    """Leaves of the initial model that `ModelConfig.build` cannot know, because they depend on the training tokens. They are
    computed once, before the first step.

    Attributes:
        paths: of these leaves.
        num_tokens: training tokens to compute them from, at most.
        key: everything else that determines them. Plain JSON.
        compute: sequences of token ids -> path -> value. The same tokens must give the same values.
    """

    paths: tuple[str, ...]
    num_tokens: int
    key: Mapping[str, Any]
    compute: Callable[[Sequence[np.ndarray]], Mapping[str, np.ndarray]]


# Names of backends in checkpoints that were saved before the backends were renamed.
_FORMER_BACKENDS = {"blocks": "blockwise", "plain": "reference"}


@dataclass(frozen=True)
class ModelConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """Keys that all model families share. `type:` selects the family.

    Attributes:
        seq_len: number of tokens per training example; the maximum sequence length of the model.
        gradient_checkpointing: what the backward pass recomputes instead of reading it from memory. `none` (or false)
            recomputes nothing; `cheap` norms and activations, but no matrix products; `attention` everything except each
            layer's input and attention itself; `full` (or true) everything except each layer's input. A list names the
            activations to save (query, key, value, attention, mlp, expert, state); everything else is recomputed.
            `{modules: mlp}` recomputes only some modules of each layer, and `{save: [attention], offload: [residual]}` saves
            some activations in the host's memory. `auto` recomputes as little as fits into device memory.
        scan_layers: true compiles one layer and runs it in a loop; false compiles every layer separately; `auto`
            decides. Parameters and checkpoints have the same layout either way.
        attn_backend: implementation of attention. `auto` selects the best one for the model and device, and logs which
            one and why.
        mlp_tile_tokens: tokens that each device computes an MLP of at a time, so that no array has the MLP's hidden features
            for all of its tokens. The backward pass then computes the MLP again, whatever gradient_checkpointing says, and
            products in fp8 have scales for each of these groups of tokens, with either recipe. Null computes all at once.
        pad_vocab_to_multiple_of: the loss computes logits for a multiple of this many tokens. The padding is only in its
            matrix products, never in its result, the parameters, checkpoints, exports or generation. Null pads only a
            vocabulary that is sharded over devices that do not divide it.
    """

    seq_len: PositiveInt = 1024
    gradient_checkpointing: bool | str | list[str] | RematConfig = field(AUTO, on_resume="rounding")
    scan_layers: bool | Literal["auto"] = field(AUTO, on_resume="rounding")
    attn_backend: str = field(AUTO, on_resume="rounding")
    mlp_tile_tokens: PositiveInt | None = field(None, on_resume="rounding")
    pad_vocab_to_multiple_of: PositiveInt | None = field(None, on_resume="rounding")

    def __post_init__(self):
        for item in fields(self):  # the config is a static field of the model: it must be hashable
            if isinstance(value := getattr(self, item.name), list):
                object.__setattr__(self, item.name, tuple(value))
        if self.mlp_tile_tokens is not None and saves(parse_remat(self.gradient_checkpointing), MLP):
            raise ConfigError(
                f"model.mlp_tile_tokens: {self.mlp_tile_tokens} given, but gradient_checkpointing saves mlp, which exists"
                " only for a few tokens at a time. Remove one of them"
            )
        if offloads(parse_remat(self.gradient_checkpointing)) and not self.scan_layers:
            raise ConfigError(
                "model.scan_layers: false given, but outside a loop over the layers, activations in"
                " model.gradient_checkpointing.offload would return to the device at once. Remove one of them"
            )
        object.__setattr__(self, "attn_backend", _FORMER_BACKENDS.get(self.attn_backend, self.attn_backend))

    @property
    def Pos(self) -> Axis:
        return Axis(POSITION, self.seq_len)

    @property
    def is_causal(self) -> bool:
        """Tells whether tokens attend to no later tokens."""
        return True

    @property
    def Layers(self) -> Axis:
        """An axis with the number of layers. Raises `ConfigError` if jaxlm does not know the layers of the model."""
        raise ConfigError(f"jaxlm does not know the layers of {_family(self)}")

    def with_layers(self, kept: Sequence[int]) -> "ModelConfig":
        """The config of the same model with only some of its layers, or with more.

        Args:
            kept: numbers of the layers, from 0, in ascending order. Layers that a model has grown have that of a layer of
                the same kind (`TransformerModel.grown`).

        Raises:
            ConfigError: no config of the family describes it.
        """
        raise ConfigError(f"jaxlm does not know the layers of {_family(self)}")

    @property
    def rotary(self) -> RotaryConfig | None:
        """The rotary position embedding that a longer context changes: the field `rope`. None if there is none."""
        return None

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `ConfigError` if no model can be built from these keys (for example, heads that do not divide)."""

    @abc.abstractmethod
    def build(self, Vocab: Axis, *, key: jax.Array) -> LanguageModel:
        """Initializes a model. Pure: it can be traced by `jax.eval_shape` or jitted with sharded outputs."""

    @abc.abstractmethod
    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """FLOPs per training token."""


@functools.singledispatch
def as_family(config: ModelConfig) -> ModelConfig:
    """The config of the same model, with the same parameters, by which other programs know it. Families register another.

    Raises:
        ConfigError: they know no such model.
    """
    return config


@functools.singledispatch
def token_leaves(config: ModelConfig, vocab_size: int) -> LeavesFromTokens | None:
    """The leaves that depend on the training tokens; None if there are none. Families register how they find theirs.

    Raises:
        ConfigError: the keys do not suit a vocabulary of this size.
    """
    return None


C = TypeVar("C", bound=ModelConfig)


def with_context(config: C, seq_len: int, rope: RotaryConfig | None) -> C:
    """The config of the same model for texts of another length, with another rotary position embedding (None keeps it).

    Raises:
        ConfigError: the model has none.
    """
    if config.rotary is None:
        raise ConfigError(
            f"jaxlm knows no rotary position embedding (rope) of {_family(config)} that could be stretched to longer texts."
            " Use a family with rope, such as llama"
        )
    return replace(config, **{"seq_len": seq_len, "rope": config.rotary if rope is None else rope})


def _family(config: ModelConfig) -> str:
    return f"a model of type {type(config).__name__.removesuffix('Config').lower()}"


def vocab_axis(size: int) -> Axis:
    """A vocabulary axis of `size` tokens."""
    return Axis(VOCAB, size)
