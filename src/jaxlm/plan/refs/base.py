"""The interface of references: models beside the one that trains, such as a teacher. They never change."""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import draccus
import jax.numpy as jnp
from haliax import Axis

from jaxlm.core.field_types import AboveOne, PositiveFloat, PositiveInt
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.interop.hf.folder import parse_dtype
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.reading.choices import Registry

Log = Callable[[str], None]
C = TypeVar("C", bound="RefConfig")


class Ref(abc.ABC, Generic[C]):
    """A reference. Nothing is read before a method is called; all processes must call the methods.

    Attributes:
        key: path of its section in the configuration, for messages.
        location: its path or URL.
        precision: its dtype, for storage and computation.
    """

    def __init__(self, config: C, key: str):
        dtype = jnp.dtype(parse_dtype(config.dtype, f"{key}.dtype"))
        self.config = config
        self.key = key
        self.location = config.path
        self.precision = Precision(dtype, dtype)

    @abc.abstractmethod
    def abstract(self, Vocab: Axis) -> LanguageModel:
        """Shapes and dtypes of the model over a vocabulary of this size. Reads no weights.

        Raises:
            ConfigError: there is no model at the path, or its vocabulary is smaller.
        """

    @abc.abstractmethod
    def model_config(self) -> ModelConfig:
        """The configuration of the model. Reads no weights."""

    @abc.abstractmethod
    def notes(self) -> Sequence[str]:
        """Lists what `load` logs about its configuration, such as keys that are ignored. Reads no weights."""

    @abc.abstractmethod
    def load(self, Vocab: Axis, layout: Layout, log: Log) -> LanguageModel:
        """Loads the model, sharded like parameters. Call it inside `layout.use()`."""

    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that it was trained with; None if it is not known."""

    @abc.abstractmethod
    def identity(self) -> dict[str, str]:
        """Returns what identifies its numbers, by content and not by path: digests of its configuration and its weights."""


@dataclass(frozen=True)
class SanityConfig:
    """Refuses a reference whose loss on the run's own text is too high: another tokenizer, the wrong folder, or weights that
    were read in the wrong order. It is measured once, before the phase that is the first to read the reference.

    Attributes:
        max_loss: largest mean next-token loss in nats. If both limits are null, it is that of a uniform guess over the
            vocabulary: ln(vocabulary).
        max_perplexity: largest exp(loss). With `max_loss`, the smaller limit counts.
        batches: training batches of the phase to measure it on.
    """

    max_loss: PositiveFloat | None = None
    max_perplexity: AboveOne | None = None
    batches: PositiveInt = 2

    def limit(self, vocab_size: int) -> tuple[float, str]:
        """The largest loss in nats, and what says so."""
        limits = [] if self.max_loss is None else [(self.max_loss, f"max_loss: {self.max_loss:g}")]
        if self.max_perplexity is not None:
            limits.append((math.log(self.max_perplexity), f"max_perplexity: {self.max_perplexity:g}"))
        guess = (math.log(vocab_size), f"that of a uniform guess over {vocab_size:,} tokens")
        return min(limits, default=guess)


@dataclass(frozen=True)
class RefConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A model that the objective queries, such as a teacher. It is loaded once, sharded like parameters, and never changes.

    Attributes:
        path: where the model is.
        dtype: dtype of its weights in memory and of its computation: bfloat16, float32 or float16.
        sanity: the loss on the run's text with which it is refused at the start; null measures nothing.
    """

    path: str
    dtype: str = "bfloat16"
    sanity: SanityConfig | None = field(default_factory=SanityConfig)

    @abc.abstractmethod
    def open(self, key: str) -> Ref:
        """The reference. Args: key: path of the section in the configuration, for messages."""
