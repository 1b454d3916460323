"""Measures validation loss, bits per byte, and the entropy of a model's predictions (Shannon 1948)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.precision import Precision
from jaxlm.core.values.permutation import in_row_order
from jaxlm.core.values.sums import DummyPrefix
from jaxlm.evals.base import Eval, EvalConfig, EvalContext, EvalMetrics, EvalScope, Score
from jaxlm.evals.batches import read_sums
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.chunked_loss import ChunkLogits
from jaxlm.models.loss import token_numbers
from jaxlm.reading.choices import choice


@choice(EvalConfig, "loss")
class LossEvalConfig(EvalConfig):
    """Mean next-token loss in nats and bits per byte over one pass of the validation data. With several sources, they are
    also logged per source and per tag, and averaged over sources (`macro_loss`, `macro_bpb`).

    Bits per byte sums the loss of the tokens that represent text and divides by the number of bytes of that text. Special
    tokens have no bytes and are excluded from both. Models with different tokenizers can be compared by it. It is left out
    for tokenizers that are neither byte-level nor SentencePiece.
    """

    metrics: ClassVar[EvalMetrics] = EvalMetrics(("loss", "bpb", "macro_loss", "macro_bpb", "best_bpb"))
    scope: ClassVar[EvalScope] = EvalScope(validation=True, supervised=True)

    def open(self, ctx: EvalContext) -> Eval:
        return LossEval(ctx)


@dataclass(frozen=True)
class EvalLoss:
    """Sums from which mean loss and bits per byte are computed.

    Attributes:
        nats: total loss of all targets.
        tokens: number of targets.
        text_nats: total loss of the targets that represent text.
        text_bytes: number of bytes of that text.
    """

    nats: float
    tokens: float
    text_nats: float
    text_bytes: float

    @property
    def loss(self) -> float:
        """Mean loss in nats per token; NaN without tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text; NaN without text."""
        return self.text_nats / math.log(2) / self.text_bytes if self.text_bytes else math.nan

    def __add__(self, other: "EvalLoss") -> "EvalLoss":
        return EvalLoss(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


NOTHING = EvalLoss(0.0, 0.0, 0.0, 0.0)


def perplexity(nats: float) -> float:
    """exp, infinite where floats end."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def by_group(sums: Mapping[str, EvalLoss], tags: Mapping[str, Sequence[str]]) -> dict[str, EvalLoss]:
    """The sums of each source, and of each tag over all sources with that tag; every token has the same weight.

    Both arguments are by source. A tag with the same name as a source is merged with it.
    """
    groups: dict[str, EvalLoss] = {}
    for name, part in sums.items():
        for group in dict.fromkeys((name, *tags.get(name, ()))):
            groups[group] = groups.get(group, NOTHING) + part
    return groups


def macro(sums: Iterable[EvalLoss]) -> dict[str, float]:
    """`macro_loss` and `macro_bpb`: means over sources, with equal weight for each source; NaN without sources."""
    parts = [part for part in sums if part.tokens]
    bits = [part.bits_per_byte for part in parts if part.text_bytes]
    return {
        "macro_loss": math.fsum(part.loss for part in parts) / len(parts) if parts else math.nan,
        "macro_bpb": math.fsum(bits) / len(bits) if bits else math.nan,
    }


