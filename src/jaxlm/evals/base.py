"""The evaluation interface: an evaluation takes a model and returns metrics, which may have limits that end a run."""

import abc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import draccus
import jax
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.core.values.logged import ScoredRows
from jaxlm.core.values.sums import DummyPrefix, Largest, Sum, TokenScores
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.reading.choices import Registry


class GateError(Exception):
    """An evaluation with `fail_fast` has measured what its limits do not allow. The newest checkpoint stays."""


@dataclass(frozen=True)
class Limit:
    """The limit of a metric.

    Attributes:
        bound: the largest value that is allowed, or the smallest.
        key: the key that says so.
        least: whether it is the smallest.
    """

    bound: float
    key: str
    least: bool = False

    def allows(self, value: float) -> bool:
        """Tells whether a value is allowed; NaN never is."""
        return value >= self.bound if self.least else value <= self.bound

    def __str__(self) -> str:
        return f"at {'least' if self.least else 'most'} {self.bound:g} allowed ({self.key})"


@dataclass(frozen=True)
class Limits:
    """The limits of an evaluation's metrics, by name. A metric that was not measured violates its limit.

    Attributes:
        fail_fast: whether a violation ends the run.
    """

    by_metric: Mapping[str, Limit] = field(default_factory=dict)
    fail_fast: bool = False

    def violations(self, prefix: str, metrics: Mapping[str, float]) -> list[str]:
        """A line for each metric that is not allowed. Args: prefix: of the names of the metrics in messages."""
        return [
            f"{prefix}/{name} {f'is {metrics[name]:.4g}' if name in metrics else 'was not measured'}, {limit}"
            for name, limit in self.by_metric.items()
            if name not in metrics or not limit.allows(metrics[name])
        ]


def failed(violations: Sequence[str], where: str) -> GateError:
    """The error that ends a run. Args: where: what was measured, such as "step 3"."""
    return GateError(
        f"{where}: {'; '.join(violations)}. The run ends because fail_fast is true for this evaluation. Look at what led"
        " here (the surgery, the objective, the number of steps), or raise these limits, or set fail_fast: false"
    )


Score = Callable[[LanguageModel, Any], TokenScores]
"""Scores the targets of a validation batch. Traceable."""
Measure = Callable[[LanguageModel, Any], tuple[Mapping[str, Sum], Mapping[str, Sum | Largest]]]
"""The loss terms and metrics of an objective on a validation batch. The model is in the dtypes of the computation."""
ChatPrompt = Callable[[Mapping[str, Any], str, str], tuple[str, list[int]]]
"""Gets a record, the key of its messages, and its place, for errors. Returns the text of the prompt and its tokens."""
LogCompletions = Callable[[str, ScoredRows, Mapping[str, np.ndarray]], None]
"""Gets the `completions_name` of an evaluation, its completions, and what `Rewards.score` returned for them."""
LoadReference = Callable[[str], LanguageModel]
"""Returns the model of this name in the section `refs`, in its own dtype."""
_MAX_IN_FLIGHT = 4  # see engine/metrics.py for why the queue must be short


@dataclass(frozen=True)
class ValidationSet:
    """Validation data of one source.

    Attributes:
        name: name of the source; empty if there is only one.
        tags: tags of the source; losses are also aggregated by tag.
        batches: starts one pass over the data.
    """

    name: str
    tags: tuple[str, ...]
    batches: Callable[[], Iterable[Any]]


def _no_reference(name: str) -> LanguageModel:
    raise ConfigError(f"refs: the model '{name}' is read by an evaluation, but there are no references here")


@dataclass(frozen=True)
class EvalContext:
    """Holds what evaluations may use in addition to the model.

    Attributes:
        layout: the mesh and axis mappings of the model.
        precision: evaluations cast the model to its compute dtype first.
        tokenizer: encodes prompts and decodes samples.
        token_bytes: int32 [vocab], number of bytes of text that each token represents; 0 for special tokens. None if
            the tokenizer does not say it.
        validation: the validation data by source.
        log: prints a line.
        seq_len: the model's maximum sequence length.
        score: scores the targets of a validation batch.
        dummy_prefix: the space that the tokenizer puts in front of every text; None if it puts none.
        log_sample: keeps a prompt and the text that the model continues it with, for the trackers.
        log_completions: keeps completions and their rewards, for `completions.jsonl`, the console and the trackers.
        chat_prompt: renders a conversation that the assistant answers next.
        enforce_bos: whether the training data begins every document with BOS; None for what the tokenizer itself does.
        progress: called while an evaluation makes progress, so that a long one is not taken for one that hangs.
        measure: measures the phase's objective, with its references and its state; None if nothing is trained.
        reference: loads one of the evaluation's `references`, if the phase's step does not have it. Keep it no longer than
            needed. All processes call it.
    """

    layout: Layout
    precision: Precision
    tokenizer: Any
    token_bytes: np.ndarray | None
    validation: tuple[ValidationSet, ...]
    log: Callable[[str], None]
    seq_len: int
    score: Score
    dummy_prefix: DummyPrefix | None = None
    log_sample: Callable[[str, str], None] = lambda prompt, text: None
    log_completions: LogCompletions = lambda name, rows, scores: None
    chat_prompt: ChatPrompt = lambda record, key, where: ("", [])
    enforce_bos: bool | None = True
    progress: Callable[[], None] = lambda: None
    measure: Measure | None = None
    reference: LoadReference = _no_reference

    def go_on(self, _tokens: Sequence[int]) -> bool:
        """Ends no row that is generated: only says after each piece that there is progress."""
        self.progress()
        return False


