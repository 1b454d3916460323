"""Direct preference optimization: the model prefers the chosen completion of each pair more than a reference does.

Source: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv:2305.18290), equation 7; the variants are in
`jaxlm.objectives.pair_losses`, the reference that follows the model in `jaxlm.objectives.completions`.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import haliax as hax
import jax
import jax.numpy as jnp
from annotated_types import Interval

from jaxlm.core.axes import PAIR, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import Fraction, NonNegativeFloat, PositiveFloat, ProperFraction
from jaxlm.core.rules import Rules, excludes, only
from jaxlm.core.values.batch_types import PairBatch
from jaxlm.core.values.permutation import in_row_order, in_text_order
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import LanguageModel
from jaxlm.models.chunked_loss import ChunkLogits
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, ObjectiveFacts, auxiliary_terms, auxiliary_weight
from jaxlm.objectives.completions import (
    ReferencedObjective,
    by_pair,
    is_pair,
    token_logps,
)
from jaxlm.objectives.pair_losses import (
    BATCH_LOSSES,
    OF_MARGIN,
    PAIR_LOSSES,
    WITH_REFERENCE,
    PairLogps,
    PairLossOptions,
    scored,
)
from jaxlm.reading.choices import choice

_GAMMA, _ALPHA, _TAU = PairLossOptions.simpo_gamma, PairLossOptions.alphapo_alpha, PairLossOptions.discopop_tau
LossName = Literal[
    "sigmoid",
    "robust",
    "ipo",
    "hinge",
    "apo_zero",
    "apo_down",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "discopop",
    "aot",
    "aot_unpaired",
    "simpo",
    "alphapo",
    "orpo",
]
_SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired", "simpo", "alphapo")
_NAMES = (*PAIR_LOSSES, *BATCH_LOSSES)
_OF_REFERENCE = (*WITH_REFERENCE, *BATCH_LOSSES)
_F_ALPHA = 0.5


@choice(ObjectiveConfig, "dpo")
class Dpo(ReferencedObjective):
    """Preference pairs (`data.type: pairs`): raises the likelihood of the chosen completion over that of the rejected one,
    compared with a reference. The loss is averaged over pairs.

    Attributes:
        loss_type: `sigmoid` (DPO; with `label_smoothing`, conservative DPO), `robust`, `ipo`, `hinge`, `apo_zero`,
            `apo_down`, `exo_pair`, `nca_pair`, `bco_pair`, `sppo_hard`, `discopop`, `aot` or `aot_unpaired`, which compare
            the pairs of a batch with each other, or without a reference `simpo`, `alphapo`, `orpo`. A mapping from names
            to weights adds several up.
        beta: how closely the model stays to the reference. For `ipo` it is tau, for `sppo_hard` 1 / eta, for `orpo` lambda,
            for `simpo` and `alphapo` the scale of the margin, usually 2 or more.
        label_smoothing: fraction of pairs that are assumed to be swapped, for `sigmoid`, `robust`, `aot`, `aot_unpaired`,
            `simpo`, `alphapo` and `exo_pair`, which needs one above 0.
        f_divergence: from which the model stays close to the reference: `reverse_kl`, `forward_kl`, `js_divergence` or
            `alpha_divergence`, for losses of the margin (`sigmoid`, `robust`, `ipo`, `hinge`, `exo_pair`, `discopop`).
        f_divergence_alpha: of `alpha_divergence`: `forward_kl` is the limit at 0, and `reverse_kl` at 1.
        ld_alpha: weight of the tokens by which the longer completion of a pair exceeds the shorter (LD-DPO); null is 1.
        wpo: weight each pair by how likely its completions are for the model, per token and relative to what it samples
            (WPO).
        reduction: the likelihood of a completion is that of all its tokens (`sum`), or the geometric mean over them (`mean`).
        simpo_gamma: the margin that `simpo` and `alphapo` aim at.
        alphapo_alpha: how much more a change of an unlikely completion counts with `alphapo`; the limit at 0 is `simpo`.
        discopop_tau: how far around a margin of 0 `discopop` changes from the exponential to the logistic loss.
        sft_weight: weight of the next-token loss of the chosen completion, averaged over its tokens. Null is 1 with `orpo`,
            which has it by definition, and otherwise 0.
    """

    loss_type: LossName | dict[str, PositiveFloat] = "sigmoid"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    f_divergence_alpha: ProperFraction = _F_ALPHA
    ld_alpha: Fraction | None = None
    wpo: bool = False
    reduction: Literal["sum", "mean"] = "sum"
    simpo_gamma: NonNegativeFloat = _GAMMA
    alphapo_alpha: PositiveFloat = _ALPHA
    discopop_tau: PositiveFloat = _TAU
    sft_weight: NonNegativeFloat | None = None

    key_rules: ClassVar[Rules] = (
        only("f_divergence_alpha", when="f_divergence", is_="alpha_divergence"),
        excludes("f_divergence", when="reference", is_="none", why="from which nothing diverges"),
    )

    def __post_init__(self):
        names = self._losses
        unknown = [name for name in names if name not in _NAMES]
        if unknown or not names:
            value = f"'{unknown[0]}'" if unknown else "an empty mapping"
            raise ConfigError(f"objective.loss_type: {value} given, expected some of: {', '.join(_NAMES)}")
        self._check_effective("label_smoothing", self.label_smoothing, 0.0, _SMOOTHED)
        if "exo_pair" in names and not self.label_smoothing:
            raise ConfigError(
                "objective.label_smoothing: 0 given, but exo_pair compares with a preference that is not certain. Set it to"
                " the fraction of pairs that may be swapped, such as 0.001"
            )
        self._check_effective("simpo_gamma", self.simpo_gamma, _GAMMA, ("simpo", "alphapo"))
        self._check_effective("alphapo_alpha", self.alphapo_alpha, _ALPHA, ("alphapo",))
        self._check_effective("discopop_tau", self.discopop_tau, _TAU, ("discopop",))
        for key, default in (("reduction", "sum"), ("ld_alpha", None)):
            self._check_effective(key, getattr(self, key), default, _OF_REFERENCE)
        self._check_divergence()
        if self.wpo and self.facts_alone.compares_examples:
            raise ConfigError(
                f"objective.wpo: true given, but {' and '.join(BATCH_LOSSES)} compare completions of different pairs, which"
                " have no common weight. Remove one of them"
            )
        self.check_reference()

    def _check_divergence(self) -> None:
        if self.f_divergence == "reverse_kl":
            return
        if others := [name for name in self._losses if name not in OF_MARGIN]:
            raise ConfigError(
                f"objective.f_divergence: {self.f_divergence} given, but loss_type: {others[0]} is not defined for it. Remove"
                f" it, or choose of: {', '.join(OF_MARGIN)}"
            )

    def _check_effective(self, key: str, value: Any, default: Any, of: tuple[str, ...]) -> None:
        if value != default and not set(of) & set(self._losses):
            raise ConfigError(
                f"objective.{key}: {value} given, which has no effect with loss_type: {', '.join(self._losses)}. Remove it,"
                f" or set loss_type to {' or '.join(of)}"
            )

    @property
    def _losses(self) -> dict[str, float]:
        """Name -> weight of each loss."""
        return {self.loss_type: 1.0} if isinstance(self.loss_type, str) else self.loss_type

    @property
    def needs_reference(self) -> bool:
        return bool(set(_OF_REFERENCE) & set(self._losses))

    @property
    def facts_alone(self) -> ObjectiveFacts:
        return ObjectiveFacts(
            batch_types=(PairBatch,),
            sequences_axis=PAIR,
            compares_examples=bool(BATCH_LOSSES.keys() & self._losses),
            annotation_key=None if self.ld_alpha is None else {"ld_alpha": self.ld_alpha},
        )

    @property
    def _sft_weight(self) -> float:
        return float("orpo" in self._losses) if self.sft_weight is None else self.sft_weight

    def reference_logps(self, model: LanguageModel, batch: PairBatch) -> hax.NamedArray:
        """{batch, pair}: of each completion."""
        return self._summed_logps(token_logps(model, batch.sequences())[0], batch)

    def weights(self, batch: PairBatch) -> dict[str, jax.Array]:
        """The number of pairs, of tokens in chosen completions, and of tokens that are not padding."""
        denominators = {"loss": hax.sum(is_pair(batch)).scalar().astype(jnp.float32)}
        if self._sft_weight:
            denominators["sft"] = hax.sum(batch.half(0).loss_mask).scalar()
        return {**denominators, AUXILIARY: auxiliary_weight(batch.pairs)}

    def terms(
        self, model: LanguageModel, batch: PairBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms `loss`, `sft` if it has a weight, and the layers' auxiliary losses.

        The metrics have TRL's names: `rewards/chosen`, `rewards/rejected` (beta times the log-ratios to the reference, of
        whole completions; of the mean per token if no loss needs a reference),
        `rewards/accuracies` (the fraction of pairs whose chosen reward is larger), `rewards/margins`, `logps/chosen`,
        `logps/rejected`, and `nll_loss` if `sft` has a weight; `loss` is the loss of the pairs alone.
        """
        if self.wpo:
            of_tokens, collision, aux = token_logps(model, batch.sequences(), _collision_entropy, key=key)
            likelihood = self._likelihood(of_tokens + collision, batch)
        else:
            (of_tokens, aux), likelihood = token_logps(model, batch.sequences(), key=key), 1.0
        logps, whole = self._summed_logps(of_tokens, batch), _whole_logps(of_tokens, batch)
        counted = is_pair(batch).array
        losses = likelihood * self._losses_of(self._compared(logps, whole, batch), counted)
        rewarded = self._pair(logps, whole, batch, averages=not self.needs_reference)
        weights = self.weights(batch)
        rewards = [self.beta * ratio for ratio in (rewarded.chosen_ratio, rewarded.rejected_ratio)]
        chosen, rejected = (logps[PAIR, number].array for number in (0, 1))
        columns = {
            "loss": losses,
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/accuracies": rewards[0] > rewards[1],
            "rewards/margins": rewards[0] - rewards[1],
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        metrics = {name: Sum(_summed(column, counted), weights["loss"]) for name, column in columns.items()}
        minimized = {"loss": metrics["loss"]}
        if self._sft_weight:
            metrics["nll_loss"] = Sum(-_summed(whole[PAIR, 0].array, counted), weights["sft"])
            minimized["sft"] = Sum(self._sft_weight * metrics["nll_loss"].total, weights["sft"])
        aux_terms, aux_metrics = auxiliary_terms(aux)
        return {**minimized, **aux_terms}, metrics | aux_metrics, slot

    def _losses_of(self, pair: PairLogps, counted: jax.Array) -> jax.Array:
        """The loss of each pair, float32 [pairs]. Args: pair: see `_compared`; counted: whether a row is a pair."""
        numbers = (self.beta, self.label_smoothing, self.simpo_gamma, self.alphapo_alpha, self.discopop_tau)
        options = PairLossOptions(*numbers)
        total = jnp.zeros(counted.shape, jnp.float32)
        for name, weight in self._losses.items():
            if name in BATCH_LOSSES:
                total += weight * BATCH_LOSSES[name](pair, options, counted)
            else:
                total += weight * PAIR_LOSSES[name](pair, options)
        return total

    def _compared(self, logps: hax.NamedArray, whole: hax.NamedArray, batch: PairBatch) -> PairLogps:
        """The log-likelihoods, or scores of a divergence, that the losses read. Args: as in `_pair`."""
        averages = self.reduction == "mean"
        if self.f_divergence == "reverse_kl":
            return self._pair(logps, whole, batch, averages=averages)
        num_tokens = _num_tokens(batch)
        lengths = (num_tokens[PAIR, 0].array, num_tokens[PAIR, 1].array) if averages else None
        pair = self._pair(logps, whole, batch, averages=False)
        return scored(pair, self.f_divergence, self.f_divergence_alpha, lengths)

    def _summed_logps(self, of_tokens: hax.NamedArray, batch: PairBatch) -> hax.NamedArray:
        """{batch, pair}: the log-likelihoods that are compared.

        Source: LD-DPO (Liu et al. 2024, arXiv:2409.06411), for the weight of the tokens that the other completion has no
        counterpart of.

        Args:
            of_tokens: {batch, position}, of `PairBatch.sequences`.
        """
        if self.ld_alpha is None:
            return _whole_logps(of_tokens, batch)
        is_counted = (batch.pairs.loss_mask > 0).astype(jnp.int32)
        counted_before = hax.cumsum(in_text_order(is_counted, batch.order), POSITION)
        number, length = in_row_order(counted_before, batch.order), hax.sum(is_counted, POSITION)
        is_shared = number <= hax.min(length, PAIR)
        weight = hax.where(is_shared, 1.0, self.ld_alpha).rearrange(batch.pairs.loss_mask.axes)
        weighted = replace(batch.pairs, loss_mask=batch.pairs.loss_mask * weight)
        return _whole_logps(of_tokens, replace(batch, pairs=weighted))

    def _likelihood(self, aligned: hax.NamedArray, batch: PairBatch) -> jax.Array:
        """Measures how likely both completions of each pair are for the model, without a gradient, float32 [pairs].

        Source: WPO (Zhou et al. 2024, arXiv:2406.11827), equation 2, with its sampled alignment.

        Args:
            aligned: {batch, position}: the log-likelihoods of tokens, compared with the expected likelihood of a sample.
        """
        sums = _whole_logps(jax.lax.stop_gradient(aligned), batch)
        return hax.exp(hax.sum(sums / _num_tokens(batch), PAIR)).array

    def _pair(self, logps: hax.NamedArray, whole: hax.NamedArray, batch: PairBatch, *, averages: bool) -> PairLogps:
        """The log-likelihoods that the losses read.

        Args:
            logps: {batch, pair}, those that are compared with the reference's, summed over tokens.
            whole: {batch, pair}, those of all tokens.
            averages: divide all of them by the number of tokens.
        """
        num_tokens = _num_tokens(batch)
        reference = hax.zeros_like(logps) if batch.annotations is None else batch.annotations.logps
        ours, theirs = (logps / num_tokens, reference / num_tokens) if averages else (logps, reference)
        columns = (array[PAIR, number] for array in (ours, theirs, whole / num_tokens) for number in (0, 1))
        return PairLogps(*(column.array for column in columns))


def _whole_logps(of_tokens: hax.NamedArray, batch: PairBatch) -> hax.NamedArray:
    """{batch, pair}: the sum over the tokens of each completion. Args: of_tokens: {batch, position} of all sequences."""
    return by_pair(hax.sum(of_tokens * batch.sequences().loss_mask, POSITION), batch)


def _num_tokens(batch: PairBatch) -> hax.NamedArray:
    """{batch, pair}: of each completion, at least 1."""
    counts = hax.sum(batch.pairs.loss_mask, POSITION)
    return hax.named(jnp.maximum(counts.array, 1.0), counts.axes)


def _collision_entropy(chunk: ChunkLogits) -> jax.Array:
    return chunk.constant().collision_entropy()


def _summed(column: jax.Array, counted: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(counted, column, 0.0), dtype=jnp.float32)
