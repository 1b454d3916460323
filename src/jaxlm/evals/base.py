"""The evaluation interface: an evaluation takes a model and returns metrics, which may have limits that end a run."""

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import draccus
import jax
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.core.values.logged import ScoredRows
from jaxlm.core.values.sums import DummyPrefix, Largest, Sum, TokenScores
from jaxlm.evals.batches import BatchedModel, text_columns
from jaxlm.models.base import LanguageModel
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import choice_name


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
"""Gets the `EvalMetrics.title` of an evaluation, its completions, and what `Rewards.score` returned for them."""
LoadReference = Callable[[str], LanguageModel]
"""Returns the model of this name in the section `refs`, in its own dtype."""


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
        reference: loads one of `EvalScope.references`, if the phase's step does not have it. Keep it no longer than
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

    def cast(self, model: LanguageModel) -> LanguageModel:
        """Casts a model to the dtype of the computation."""
        return _cast(self.precision, model)

    def batched(self, model: LanguageModel, batch_size: int) -> BatchedModel:
        """A model that is asked about many prompts, in the dtype of the computation."""
        return BatchedModel(self.cast(model), batch_size, self.progress)

    def batches(self, first: int | None = None) -> Iterator[Any]:
        """The validation batches of all sources. Args: first: as many of each source; None yields all."""
        for source in self.validation:
            yield from itertools.islice(source.batches(), first)

    def texts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The tokens and segments of the validation batches in the order of the text, int32 [row, position] each."""
        for batch in self.batches():
            tokens, segments = text_columns(batch)
            yield np.asarray(tokens), np.asarray(segments)


@functools.partial(jax.jit, static_argnums=0)
def _cast(precision: Precision, model: LanguageModel) -> LanguageModel:
    return precision.cast_to_compute(model)


@dataclass(frozen=True)
class EvalMetrics:
    """What is known of the metrics of an evaluation before it has run.

    Attributes:
        names: names that they end with, after the names of sources or averages and a slash. None: they are not known.
        title: the name that they and its completions begin with, as no other evaluation's. None: they may.
        limits: of the metrics.
    """

    names: tuple[str, ...] | None = None
    title: str | None = None
    limits: Limits = Limits()


@dataclass(frozen=True)
class EvalScope:
    """What an evaluation runs on.

    Attributes:
        phases: names of the phases in which it runs; None: in all.
        references: names of the models in the section `refs` that it reads (`EvalContext.reference`).
        validation: whether it measures nothing without validation data.
        supervised: whether it reads the `supervised()` of validation batches, as `EvalContext.score` does.
        objective: whether it calls `EvalContext.measure`.
        next_tokens: whether it reads predictions of next tokens, which a model whose tokens attend to later ones does not
            make.
    """

    phases: Sequence[str] | None = None
    references: tuple[str, ...] = ()
    validation: bool = False
    supervised: bool = False
    objective: bool = False
    next_tokens: bool = False

    def includes(self, phase: str) -> bool:
        """Tells whether it runs in the phase of this name."""
        return self.phases is None or phase in self.phases


@dataclass(frozen=True)
class EvalConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """An evaluation. It runs every `trainer.steps_per_eval` steps and after the last step of each phase.

    Attributes:
        every: runs only at every N-th of these evaluations, and after the last scheduled step of a phase; null runs only at
            the end of each phase, also if it ends early.
    """

    every: PositiveInt | None = field(default=1, kw_only=True)

    @property
    def metrics(self) -> EvalMetrics:
        """What is known of its metrics before it has run."""
        return EvalMetrics()

    @property
    def scope(self) -> EvalScope:
        """What it runs on."""
        return EvalScope()

    def check_model(self, model: LanguageModel, references: Mapping[str, LanguageModel] | None) -> None:
        """Raises `ConfigError` if it cannot measure a model of a phase beside its references, all of them shapes.

        Args:
            references: None when the run is planned, as nothing of them has been read.
        """
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


@dataclass(frozen=True)
class EvalPhase:
    """A phase as evaluations find it, before its data is opened.

    Attributes:
        model: its model, as shapes.
        batch: a batch of its data without arrays.
        has_validation: whether there is validation data.
        is_annotated: whether its objective reads answers of references that are stored for the training data alone.
    """

    name: str
    model: LanguageModel
    batch: Any
    has_validation: bool
    is_annotated: bool

    def check(self, evaluation: EvalConfig) -> None:
        """Raises `ConfigError` if an evaluation cannot run in it."""
        scope, which = evaluation.scope, f"phase '{self.name}': the evaluation '{choice_name(type(evaluation))}'"
        if scope.next_tokens and not self.model.is_causal:
            raise ConfigError(
                f"{which} reads predictions of next tokens, but with model.use_bidirectional_attention: true the model sees"
                " these tokens. Remove it, or name other phases"
            )
        if scope.supervised and self.has_validation and not hasattr(self.batch, "supervised"):
            raise ConfigError(
                f"{which} reads `supervised()` of a batch, which {type(self.batch).__name__} does not define. Set evals:"
                " [{type: objective}], or, for a batch of your own, define it (it returns the `TokenBatch` to score)"
            )
        if scope.validation and evaluation.metrics.limits.by_metric and not self.has_validation:
            raise ConfigError(
                f"{which} has limits, but there is no validation data. Set data.validation_urls, or"
                " data.num_validation_sequences to hold some of the training data out"
            )
        if scope.objective and self.is_annotated:
            raise ConfigError(
                f"{which} asks the references about the validation data, but objective.cache: true stores their answers for"
                " the training data alone and does not load them. Remove the evaluation, or cache"
            )
        evaluation.check_model(self.model, None)


def check_evaluations(evals: Sequence[EvalConfig], phases: Sequence[EvalPhase]) -> None:
    """Raises `ConfigError` if an evaluation names a phase that does not exist, or cannot run in one of its phases, or if the
    metrics or completions of two would have the same name."""
    known = ", ".join(phase.name for phase in phases)
    for number, evaluation in enumerate(evals):
        named = evaluation.scope.phases
        if named is not None and not named:
            raise ConfigError(
                f"evals.{number}.phases: [] given, so it would never run. Name a phase ({known}), set it to null for all, or"
                " remove the evaluation"
            )
        if missing := [name for name in named or () if name not in {phase.name for phase in phases}]:
            raise ConfigError(
                f"evals.{number}.phases: '{missing[0]}' given, but there is no such phase. The phases are: {known}"
            )
        for phase in phases:
            if evaluation.scope.includes(phase.name):
                phase.check(evaluation)
    titles = [title for evaluation in evals if (title := evaluation.metrics.title) is not None]
    if equal := [title for title in titles if titles.count(title) > 1]:
        raise ConfigError(
            f"evals: {len(equal)} evaluations given with the name '{equal[0]}', under which their metrics and completions are"
            " logged. Set `name` in each of them"
        )
