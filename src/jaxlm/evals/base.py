"""What an evaluation is: something that looks at a model and returns numbers."""

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import draccus
import numpy as np

from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.core.types import TokenBatch
from jaxlm.models.base import LanguageModel


@dataclass(frozen=True)
class ValidationSet:
    """Text to evaluate on that has a name.

    Attributes:
        name: of its source; empty where that is the only one.
        tags: groups that it counts for.
        batches: opens one pass over it.
    """

    name: str
    tags: tuple[str, ...]
    batches: Callable[[], Iterable[TokenBatch]]


@dataclass(frozen=True)
class EvalContext:
    """What evaluations may use beside the model.

    Attributes:
        layout: the mesh and mappings that the model lives on.
        precision: the model is cast to its compute dtype first.
        tokenizer: encodes prompts and decodes samples.
        token_bytes: int32 [vocab], how many bytes of text each token stands for; 0 for special tokens.
        validation: the validation data, source by source.
        show: prints a line for people.
        seq_len: how many tokens the model reads.
    """

    layout: Layout
    precision: Precision
    tokenizer: Any
    token_bytes: np.ndarray
    validation: tuple[ValidationSet, ...]
    log: Callable[[str], None]
    seq_len: int


@dataclass(frozen=True)
class EvalConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.evals"):
    """One evaluation. It runs every `trainer.steps_per_eval` steps and after the last one."""

    @abc.abstractmethod
    def open(self, ctx: EvalContext) -> "Eval":
        """The runnable evaluation; what it compiles, it compiles once for the whole run."""


class Eval(abc.ABC):
    """A runnable evaluation."""

    @abc.abstractmethod
    def run(self, model: LanguageModel) -> dict[str, float]:
        """Numbers by metric name, to be logged as `eval/<name>`."""
