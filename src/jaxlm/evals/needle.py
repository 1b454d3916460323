"""Needle in a haystack: hides a pass key in a long text, and asks for it at the end.

Source: Kamradt 2023, "Needle In A Haystack - Pressure Testing LLMs" (github.com/gkamradt/LLMTest_NeedleInAHaystack): the
grid of lengths and depths, over real text; Mohtashami & Jaggi 2023, Landmark Attention (arXiv:2305.16300), section 4.2: the
sentences of the pass key; Hsieh et al. 2024, RULER (arXiv:2404.06654), section 3: the exact answer counts.

An answer counts if each of its tokens is the most likely one after the text and the answer's tokens before it. That is what
greedy decoding writes, from one forward pass.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import Fraction, NumDigits, PositiveInt, Seed
from jaxlm.core.values.pass_key import NEEDLE, PLACE, QUESTION
from jaxlm.evals.base import Eval, EvalConfig, EvalContext, EvalScope
from jaxlm.evals.batches import num_shared
from jaxlm.evals.gate import GateConfig
from jaxlm.models.base import LanguageModel
from jaxlm.reading.choices import choice

_KEY = "evals: type needle"


@choice(EvalConfig, "needle")
class NeedleEvalConfig(GateConfig):
    """Needle in a haystack: the fraction of hidden pass keys that the model finds, by length of the text (`needle/4096`), by
    length and depth (`needle/4096/depth_0.5`), and over all lengths (`needle/accuracy`). The haystack is validation text
    without special tokens. `needle.png` in the log folder shows the grid at the end of each phase.

    Attributes:
        lengths: tokens of a text, with pass key, question and answer. Null means the model's `seq_len`. Models with rotary
            embedding are asked beyond their `seq_len` too; others refuse it.
        depths: where the pass key is, as fractions of the haystack: 0 at the beginning, 1 right before the question.
        num_samples: texts for each length and depth, each with its own pass key and its own part of the haystack.
        needle: the text that is hidden. `{key}` stands for the pass key.
        question: the end of the text. A space and the pass key answer it.
        digits: of a pass key.
        seed: of the pass keys. The same seed hides the same ones in every evaluation.
        batch_size: texts of the longest length that are read at once, rounded up to the devices that share a batch. Of
            shorter ones as many as have no more tokens.
        min_accuracy: smallest `needle/accuracy`; null allows any.
    """

    limits: ClassVar[Mapping[str, str]] = {"accuracy": "min_accuracy"}

    lengths: list[PositiveInt] | None = None
    depths: list[Fraction] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    num_samples: PositiveInt = 4
    needle: str = NEEDLE
    question: str = QUESTION
    digits: NumDigits = 5
    seed: Seed = 0
    batch_size: PositiveInt = 1
    min_accuracy: Fraction | None = None

    @property
    def own_scope(self) -> EvalScope:
        return EvalScope(validation=True, supervised=True, next_tokens=True)

    @property
    def own_metrics(self) -> tuple[str, ...] | None:
        if self.lengths is None:
            return None
        cells = (name for length in self.lengths for name in (str(length), *(_cell(length, d) for d in self.depths)))
        return ("accuracy", *cells)

    def check(self) -> None:
        for name in ("lengths", "depths"):
            given = getattr(self, name)
            if given is not None and (not given or len(set(given)) < len(given)):
                raise ConfigError(f"{_KEY}: {name}: {given} given, but at least one is expected, and each only once")
        if PLACE not in self.needle or PLACE in self.question:
            raise ConfigError(
                f"{_KEY}: needle: {self.needle!r} and question: {self.question!r} given, but {PLACE} stands for the pass key"
                " in the needle, and only there"
            )

    def check_model(self, model: LanguageModel, references: Mapping[str, LanguageModel] | None) -> None:
        self.check()
        longest = max(self.lengths_for(model.Pos.size))
        if longest > model.Pos.size and not model.traits.reads_beyond:
            raise ConfigError(
                f"{_KEY}: lengths: {longest} given, but the model cannot read more than model.seq_len: {model.Pos.size}"
                " tokens. Lower it, or name the phases in which it runs (phases)"
            )

    def check_opens(self, tokenizer: Callable[[], Any], seq_len: int, *, dry: bool) -> None:
        self._check_lengths(tokenizer(), (), seq_len)

    def open(self, ctx: EvalContext) -> Eval:
        self.check()
        before = ctx.tokenizer.ids_before(bos=ctx.enforce_bos)
        self._check_lengths(ctx.tokenizer, before, ctx.seq_len)
        return NeedleEval(self, ctx, list(before))

    def texts(self, tokenizer: Any, length: int, depth: float) -> Iterator["HiddenKey"]:
        """The pass keys of a cell, each with the tokens around it."""
        for number in range(self.num_samples):
            rng = np.random.default_rng((self.seed, length, round(depth * 1_000_000), number))
            yield self._hidden("".join(map(str, rng.integers(0, 10, self.digits))), tokenizer)

    def lengths_for(self, seq_len: int) -> list[int]:
        """The lengths for a model."""
        return [seq_len] if self.lengths is None else self.lengths

    def _hidden(self, key: str, tokenizer: Any) -> "HiddenKey":
        asked, answered = (tokenizer.encode(f"{self.question}{end}") for end in ("", f" {key}"))
        same = min(num_shared(asked, answered), len(answered) - 1)
        return HiddenKey(tokenizer.encode(self.needle.replace(PLACE, key)), answered[:same], answered[same:])

    def _check_lengths(self, tokenizer: Any, before: Any, seq_len: int) -> None:
        shortest = min(self.lengths_for(seq_len))
        depth = self.depths[0]
        longest = max(one.num_tokens for one in self.texts(tokenizer, shortest, depth)) + len(before)
        if longest >= shortest:
            raise ConfigError(
                f"{_KEY}: lengths: {shortest} given, but pass key, question and answer have {longest} tokens, which leaves no"
                f" room for a haystack. Give at least {2 * longest}, or a shorter needle and question"
            )


@dataclass(frozen=True)
class HiddenKey:
    """The tokens of a pass key's sentence, of the question, and of its answer."""

    needle: list[int]
    question: list[int]
    answer: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.needle) + len(self.question) + len(self.answer)


