"""Compares what a model and a reference compute on the same text: attention, residual streams, predictions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from jaxlm.core.axes import LAYERS, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import AboveOne, NonNegativeFloat
from jaxlm.evals.base import Eval, EvalConfig, EvalContext
from jaxlm.evals.batches import read_sums
from jaxlm.evals.gate import PairGateConfig
from jaxlm.evals.loss import perplexity
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.distillation.layerwise import layer_body, layer_streams
from jaxlm.reading.choices import choice

_ATTENTION, _LOGITS = "attention", "logits"
_LOGIT_CHUNK = 64  # positions per row for which logits are computed at once


@dataclass(frozen=True)
class L1Limits:
    """Limits of mean absolute differences from a reference.

    Attributes:
        max_mean_l1: largest mean over all batches (and layers); null allows any.
        max_max_l1: largest mean of a batch (in a layer); null allows any.
    """

    max_mean_l1: NonNegativeFloat | None = None
    max_max_l1: NonNegativeFloat | None = None


@choice(EvalConfig, "compare")
class CompareEvalConfig(PairGateConfig):
    """Mean absolute differences from a reference, over all features of all tokens that are not padding: of the outputs of
    each layer's attention, and of the logits. Each model computes on its own hidden states.

    `mean_l1` is the mean of the differences of batches (and layers), `max_l1` the largest of them, and `relative` the sum of
    all differences divided by the sum of the reference's absolute values. The logits also have `max_abs`, the largest single
    difference, and every layer has its own `attention/layer_N/l1` and `relative`.

    Attributes:
        attention: limits of the attention outputs; null does not compare them. Both models must have the same number of
            layers and features.
        logits: limits of the logits; null does not compare them.
    """

    own_metrics: ClassVar[None] = None
    limits: ClassVar[Mapping[str, str]] = {
        f"{name}/{what}": f"{name}.max_{what}" for name in (_ATTENTION, _LOGITS) for what in ("mean_l1", "max_l1")
    }

    attention: L1Limits | None = field(default_factory=L1Limits)
    logits: L1Limits | None = field(default_factory=L1Limits)

    def check(self) -> None:
        if self.attention is None and self.logits is None:
            raise ConfigError("evals: type compare: attention and logits are both null, so nothing is compared")

    def check_model(self, model: LanguageModel, references: Mapping[str, LanguageModel] | None) -> None:
        if self.attention is None or references is None:
            return
        key, reference = "evals: type compare: attention", references[self.reference]
        own, theirs = (layer_body(one, _ATTENTION, key, "Set it to null").num_layers for one in (model, reference))
        if own != theirs:
            raise ConfigError(
                f"{key}: the model has {own} layers and the reference {theirs}, so it is not known which of them to compare."
                " Set it to null"
            )
        widths = [one.tokens.Embed.size for one in (model, reference)]  # pyright: ignore[reportAttributeAccessIssue]
        if widths[0] != widths[1]:
            raise ConfigError(
                f"{key}: the model has {widths[0]} features and the reference {widths[1]}, so they cannot be compared. Set it"
                " to null"
            )

    def open(self, ctx: EvalContext) -> Eval:
        self.check()
        return CompareEval(self, ctx)


class CompareEval(Eval):
    """The metrics of `CompareEvalConfig`."""

    def __init__(self, config: CompareEvalConfig, ctx: EvalContext):
        self._config, self._ctx = config, ctx
        self._differences = jax.jit(self._of_batch, out_shardings=ctx.layout.replicated())

    def run(self, model: LanguageModel) -> dict[str, float]:
        """The metrics; empty without validation data."""
        model, reference = self._ctx.cast(model), self._ctx.reference(self._config.reference)
        measured: dict[str, list[np.ndarray]] = {_ATTENTION: [], _LOGITS: []}
        for batch in self._ctx.batches(self._config.batches):
            # One at a time: a batch has the hidden states of all layers of both models.
            for name, sums in jax.device_get(self._differences(model, reference, batch)).items():
                if sums[..., 2].all():  # a batch may be padding alone
                    measured[name].append(np.asarray(sums, np.float64))
        metrics: dict[str, float] = {}
        if measured[_ATTENTION]:
            metrics |= _summary(_ATTENTION, np.stack(measured[_ATTENTION]))
            for layer, of_layer in enumerate(np.stack(measured[_ATTENTION], axis=1)):
                own = _summary(f"{_ATTENTION}/layer_{layer}", of_layer[:, None])
                metrics |= {name.replace("mean_l1", "l1"): value for name, value in own.items() if "max_" not in name}
        if measured[_LOGITS]:
            logits = np.stack(measured[_LOGITS])
            metrics |= _summary(_LOGITS, logits[:, None]) | {f"{_LOGITS}/max_abs": float(logits[:, 3].max())}
        return {f"{self._config.title}/{name}": value for name, value in metrics.items()}

    def _of_batch(self, model: LanguageModel, reference: LanguageModel, batch) -> dict[str, jax.Array]:
        """Sums over the batch: of differences, of the reference's values, and the number of values, then the largest
        difference; {name: [layer, sum]} or [sum]."""
        batch = batch.supervised()
        inputs = Inputs.of(batch)
        counted = NamedArray(batch.segment_ids.array != 0, batch.segment_ids.axes)
        models, found = (model, reference), {}
        if self._config.attention is not None:
            own, theirs = (layer_streams(one, inputs, _ATTENTION).targets for one in models)
            layers = range(own.axis_size(LAYERS))
            found[_ATTENTION] = jnp.stack([_sums(own[LAYERS, n], theirs[LAYERS, n], counted) for n in layers])
        if self._config.logits is not None:
            found[_LOGITS] = _logit_sums(models, [one.hidden(inputs).final for one in models], counted)
        return found


def _sums(own: NamedArray, theirs: NamedArray, counted: NamedArray) -> jax.Array:
    """float32 [4], as in `CompareEval._of_batch`. Args: counted: bool {batch, position}, the tokens to compare."""
    theirs = theirs.rearrange(own.axes).astype(jnp.float32)
    difference = hax.where(counted, abs(own.astype(jnp.float32) - theirs), 0.0)
    size = hax.where(counted, abs(theirs), 0.0)
    features = math.prod(axis.size for axis in own.axes) // math.prod(axis.size for axis in counted.axes)
    parts = (hax.sum(difference), hax.sum(size), features * hax.sum(counted.astype(jnp.float32)), hax.max(difference))
    return jnp.stack([part.scalar() for part in parts])


def _logit_sums(models: tuple[LanguageModel, ...], finals: list[NamedArray], counted: NamedArray) -> jax.Array:
    """`_sums` of the logits, which never exist for all tokens at once."""
    size = counted.axis_size(POSITION)
    chunk = next(length for length in range(min(_LOGIT_CHUNK, size), 0, -1) if size % length == 0)

    def add(total: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        at = lambda x: x.slice(POSITION, start=start, length=chunk)  # noqa: E731
        own, theirs = (model.logits(at(final)) for model, final in zip(models, finals, strict=True))
        part = _sums(own, theirs, at(counted))
        return jnp.concatenate([total[:3] + part[:3], jnp.maximum(total[3:], part[3:])]), None

    return jax.lax.scan(add, jnp.zeros(4, jnp.float32), jnp.arange(0, size, chunk))[0]


def _summary(name: str, sums: np.ndarray) -> dict[str, float]:
    """The metrics of sums [batch, layer, sum]."""
    means = sums[..., 0] / sums[..., 2]
    total, size = sums[..., 0].sum(), sums[..., 1].sum()
    relative = total / size if size else (math.inf if total else 0.0)
    return {
        f"{name}/mean_l1": float(means.mean()),
        f"{name}/max_l1": float(means.max()),
        f"{name}/relative": float(relative),
    }


@choice(EvalConfig, "fidelity")
class FidelityEvalConfig(PairGateConfig):
    """Mean loss of the model and of a reference on the same tokens in nats, `nll` and `reference_nll`; their difference
    `delta_nll`, which is positive if the model is worse; and `ppl_ratio`, the exponential of that.

    Attributes:
        max_delta_nll: largest `delta_nll`; null allows any.
        max_ppl_ratio: largest `ppl_ratio`; null allows any.
    """

    own_metrics: ClassVar[tuple[str, ...]] = ("nll", "reference_nll", "delta_nll", "ppl_ratio")
    limits: ClassVar[Mapping[str, str]] = {"delta_nll": "max_delta_nll", "ppl_ratio": "max_ppl_ratio"}

    max_delta_nll: NonNegativeFloat | None = 0.05
    max_ppl_ratio: AboveOne | None = 1.05

    def open(self, ctx: EvalContext) -> Eval:
        return FidelityEval(self, ctx)


class FidelityEval(Eval):
    """The metrics of `FidelityEvalConfig`."""

    def __init__(self, config: FidelityEvalConfig, ctx: EvalContext):
        self._config, self._ctx = config, ctx
        self._sums = jax.jit(lambda model, batch: ctx.score(model, batch).sums(), out_shardings=ctx.layout.replicated())

    def run(self, model: LanguageModel) -> dict[str, float]:
        """The metrics; empty without validation data."""
        own = self._mean_loss(self._ctx.cast(model))
        if math.isnan(own[1]):
            return {}
        theirs = self._mean_loss(self._ctx.reference(self._config.reference))
        delta = own[0] - theirs[0]
        metrics = {"nll": own[0], "reference_nll": theirs[0], "delta_nll": delta, "ppl_ratio": perplexity(delta)}
        return {f"{self._config.title}/{name}": value for name, value in metrics.items()}

    def _mean_loss(self, model: LanguageModel) -> tuple[float, float]:
        """The mean loss, and the number of targets; NaN without targets."""
        sums = read_sums((self._sums(model, batch) for batch in self._ctx.batches(self._config.batches)), 2)
        return (float(sums[0] / sums[1]), float(sums[1])) if sums[1] else (math.nan, math.nan)
