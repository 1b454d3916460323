"""The CORE metric: the mean accuracy on 22 tasks, each on a scale where guessing is 0.

Source: Li et al. 2024, DataComp-LM (arXiv:2406.11794), section 3.5, as nanochat computes it: the same order and choice of
questions, prompts, and answers.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.evals.base import Eval, EvalConfig, EvalContext, EvalMetrics, EvalScope
from jaxlm.evals.batches import BatchedModel, Scored, num_shared
from jaxlm.models.base import LanguageModel
from jaxlm.reading.choices import choice
from jaxlm.systems.nanochat.core_bundle import (
    CORE_TASKS,
    LANGUAGE_MODELING,
    MULTIPLE_CHOICE,
    SCHEMA,
    CoreTask,
    read_bundle,
    task_entries,
)

CORE = "core"
_FEWSHOT_SEED = 1234
_ANY_LENGTH = 1 << 30
_ENCODED_AT_ONCE = 1024  # questions
_SCORED_AT_ONCE = 64  # batches, whose pairs are sorted by length together

_Pair = tuple[np.ndarray, np.ndarray]  # context and continuation, int32 [tokens] each


@choice(EvalConfig, "core")
class CoreEvalConfig(EvalConfig):
    """The CORE metric of 22 tasks, logged as `eval/core`. Each task is also logged by itself: `eval/core/<task>` is its
    accuracy on a scale where guessing is 0 and every answer right is 1, `eval/core/<task>/accuracy` the accuracy as it is.

    Attributes:
        bundle: folder with the tasks; `jaxlm prepare --core_bundle FOLDER` downloads it.
        tasks: measures only these tasks, and not `eval/core`; an empty list means all.
        max_per_task: maximum number of questions per task, chosen at random but always the same ones; null asks all.
            Few-shot examples are chosen among them too.
        batch_size: number of sequences per batch.
    """

    scope: ClassVar[EvalScope] = EvalScope(next_tokens=True)

    bundle: str
    tasks: list[str] = field(default_factory=list)
    max_per_task: PositiveInt | None = None
    batch_size: PositiveInt = 16

    @property
    def metrics(self) -> EvalMetrics:
        measured = self.tasks or CORE_TASKS
        names = [f"{CORE}/{task}{what}" for task in measured for what in ("", "/accuracy")]
        return EvalMetrics((*([CORE] if set(measured) == set(CORE_TASKS) else []), *names))

    def check(self) -> None:
        task_entries(self.bundle, self.tasks or CORE_TASKS)

    def open(self, ctx: EvalContext) -> Eval:
        """Raises `ConfigError` if the bundle lacks a task, or the tokenizer has no token to begin a prompt with."""
        return CoreEval(open_core(self, ctx.tokenizer), ctx)


class CoreEval(Eval):
    """Measures CORE during training."""

    def __init__(self, core: "OpenCore", ctx: EvalContext):
        self._core, self._ctx = core, ctx

    def run(self, model: LanguageModel) -> dict[str, float]:
        return core_metrics(self._core.run(self._ctx.cast(model), self._ctx.progress))


class CoreResult(NamedTuple):
    """A model's result on a task.

    Attributes:
        correct: bool [questions], in the order in which they were asked.
        centered: the accuracy on a scale where guessing is 0.
    """

    correct: np.ndarray
    centered: float

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())


def core_metrics(results: Mapping[str, CoreResult]) -> dict[str, float]:
    """Metrics by name. Only results of all tasks have a mean."""
    metrics = {}
    if set(results) == set(CORE_TASKS):
        metrics[CORE] = math.fsum(result.centered for result in results.values()) / len(results)
    metrics |= {f"{CORE}/{name}": result.centered for name, result in results.items()}
    return metrics | {f"{CORE}/{name}/accuracy": result.accuracy for name, result in results.items()}


def open_core(config: CoreEvalConfig, tokenizer: Any) -> "OpenCore":
    """Reads the tasks of a configuration.

    Raises:
        ConfigError: see `read_bundle`; or the tokenizer has neither BOS nor EOS.
    """
    begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if begin is None:
        raise ConfigError(
            "evals: core: every prompt begins with the BOS token, but the tokenizer has neither BOS nor EOS. Remove the"
            " evaluation, or use a tokenizer that has one"
        )
    tasks = read_bundle(config.bundle, config.tasks or CORE_TASKS, config.max_per_task)
    return OpenCore(tasks, tokenizer, begin, config.batch_size)


def fewshot_numbers(number: int, num_questions: int, num_fewshot: int) -> list[int]:
    """The questions that are put in front of question `number`, in their order."""
    # The generator chooses places in the list of the other questions, which need not exist.
    places = random.Random(_FEWSHOT_SEED + number).sample(range(num_questions - 1), num_fewshot)
    return [place + (place >= number) for place in places]


def prompts(task: CoreTask, number: int) -> list[str]:
    """The texts of question `number`: one for each choice; or the text without and with the right continuation."""
    question, between = task.questions[number], task.delimiter
    shots = [task.questions[i] for i in fewshot_numbers(number, len(task.questions), task.num_fewshot)]
    before = "".join(f"{text}{between}{answer}\n\n" for text, answer in (_solved(task.kind, shot) for shot in shots))
    if task.kind == MULTIPLE_CHOICE:
        return [f"{before}{question['query']}{between}{choice}" for choice in question["choices"]]
    if task.kind == SCHEMA:
        return [f"{before}{text}{between}{question['continuation']}" for text in question["context_options"]]
    text, answer = _solved(LANGUAGE_MODELING, question)
    # White space at the end would be a part of the answer's first token.
    return [f"{before}{text}{between}".strip(), f"{before}{text}{between}{answer}"]


def _solved(kind: str, question: Mapping[str, Any]) -> tuple[str, str]:
    if kind == MULTIPLE_CHOICE:
        return question["query"], question["choices"][question["gold"]]
    if kind == SCHEMA:
        return question["context_options"][question["gold"]], question["continuation"]
    return str(question["context"]).strip(), question["continuation"]


def scored_tokens(kind: str, rows: Sequence[np.ndarray]) -> list[_Pair]:
    """Splits the token ids of the texts of `prompts`, int32 [tokens] each, into contexts and the continuations to score.

    Choices are scored after the tokens that all of them begin with, and the end of a schema is what all texts end with. The
    two texts of a language modeling question become one pair. If its continuation changes the last tokens of the text before
    it, these tokens are scored too.
    """
    if kind == SCHEMA:
        size = num_shared(*(row[::-1] for row in rows))
        return [_split(row, len(row) - size) for row in rows]
    start = num_shared(*rows)
    context = rows[0][:start].copy()
    return [(context, row[start:].copy()) for row in (rows[-1:] if kind == LANGUAGE_MODELING else rows)]


def _split(row: np.ndarray, start: int) -> _Pair:
    # If all texts are equal, no token comes before the continuation, so nothing can be scored.
    return (row[:start], row[start:]) if start else (row, row[:0])


def _cropped(pair: _Pair, max_tokens: int) -> _Pair:
    """The last tokens of a pair: at most `max_tokens`, at least one of them context."""
    context, continuation = pair
    continuation = continuation[max(0, len(continuation) - (max_tokens - 1)) :]
    return context[-(max_tokens - len(continuation)) :], continuation


def is_correct(kind: str, gold: int, scored: Sequence[tuple[Scored, int]]) -> bool:
    """Tells whether a question is answered. Args: scored: the score of each continuation, and its number of tokens."""
    if kind == LANGUAGE_MODELING:
        return scored[0][0].is_greedy
    # Without tokens there is no mean. As in the reference, NaN is the least if it comes first, and never otherwise.
    means = [-one.log_likelihood / num_tokens if num_tokens else math.nan for one, num_tokens in scored]
    return means.index(min(means)) == gold


class OpenCore:
    """Tasks whose bundle was read and checked. Their prompts are encoded once, the first time they are asked."""

    def __init__(self, tasks: Sequence[CoreTask], tokenizer: Any, begin: int, batch_size: int):
        """Args: begin: id of the token that every prompt begins with."""
        self.tasks = tasks
        self._tokenizer, self._begin, self._batch_size = tokenizer, begin, batch_size
        self._encoded: dict[str, list[list[_Pair]]] = {}

    def run(
        self,
        model: LanguageModel,
        progress: Callable[[], None] = lambda: None,
        log: Callable[[str], None] = lambda _: None,
    ) -> dict[str, CoreResult]:
        """The result of each task. Call it inside `layout.use()`.

        Args:
            progress: called after each batch.
            log: told each task's result.
        """
        batched, results = BatchedModel(model, self._batch_size, progress), {}
        for task in self.tasks:
            correct = self._answers(batched, task)
            results[task.name] = CoreResult(correct, task.centered(float(correct.mean())))
            log(f"{task.name}: {correct.sum():,} of {len(correct):,} correct")
        return results

    def _answers(self, batched: BatchedModel, task: CoreTask) -> np.ndarray:
        if task.name not in self._encoded:
            self._encoded[task.name] = list(self._encode(task, batched.progress))
        encoded, model = self._encoded[task.name], batched.model
        # Like the reference, which truncates only for models that cannot read more.
        max_tokens = _ANY_LENGTH if model.traits.reads_beyond else model.Pos.size
        step = max(1, _SCORED_AT_ONCE * self._batch_size // max(map(len, encoded)))
        correct = []
        for first in range(0, len(encoded), step):
            questions = encoded[first : first + step]
            pairs = [_cropped(pair, max_tokens) for question in questions for pair in question]
            scores = batched.score(pairs, max_tokens)
            scored = iter([(one, len(continuation)) for one, (_, continuation) in zip(scores, pairs, strict=True)])
            for number, question in enumerate(questions, first):
                question_scores = list(itertools.islice(scored, len(question)))
                correct.append(is_correct(task.kind, task.questions[number].get("gold", 0), question_scores))
        return np.array(correct)

    def _encode(self, task: CoreTask, progress: Callable[[], None]) -> Iterator[list[_Pair]]:
        begin = np.array([self._begin], np.int32)
        for first in range(0, len(task.questions), _ENCODED_AT_ONCE):
            numbers = range(first, min(first + _ENCODED_AT_ONCE, len(task.questions)))
            texts = [prompts(task, number) for number in numbers]
            rows = iter(self._tokenizer.encode_arrays([text for some in texts for text in some]))
            for some in texts:
                yield scored_tokens(task.kind, [np.concatenate([begin, next(rows)]) for _ in some])
            progress()