class NeedleEval(Eval):
    """The metrics of `NeedleEvalConfig`."""

    def __init__(self, config: NeedleEvalConfig, ctx: EvalContext, before: list[int]):
        self._config, self._ctx, self._before = config, ctx, before
        self._lengths = config.lengths_for(ctx.seq_len)
        self._text: np.ndarray | None = None

    def run(self, model: LanguageModel) -> dict[str, float]:
        """The metrics. Raises `ConfigError` if the validation text is shorter than the longest haystack."""
        config = self._config
        by_length: dict[int, float] = {}
        metrics: dict[str, float] = {}
        for length in self._lengths:
            pairs = [pair for depth in config.depths for pair in self._pairs(length, depth)]
            rows = config.batch_size * (max(self._lengths) // length)
            scored = self._ctx.batched(model, rows).score(pairs, max_length=length)
            found = np.array([one.is_greedy for one in scored], float).reshape(len(config.depths), -1)
            by_length[length] = metrics[str(length)] = float(found.mean())
            metrics |= {
                _cell(length, d): float(of_depth.mean()) for d, of_depth in zip(config.depths, found, strict=True)
            }
        metrics["accuracy"] = sum(by_length.values()) / len(by_length)
        return {f"{config.title}/{name}": value for name, value in metrics.items()}

    def _pairs(self, length: int, depth: float) -> Iterator[tuple[list[int], list[int]]]:
        """The texts of a cell, each with its answer."""
        for number, hidden in enumerate(self._config.texts(self._ctx.tokenizer, length, depth)):
            size = length - len(self._before) - hidden.num_tokens
            hay = self._hay(number, size)
            at = round(depth * size)
            yield [*self._before, *hay[:at], *hidden.needle, *hay[at:], *hidden.question], hidden.answer

    def _hay(self, number: int, size: int) -> list[int]:
        """The first tokens of a sample's part of the haystack. The parts overlap if the text is too short."""
        if self._text is None:
            self._text = self._read()
        samples, longest = self._config.num_samples, max(self._lengths)
        start = number * min(longest, (len(self._text) - longest) // max(1, samples - 1))
        return self._text[start : start + size].tolist()

    def _read(self) -> np.ndarray:
        """The beginning of the validation text, as much as all samples need, or all of it."""
        longest, special = max(self._lengths), self._ctx.tokenizer.is_special()
        missing = needed = longest * self._config.num_samples
        parts = []
        for tokens, segments in self._ctx.texts():
            parts.append(tokens[(segments != 0) & ~special[tokens]])
            missing -= len(parts[-1])
            if missing <= 0:
                break
        if needed - missing < longest:
            raise ConfigError(
                f"{_KEY}: lengths: {longest} given, but the validation text has {needed - missing:,} tokens. Add text to"
                " data.validation_urls, raise trainer.max_eval_batches, or lower lengths"
            )
        return np.concatenate(parts)[:needed]


def _cell(length: int, depth: float) -> str:
    return f"{length}/depth_{depth:g}"
