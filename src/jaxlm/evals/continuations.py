"""Compares the texts that a model and a reference write."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from haliax import NamedArray

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import Fraction, NonNegativeFloat, PositiveInt
from jaxlm.core.values.permutation import in_text_order
from jaxlm.evals.base import Eval, EvalConfig, EvalContext
from jaxlm.evals.gate import GateConfig, at_least, at_most
from jaxlm.evals.limits import Limit
from jaxlm.evals.scoring import score
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens
from jaxlm.models.inference.unstacked import Generator
from jaxlm.reading.choices import choice

_KEY = "evals: type continuations"
_BATCH = 16  # rows that are generated or scored at once


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

    reads_supervised: ClassVar[bool] = True
    reads_validation: ClassVar[bool] = True
    predicts_next_tokens: ClassVar[bool] = True

    reference: str = "teacher"
    prompts: PositiveInt = 32
    prompt_tokens: PositiveInt = 32
    max_new_tokens: PositiveInt = 32
    min_agreement: Fraction | None = None
    max_delta_nll: NonNegativeFloat | None = None

    @property
    def references(self) -> tuple[str, ...]:
        return (self.reference,)

    @property
    def own_metrics(self) -> tuple[str, ...]:
        return ("agreement", "token_agreement", "nll", "reference_nll", "delta_nll")

    @property
    def own_limits(self) -> Mapping[str, Limit | None]:
        return {
            "agreement": at_least(self.min_agreement, "min_agreement"),
            "delta_nll": at_most(self.max_delta_nll, "max_delta_nll"),
        }

    def check_opens(self, tokenizer: Callable[[], Any], seq_len: int, *, dry: bool) -> None:
        if self.prompt_tokens + self.max_new_tokens > seq_len:
            raise ConfigError(
                f"{_KEY}: prompt_tokens: {self.prompt_tokens} and max_new_tokens: {self.max_new_tokens} together"
                f" exceed model.seq_len: {seq_len}. Lower one of them"
            )

    def open(self, ctx: EvalContext) -> Eval:
        self.check_opens(lambda: ctx.tokenizer, ctx.seq_len, dry=False)
        return ContinuationsEval(self, ctx)


class ContinuationsEval(Eval):
    """The metrics of `ContinuationsEvalConfig`."""

    def __init__(self, config: ContinuationsEvalConfig, ctx: EvalContext):
        self._config, self._ctx = config, ctx
        self._cast = jax.jit(ctx.precision.cast_to_compute)
        self._columns = jax.jit(token_columns, out_shardings=ctx.layout.replicated())
        # The token that ends a text is a part of it: where a text ends, the reference judges too.
        stop_ids = ctx.tokenizer.stop_ids
        self._generation = GenerationConfig(config.max_new_tokens, temperature=0.0, stop_ids=stop_ids, with_stop=True)

    def run(self, model: LanguageModel) -> dict[str, float]:
        """The metrics; empty without validation data."""
        prompts = list(itertools.islice(self._prompts(), self._config.prompts))
        if not prompts:
            return {}
        own = self._written(self._cast(model), prompts)
        reference = self._ctx.reference(self._config.reference)
        theirs = self._written(reference, prompts)
        nll, reference_nll = (self._nll(reference, prompts, texts) for texts in (own, theirs))
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
        for source in self._ctx.validation:
            for batch in source.batches():
                tokens, segments = (np.asarray(column) for column in self._columns(batch))
                for row, segment_ids in zip(tokens[:, :size], segments[:, :size], strict=True):
                    if segment_ids[0] != 0 and (segment_ids == segment_ids[0]).all():
                        yield row.tolist()

    def _written(self, model: LanguageModel, prompts: Sequence[list[int]]) -> list[list[int]]:
        generator, texts = Generator.of(model), []
        for start in range(0, len(prompts), _BATCH):
            texts += generate_tokens(generator, prompts[start : start + _BATCH], self._generation)
            self._ctx.progress()
        return texts

    def _nll(self, model: LanguageModel, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> float:
        """Mean negative log-likelihood of the tokens of continuations, in nats."""
        scored = score(model, list(zip(prompts, texts, strict=True)), _BATCH, self._ctx.progress)
        return -math.fsum(one.log_likelihood for one in scored) / sum(map(len, texts))


def token_columns(batch) -> tuple[jax.Array, jax.Array]:
    """int32 [row, position]: tokens and segments in the order of the text."""
    batch = batch.supervised()

    def of(column: NamedArray) -> jax.Array:
        return in_text_order(column, batch.order).rearrange((BATCH, POSITION)).array

    return of(batch.tokens), of(batch.segment_ids)


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Counts the tokens that both begin with."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