@dataclass(frozen=True)
class EvalConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """An evaluation. It runs every `trainer.steps_per_eval` steps and after the last step of each phase.

    Attributes:
        every: runs only at every N-th of these evaluations, and after the last scheduled step of a phase; null runs only at
            the end of each phase, also if it ends early.
    """

    reads_supervised: ClassVar[bool] = False
    """Whether it reads the `supervised()` of validation batches, as `EvalContext.score` does."""

    reads_validation: ClassVar[bool] = False
    """Whether it measures nothing without validation data."""

    reads_objective: ClassVar[bool] = False
    """Whether it calls `EvalContext.measure`."""

    predicts_next_tokens: ClassVar[bool] = False
    """Whether it reads predictions of next tokens, which a model whose tokens attend to later ones does not make."""

    every: PositiveInt | None = field(default=1, kw_only=True)

    @property
    def metric_names(self) -> tuple[str, ...] | None:
        """Names that its metrics end with, after the names of sources or averages and a slash. None: they are not known
        before it has run."""
        return None

    @property
    def completions_name(self) -> str | None:
        """The name that its completions have in files and tables, as no other evaluation's. None: it logs none."""
        return None

    @property
    def unique_name(self) -> str | None:
        """The name that its metrics begin with, as no other evaluation's. None: they may."""
        return self.completions_name

    @property
    def references(self) -> tuple[str, ...]:
        """Names of the models in the section `refs` that it reads (`EvalContext.reference`)."""
        return ()

    @property
    def phase_names(self) -> Sequence[str] | None:
        """Names of the phases in which it runs; None: in all."""
        return None

    def runs_in(self, phase: str) -> bool:
        """Tells whether it runs in the phase of this name."""
        return self.phase_names is None or phase in self.phase_names

    @property
    def limits(self) -> Limits:
        """Limits of its metrics."""
        return Limits()

    def check_models(self, model: LanguageModel, references: Mapping[str, LanguageModel]) -> None:
        """Raises `ConfigError` if it cannot measure a model of a phase beside its references, all of them shapes."""
        return

    def check_model(self, model: ModelConfig) -> None:
        """Raises `ConfigError` if it cannot measure this model."""
        return

    def check_parts(self, model: LanguageModel) -> None:
        """Raises `ConfigError` if it needs parts that the model of a phase, as shapes, does not have."""
        return

    def check(self) -> None:
        """Raises `ConfigError` if something is missing that the evaluation needs besides the model, such as a file. Called
        before anything is compiled."""
        return

    def check_opens(self, tokenizer: Callable[[], Any], seq_len: int, *, dry: bool) -> None:
        """Raises `ConfigError` if something cannot be opened that the evaluation needs, such as a reward, or if the tokenizer
        or the model does not suit it. Process 0 calls it before anything is tokenized or compiled.

        Args:
            seq_len: the model's maximum sequence length.
            dry: write nothing, and do not wait for a server that is not ready.
        """
        return

    @abc.abstractmethod
    def open(self, ctx: EvalContext) -> "Eval":
        """Opens the evaluation. It compiles each program only once for the whole run."""


class Eval(abc.ABC):
    """An open evaluation."""

    @abc.abstractmethod
    def run(self, model: LanguageModel) -> dict[str, float]:
        """Metrics by name, to be logged as `eval/<name>`."""


def read_results(results: Iterable[Any]) -> Iterator[Any]:
    """Yields what programs return, on the host. At most a few are queued. Args: results: calls each program."""
    queued = deque()
    for result in results:
        queued.append(result)
        if len(queued) >= _MAX_IN_FLIGHT:
            yield jax.device_get(queued.popleft())
    yield from map(jax.device_get, queued)


def read_sums(results: Iterable[Any], shape: int | tuple[int, ...]) -> np.ndarray:
    """float64, the sum of what programs return. Args: results: as of `read_results`."""
    return sum((np.asarray(one, np.float64) for one in read_results(results)), np.zeros(shape))
