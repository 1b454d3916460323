"""Asks a model, and a reference, questions with known answers, and compares the texts that both write."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jaxlm.core.errors import ConfigError, listed
from jaxlm.core.field_types import Fraction, NonNegativeFloat, PositiveInt
from jaxlm.core.hashing import note
from jaxlm.core.rules import Rules, excludes, only, some_of
from jaxlm.core.runtime import from_main
from jaxlm.core.safe_io import read_json_lines
from jaxlm.evals.base import Eval, EvalConfig, EvalContext, EvalScope
from jaxlm.evals.batches import BatchedModel, check_fits, num_shared, prompt_ids
from jaxlm.evals.gate import GateConfig
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.generate import GenerationConfig
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource

_CASES = "evals: type cases"
_INT, _TEXT, _CHOICE = "int_greedy", "text_greedy", "choice_logprob"
_INTEGER = re.compile(r"-?\d+(?:,\d{3})*")
_BATCH = 16  # rows that are generated or scored at once


@dataclass(frozen=True)
class Case:
    """A question.

    Attributes:
        id: what messages call it.
        prompt: the text that the model continues.
        answer: the right answer; for `choice_logprob`, one of `choices`.
        kind: `int_greedy` generates greedily, and the first integer in the text must be the answer; `text_greedy`, and the
            text must begin with the answer, apart from spaces; `choice_logprob` takes the choice with the largest
            log-likelihood, summed over its tokens.
        choices: texts that may follow the prompt, with the space before them.
    """

    id: str
    prompt: str
    answer: str | int
    kind: Literal["int_greedy", "text_greedy", "choice_logprob"] = _INT
    choices: list[str] | None = None

    key_rules: ClassVar[Rules] = (only("choices", when="kind", is_=_CHOICE),)

    def check(self) -> None:
        """Raises `ConfigError` if the keys do not fit together."""
        key, answer = f"{_CASES}: case '{self.id}'", self.answer
        if self.kind == _CHOICE and (not self.choices or answer not in self.choices or not all(self.choices)):
            raise ConfigError(
                f"{key}: answer: {answer!r} and choices: {self.choices} given with kind: {_CHOICE}, choices that are not"
                " empty expected, and the answer among them"
            )
        if self.kind == _INT and _first_integer(str(answer)) != str(answer):
            raise ConfigError(f"{key}: answer: {answer!r} given with kind: {_INT}, an integer such as 42 expected")
        if self.kind == _TEXT and not str(answer).strip():
            raise ConfigError(f"{key}: answer: {answer!r} given, a text expected")

    def is_right(self, text: str) -> bool:
        """Tells whether a generated text is the answer."""
        if self.kind == _INT:
            return _first_integer(text) == str(self.answer)
        return text.strip().startswith(str(self.answer).strip())


def _first_integer(text: str) -> str | None:
    found = _INTEGER.search(text)
    return None if found is None else str(int(found[0].replace(",", "")))


@choice(EvalConfig, "cases")
class CasesEvalConfig(GateConfig):
    """Questions with known answers: `accuracy` is the fraction that the model answers, `reference_accuracy` that of a
    reference, and `accuracy_drop` what the model lacks. Generated answers show what log-likelihoods hide.

    Attributes:
        cases: the questions, as `{id: sum, prompt: "2+2=", answer: 4}`.
        file: a file of JSON lines with more of them; null reads none.
        reference: name of the model in the section `refs` that is asked too; null asks none.
        max_new_tokens: largest number of tokens that are generated for an answer.
        min_student_accuracy: smallest `accuracy`; null allows any.
        max_accuracy_drop: largest `accuracy_drop`; null allows any.
    """

    cases: list[Case] = field(default_factory=list)
    file: str | None = None
    reference: str | None = "teacher"
    max_new_tokens: PositiveInt = 32
    min_student_accuracy: Fraction | None = None
    max_accuracy_drop: Fraction | None = None

    limits: ClassVar[Mapping[str, str]] = {"accuracy": "min_student_accuracy", "accuracy_drop": "max_accuracy_drop"}
    key_rules: ClassVar[Rules] = (
        some_of("cases", "file"),
        excludes("max_accuracy_drop", when="reference", is_=None, why="with which there is nothing to drop from"),
    )

    @property
    def own_scope(self) -> EvalScope:
        return EvalScope(references=() if self.reference is None else (self.reference,), next_tokens=True)

    @property
    def own_metrics(self) -> tuple[str, ...]:
        return ("accuracy", *(() if self.reference is None else ("reference_accuracy", "accuracy_drop")))

    def check(self) -> None:
        for case in self.cases:
            case.check()

    def check_opens(self, tokenizer: Callable[[], Any], seq_len: int, *, dry: bool) -> None:
        self._check_lengths(tokenizer(), self._all_cases(self._records()), None, seq_len)

    def open(self, ctx: EvalContext) -> Eval:
        self.check()
        records = from_main(self._records)  # the file of another process may differ
        note(f"{_CASES}: {self.title}: file", json.dumps([record for _, record in records]), evaluates=True)
        cases = self._all_cases(records)
        self._check_lengths(ctx.tokenizer, cases, ctx.enforce_bos, ctx.seq_len)
        return CasesEval(self, cases, ctx)

    def _records(self) -> list[tuple[str, dict[str, Any]]]:
        return [] if self.file is None else list(read_json_lines(self.file, _CASES))

    def _all_cases(self, records: Sequence[tuple[str, dict[str, Any]]]) -> list[Case]:
        """Those in the configuration, then those of the records. Raises `ConfigError` if two have the same id."""
        cases = [*self.cases, *(_decoded(*one) for one in records)]
        if not cases:
            raise ConfigError(f"{_CASES}: {self.file} has no case")
        ids = [case.id for case in cases]
        if equal := [one for one in ids if ids.count(one) > 1]:
            raise ConfigError(f"{_CASES}: {ids.count(equal[0])} cases have the id '{equal[0]}'. Give each its own")
        return cases

    def _check_lengths(self, tokenizer: Any, cases: Sequence[Case], bos: bool | None, seq_len: int) -> None:
        for case in cases:
            texts = [case.prompt] if case.choices is None else [f"{case.prompt}{text}" for text in case.choices]
            longest = max(len(prompt_ids(tokenizer, text, bos=bos)) for text in texts)
            new = self.max_new_tokens if case.choices is None else 0
            check_fits(f"{_CASES}: case '{case.id}'", longest, new, seq_len)


class CasesEval(Eval):
    """The metrics of `CasesEvalConfig`."""

    def __init__(self, config: CasesEvalConfig, cases: Sequence[Case], ctx: EvalContext):
        self._config, self._cases, self._ctx = config, cases, ctx

    def run(self, model: LanguageModel) -> dict[str, float]:
        own = self._answered(self._ctx.batched(model, _BATCH))
        metrics = {"accuracy": sum(own.values()) / len(own)}
        if self._config.reference is not None:
            reference = self._ctx.reference(self._config.reference)
            theirs = self._answered(BatchedModel(reference, _BATCH, self._ctx.progress))
            metrics["reference_accuracy"] = sum(theirs.values()) / len(theirs)
            metrics["accuracy_drop"] = metrics["reference_accuracy"] - metrics["accuracy"]
            if lost := [name for name, right in theirs.items() if right and not own[name]]:
                self._ctx.log(f"{self._config.title}: only the reference answers {listed(lost)}")
        return {f"{self._config.title}/{name}": value for name, value in metrics.items()}

    def _answered(self, model: BatchedModel) -> dict[str, bool]:
        tokenizer = self._ctx.tokenizer
        config = GenerationConfig(self._config.max_new_tokens, temperature=0.0, stop_ids=tokenizer.stop_ids)
        asked = [case for case in self._cases if case.choices is None]
        texts = map(tokenizer.decode, model.generate([self._ids(case.prompt) for case in asked], config))
        right = {case.id: case.is_right(text) for case, text in zip(asked, texts, strict=True)}
        pairs = [self._pair(case.prompt, text) for case in self._cases for text in case.choices or ()]
        scored = iter(model.score(pairs))
        for case in (case for case in self._cases if case.choices is not None):
            likely = [(next(scored).log_likelihood, -number, text) for number, text in enumerate(case.choices or ())]
            right[case.id] = max(likely)[2] == case.answer
        return right

    def _pair(self, prompt: str, text: str) -> tuple[list[int], list[int]]:
        """The tokens of a prompt and of what follows, which may change the last tokens of the prompt."""
        before, whole = self._ids(prompt), self._ids(f"{prompt}{text}")
        same = max(1, min(num_shared(before, whole), len(whole) - 1))
        return whole[:same], whole[same:]

    def _ids(self, text: str) -> list[int]:
        return prompt_ids(self._ctx.tokenizer, text, bos=self._ctx.enforce_bos)


def _decoded(place: str, record: Mapping[str, Any]) -> Case:
    try:
        case = decode(Case, ConfigSource(dict(record)))
        case.check()
    except ConfigError as error:
        raise ConfigError(f"{_CASES}: {place}: {error}") from error
    return case


@choice(EvalConfig, "continuations")
class ContinuationsEvalConfig(GateConfig):
    """The beginnings of validation sequences, continued greedily by the model and by a reference. A model may predict a given
    text nearly as well as its reference, and yet write much worse, because it continues its own mistakes.

    `agreement` is the fraction of the reference's continuations that the model writes too, from their beginnings to the
    first other token; `token_agreement` the fraction of their tokens that are the model's in the same place. `delta_nll` is
    how many nats per token the reference finds the model's continuations less likely than its own (`nll` and
    `reference_nll`).

    Attributes:
        reference: name of the model to compare with in the section `refs`.
        prompts: number of sequences to continue; fewer if the validation data has fewer that are long enough.
        prompt_tokens: length of the beginnings.
        max_new_tokens: length of the continuations, unless they end earlier.
        min_agreement: smallest `agreement`; null allows any.
        max_delta_nll: largest `delta_nll`; null allows any.
    """

    own_metrics: ClassVar[tuple[str, ...]] = ("agreement", "token_agreement", "nll", "reference_nll", "delta_nll")
    limits: ClassVar[Mapping[str, str]] = {"agreement": "min_agreement", "delta_nll": "max_delta_nll"}

    reference: str = "teacher"
    prompts: PositiveInt = 32
    prompt_tokens: PositiveInt = 32
    max_new_tokens: PositiveInt = 32
    min_agreement: Fraction | None = None
    max_delta_nll: NonNegativeFloat | None = None

    @property
    def own_scope(self) -> EvalScope:
        return EvalScope(references=(self.reference,), validation=True, supervised=True, next_tokens=True)

    def check_opens(self, tokenizer: Callable[[], Any], seq_len: int, *, dry: bool) -> None:
        check_fits(
            "evals: type continuations: a beginning (prompt_tokens)", self.prompt_tokens, self.max_new_tokens, seq_len
        )

    def open(self, ctx: EvalContext) -> Eval:
        self.check_opens(lambda: ctx.tokenizer, ctx.seq_len, dry=False)
        return ContinuationsEval(self, ctx)


class ContinuationsEval(Eval):
    """The metrics of `ContinuationsEvalConfig`."""

    def __init__(self, config: ContinuationsEvalConfig, ctx: EvalContext):
        self._config, self._ctx = config, ctx
        # The token that ends a text is a part of it: where a text ends, the reference judges too.
        stop_ids = ctx.tokenizer.stop_ids
        self._generation = GenerationConfig(config.max_new_tokens, temperature=0.0, stop_ids=stop_ids, with_stop=True)

    def run(self, model: LanguageModel) -> dict[str, float]:
        """The metrics; empty without validation data."""
        prompts = list(itertools.islice(self._prompts(), self._config.prompts))
        if not prompts:
            return {}
        own = self._ctx.batched(model, _BATCH).generate(prompts, self._generation)
        reference = BatchedModel(self._ctx.reference(self._config.reference), _BATCH, self._ctx.progress)
        theirs = reference.generate(prompts, self._generation)
        nll, reference_nll = (_nll(reference, prompts, texts) for texts in (own, theirs))
        shared = [num_shared(*pair) for pair in zip(own, theirs, strict=True)]
        equal = [sum(a == b for a, b in zip(*pair, strict=False)) for pair in zip(own, theirs, strict=True)]
        total = sum(map(len, theirs))
        metrics = {
            "agreement": sum(shared) / total,
            "token_agreement": sum(equal) / total,
            "nll": nll,
            "reference_nll": reference_nll,
            "delta_nll": nll - reference_nll,
        }
        return {f"{self._config.title}/{name}": value for name, value in metrics.items()}

    def _prompts(self) -> Iterator[list[int]]:
        """The beginnings of the sequences that begin with one document."""
        size = self._config.prompt_tokens
        for tokens, segments in self._ctx.texts():
            for row, segment_ids in zip(tokens[:, :size], segments[:, :size], strict=True):
                if segment_ids[0] != 0 and (segment_ids == segment_ids[0]).all():
                    yield row.tolist()


def _nll(model: BatchedModel, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> float:
    """Mean negative log-likelihood of the tokens of continuations, in nats."""
    scored = model.score(list(zip(prompts, texts, strict=True)))
    return -math.fsum(one.log_likelihood for one in scored) / sum(map(len, texts))
