"""Direct preference optimization: the model prefers the chosen completion of each pair more than a reference does.

Source: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv:2305.18290), equation 7; the variants are in
`jaxlm.objectives.pair_losses`, the reference that follows the model in `jaxlm.objectives.completions`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import haliax as hax
import jax
import jax.numpy as jnp
from annotated_types import Interval

from jaxlm.core.axes import PAIR, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat
from jaxlm.core.types import PairBatch, Sum
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.base import AUXILIARY, Metrics, ObjectiveConfig, auxiliary_terms, auxiliary_weight
from jaxlm.objectives.completions import ReferencedObjective, by_pair, completion_logps, is_pair
from jaxlm.objectives.pair_losses import PAIR_LOSSES, WITH_REFERENCE, PairLogps, PairLossOptions

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
    "simpo",
    "alphapo",
    "orpo",
]
_SMOOTHED = ("sigmoid", "robust", "exo_pair")


@ObjectiveConfig.register_subclass("dpo")
@dataclass(frozen=True)
class Dpo(ReferencedObjective):
    """Preference pairs (`data.type: pairs`): raises the likelihood of the chosen completion over that of the rejected one,
    compared with a reference. The loss is averaged over pairs.

    Attributes:
        loss_type: `sigmoid` (DPO; with `label_smoothing`, conservative DPO), `robust`, `ipo`, `hinge`, `apo_zero`,
            `apo_down`, `exo_pair`, `nca_pair`, `bco_pair`, `sppo_hard`, `discopop`, or without a reference `simpo`,
            `alphapo`, `orpo`. A mapping from names to weights adds several up.
        beta: how closely the model stays to the reference. For `ipo` it is tau, for `sppo_hard` 1 / eta, for `orpo` lambda,
            for `simpo` and `alphapo` the scale of the margin, usually 2 or more.
        label_smoothing: fraction of pairs that are assumed to be swapped, for `sigmoid`, `robust` and `exo_pair`, which
            needs one above 0.
        reduction: the likelihood of a completion is that of all its tokens (`sum`), or the geometric mean over them (`mean`).
        simpo_gamma: the margin that `simpo` and `alphapo` aim at.
        alphapo_alpha: how much more a change of an unlikely completion counts with `alphapo`; the limit at 0 is `simpo`.
        discopop_tau: how far around a margin of 0 `discopop` changes from the exponential to the logistic loss.
        sft_weight: weight of the next-token loss of the chosen completion, averaged over its tokens. Null is 1 with `orpo`,
            which has it by definition, and otherwise 0.
    """

    batch_types: ClassVar[tuple[type, ...]] = (PairBatch,)
    sequences_axis: ClassVar[str | None] = PAIR

    loss_type: LossName | dict[str, PositiveFloat] = "sigmoid"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    reduction: Literal["sum", "mean"] = "sum"
    simpo_gamma: NonNegativeFloat = _GAMMA
    alphapo_alpha: PositiveFloat = _ALPHA
    discopop_tau: PositiveFloat = _TAU
    sft_weight: NonNegativeFloat | None = None

    def __post_init__(self):
        names = self._losses
        unknown = [name for name in names if name not in PAIR_LOSSES]
        if unknown or not names:
            given = f"'{unknown[0]}'" if unknown else "an empty mapping"
            raise ConfigError(f"objective.loss_type: {given} given, expected some of: {', '.join(PAIR_LOSSES)}")
        self._check_effective("label_smoothing", self.label_smoothing, 0.0, _SMOOTHED)
        if "exo_pair" in names and not self.label_smoothing:
            raise ConfigError(
                "objective.label_smoothing: 0 given, but exo_pair compares with a preference that is not certain. Set it to"
                " the fraction of pairs that may be swapped, such as 0.001"
            )
        self._check_effective("simpo_gamma", self.simpo_gamma, _GAMMA, ("simpo", "alphapo"))
        self._check_effective("alphapo_alpha", self.alphapo_alpha, _ALPHA, ("alphapo",))
        self._check_effective("discopop_tau", self.discopop_tau, _TAU, ("discopop",))
        if not self.needs_reference:
            self._check_effective("reduction", self.reduction, "sum", tuple(WITH_REFERENCE))
        self.check_reference()

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
        return bool(WITH_REFERENCE.keys() & self._losses)

    @property
    def _sft_weight(self) -> float:
        return float("orpo" in self._losses) if self.sft_weight is None else self.sft_weight

    def reference_logps(self, model: LanguageModel, batch: PairBatch) -> hax.NamedArray:
        """{batch, pair}: of each completion."""
        return by_pair(completion_logps(model, batch.sequences())[0], batch)

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
        sums, aux = completion_logps(model, batch.sequences(), key=key)
        logps, counted = by_pair(sums, batch), is_pair(batch).array
        pair = self._pair(logps, batch, averages=self.reduction == "mean")
        rewarded = self._pair(logps, batch, averages=not self.needs_reference)
        numbers = (self.beta, self.label_smoothing, self.simpo_gamma, self.alphapo_alpha, self.discopop_tau)
        options = PairLossOptions(*numbers)
        losses = sum((weight * PAIR_LOSSES[name](pair, options) for name, weight in self._losses.items()), 0.0)
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
            metrics["nll_loss"] = Sum(-_summed(chosen, counted), weights["sft"])
            minimized["sft"] = Sum(self._sft_weight * metrics["nll_loss"].total, weights["sft"])
        aux_terms, aux_metrics = auxiliary_terms(aux)
        return {**minimized, **aux_terms}, metrics | aux_metrics, slot

    def _pair(self, logps: hax.NamedArray, batch: PairBatch, *, averages: bool) -> PairLogps:
        """The log-likelihoods that the losses read.

        Args:
            logps: {batch, pair}, summed over tokens.
            averages: divide all of them by the number of tokens.
        """
        num_tokens = hax.maximum(hax.sum(batch.pairs.loss_mask, POSITION), 1.0)
        reference = hax.zeros_like(logps) if batch.annotations is None else batch.annotations.logps
        per_token = logps / num_tokens
        ours, theirs = (per_token, reference / num_tokens) if averages else (logps, reference)
        columns = (array[PAIR, number] for array in (ours, theirs, per_token) for number in (0, 1))
        return PairLogps(*(column.array for column in columns))


def _summed(column: jax.Array, counted: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(counted, column, 0.0), dtype=jnp.float32)