@dataclass(eq=False)
class LossMeter:
    """Sums losses over batches in float64 on the host, with at most a few batches queued.

    With groups, each target is added to the sums of its group.

    Attributes:
        score, token_bytes, dummy_prefix: as in `EvalContext`.
    """

    precision: Precision
    score: Score
    token_bytes: np.ndarray | None
    num_groups: int = 1
    dummy_prefix: DummyPrefix | None = None

    def __post_init__(self):
        self._cast = jax.jit(self.precision.cast_to_compute)
        self._totals = jax.jit(self._batch_totals)

    def measure(self, model: LanguageModel, batches: Iterable[tuple[Any, jax.Array | None]]) -> tuple[EvalLoss, ...]:
        """The sums of each group.

        Args:
            batches: batches, each with the group of every target in the order of the text, int32 [batch, position]; None
                means that all targets are in the first group.
        """
        model = self._cast(model)
        results = (self._totals(model, batch, groups) for batch, groups in batches)
        sums = read_sums(results, (4, self.num_groups))
        return tuple(EvalLoss(*map(float, column)) for column in sums.T)

    def _batch_totals(self, model: LanguageModel, batch: Any, groups: jax.Array | None) -> tuple[jax.Array, ...]:
        """The fields of `EvalLoss`, each as float32 [group]."""
        scores = self.score(model, batch)
        nats = scores.nats * scores.mask
        targets = scores.targets
        if groups is not None:
            groups = in_row_order(hax.named(groups, targets.axes), batch.supervised().order).array
        if self.token_bytes is None:
            num_bytes = is_text = 0 * scores.mask
        else:
            num_bytes = hax.named(jnp.asarray(self.token_bytes)[targets.array], targets.axes) * scores.mask
            is_text = num_bytes > 0
        if self.dummy_prefix is not None and self.token_bytes is not None:
            spaces = hax.named(jnp.asarray(self.dummy_prefix.tokens)[targets.array], targets.axes)
            num_bytes = num_bytes - (spaces & (scores.inputs == self.dummy_prefix.bos_id)) * scores.mask

        def add(x: hax.NamedArray) -> jax.Array:
            x = x.astype(jnp.float32)
            if groups is None:
                return hax.sum(x).scalar()[None]
            values = x.rearrange(targets.axes).array
            # XLA fuses the reduction, so the [batch, position, group] array is never materialized.
            in_group = groups[..., None] == jnp.arange(self.num_groups)
            return jnp.sum(jnp.where(in_group, values[..., None], 0.0), axis=(0, 1))

        return add(nats), add(scores.mask), add(nats * is_text), add(num_bytes)


class LossEval(Eval):
    """`loss` and `bpb` of the validation data."""

    def __init__(self, ctx: EvalContext):
        self._sets = ctx.validation
        self._has_bytes = ctx.token_bytes is not None
        self._meter = LossMeter(ctx.precision, ctx.score, ctx.token_bytes, dummy_prefix=ctx.dummy_prefix)

    def run(self, model: LanguageModel) -> dict[str, float]:
        """The metrics; empty without validation data."""
        sums = {
            data_set.name: self._meter.measure(model, ((batch, None) for batch in data_set.batches()))[0]
            for data_set in self._sets
        }
        if not sums:
            return {}
        metrics = self._metrics("", sum(sums.values(), NOTHING))
        groups = by_group(sums, {data_set.name: data_set.tags for data_set in self._sets})
        for group in (group for group in groups if group):
            metrics |= self._metrics(f"{group}/", groups[group])
        means = macro(sums.values()) if len(sums) > 1 else {}
        return metrics | {name: value for name, value in means.items() if self._has_bytes or name != "macro_bpb"}

    def _metrics(self, prefix: str, sums: EvalLoss) -> dict[str, float]:
        bits = {f"{prefix}bpb": sums.bits_per_byte} if self._has_bytes else {}
        return {f"{prefix}loss": sums.loss, **bits}


@choice(EvalConfig, "entropy")
class EntropyEvalConfig(EvalConfig):
    """Mean entropy in nats of the distributions that predict the targets of the validation data, over one pass of it. It logs
    `entropy`, and with several sources `<source>/entropy`. Of pairs, it reads the chosen completions.
    """

    metrics: ClassVar[EvalMetrics] = EvalMetrics(("entropy",))
    scope: ClassVar[EvalScope] = EvalScope(validation=True, supervised=True)

    def open(self, ctx: EvalContext) -> Eval:
        return EntropyEval(ctx)


class EntropyEval(Eval):
    """The metrics of `EntropyEvalConfig`."""

    def __init__(self, ctx: EvalContext):
        self._ctx = ctx
        self._totals = jax.jit(_batch_totals)

    def run(self, model: LanguageModel) -> dict[str, float]:
        model, sets = self._ctx.cast(model), self._ctx.validation
        # Of the entropies, and the number of targets.
        sums = {one.name: read_sums((self._totals(model, batch) for batch in one.batches()), 2) for one in sets}
        total, weight = sum(sums.values(), np.zeros(2))
        if not weight:
            return {}
        by_source = {f"{name}/entropy": float(one[0] / one[1]) for name, one in sums.items() if name and one[1]}
        return {"entropy": float(total / weight), **by_source}


def _batch_totals(model: LanguageModel, batch: Any) -> jax.Array:
    batch = batch.supervised()
    hidden = model.hidden(Inputs.of(batch)).final
    entropies = token_numbers(ChunkLogits.entropy, hidden, model.lm_head(), batch.targets, **model.traits.loss_options)
    return jnp.stack([hax.sum(entropies * batch.loss_mask).array, hax.sum(batch.loss_mask).array])
