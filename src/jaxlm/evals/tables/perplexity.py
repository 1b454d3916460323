"""Loss and perplexity by context length."""

from itertools import islice
from typing import ClassVar

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.evals.loss import NOTHING, EvalLoss, LossMeter, perplexity
from jaxlm.evals.tables.base import DTYPE, MODEL, Column, Picture, Row, Subject, TableConfig, lengths_that_fit
from jaxlm.reading.choices import choice


@choice(TableConfig, "perplexity")
class PerplexityTableConfig(TableConfig):
    """Loss and perplexity of the validation data, by context length. All models read the same tokens.

    Attributes:
        seq_lens: context lengths; null measures the longest that all models can read.
        batches: most batches of each source in a repeat.
        repeats: number of times that a loss is measured, each on the next `batches` batches of the data. The table shows
            the mean over all tokens, and how far the losses of the repeats are apart.
    """

    reads_validation: ClassVar[bool] = True
    columns: ClassVar[tuple[Column, ...]] = (
        MODEL,
        DTYPE,
        Column("seq_len", "context", "tokens of a sequence"),
        Column("tokens", "tokens", "number of tokens that were predicted", ",.0f"),
        Column("loss", "loss (nats)", "mean loss in nats per token, over all repeats", ".4f"),
        Column("perplexity", "perplexity", "exp(loss)", ".3f"),
        Column("repeats", "repeats", "number of parts of the data"),
        Column("loss_range", "range of losses", "largest minus smallest loss of a repeat", ".4f"),
    )
    picture: ClassVar[Picture | None] = Picture("_vs_context", "seq_len", ("perplexity",))

    seq_lens: list[PositiveInt] | None = None
    batches: PositiveInt = 100
    repeats: PositiveInt = 1

    @property
    def caption(self) -> str:
        return f"Loss and perplexity of validation data, at most {self.batches * self.repeats} batches of each source."

    def check(self, key: str, max_tokens: int) -> None:
        self._lengths(key, max_tokens)

    def rows(self, subject: Subject) -> list[Row]:
        meter = LossMeter(subject.precision, subject.score, None)
        return [self._row(subject, meter, n) for n in self._lengths("tables", subject.max_tokens)]

    def _lengths(self, key: str, max_tokens: int) -> tuple[int, ...]:
        return lengths_that_fit(f"{key}.seq_lens", self.seq_lens, [max_tokens], max_tokens, at_least=2)

    def _row(self, subject: Subject, meter: LossMeter, seq_len: int) -> Row:
        parts = self._parts(subject, meter, seq_len)
        total = sum(parts, NOTHING)
        losses = [part.loss for part in parts]
        return {
            "model": subject.name,
            "dtype": str(subject.precision.compute),
            "seq_len": seq_len,
            "tokens": round(total.tokens),
            "loss": total.loss,
            "perplexity": perplexity(total.loss),
            "repeats": self.repeats,
            "loss_range": max(losses) - min(losses),
        }

    def _parts(self, subject: Subject, meter: LossMeter, seq_len: int) -> list[EvalLoss]:
        """The sums of each repeat, over all sources."""
        parts = [NOTHING] * self.repeats
        for source in subject.validation(seq_len):
            batches = ((batch, None) for batch in source.batches())
            for number in range(self.repeats):
                parts[number] += meter.measure(subject.model, islice(batches, self.batches))[0]
        empty = [number for number, part in enumerate(parts) if not part.tokens]
        if empty:
            raise ConfigError(
                f"tables: type perplexity: {self.repeats} repeats of {self.batches} batches given, but the validation data is"
                f" used up after {empty[0]}, with sequences of {seq_len} tokens. Lower repeats or batches, or add data"
            )
        return parts
