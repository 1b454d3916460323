"""Distillation: the model learns from the distributions of a teacher, and from the next token.

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531), section 2: soft targets at
a temperature, mixed with the loss on the true targets; reverse and generalized Jensen-Shannon divergences as in Agarwal
et al. 2024 (arXiv:2306.13649), equation 1. Top k: `jaxlm.models.distillation`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import haliax as hax
import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFloat, PositiveFraction, PositiveInt, ProperFraction
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.distillation import TeacherStates, distillation_sums, top_k_of
from jaxlm.models.divergences import Divergence, ForwardKL, JensenShannon, ReverseKL
from jaxlm.objectives.base import AUXILIARY, TEACHER_LOSS, Metrics, ObjectiveConfig, auxiliary_terms, auxiliary_weight
from jaxlm.reading.choices import choice

_EVEN = 0.5


@choice(ObjectiveConfig, "distill")
class Distill(ObjectiveConfig):
    """Divergence from a teacher's distribution of the next token, mixed with the next-token loss.

    The loss of a token is `(1 - weight) * cross_entropy + weight * temperature**2 * divergence`. It is averaged over the
    tokens selected by the loss mask.

    Attributes:
        teacher: name of the teacher in the section `refs`.
        divergence: `forward_kl` (teacher to student: covers all that the teacher considers possible), `reverse_kl`
            (student to teacher: concentrates on what it considers likely), or `js` (generalized Jensen-Shannon).
        beta: weight of the teacher in the mixture of `js`, between 0 and 1. Near 0, `js / beta` is the forward KL.
        temperature: softens both distributions: logits are divided by it. The divergence is multiplied by its square, so
            that the size of the gradient hardly depends on it.
        weight: weight of the divergence, above 0 and at most 1. The next-token loss has the rest.
        top_k: compare only the teacher's k most likely tokens, and all other tokens together as one more outcome. Null
            compares the whole vocabulary.
        cache: ask the teacher once for every training sequence, and store its top k on disk. Later epochs and runs read
            them instead of loading the teacher. Needs `top_k`.
        teacher_loss: log the teacher's own next-token loss as `train/teacher_loss`, for the controller `handover`. Without
            `top_k`, with which the probability of a token is not known.
    """

    head_in_fp8: ClassVar[bool] = False

    teacher: str = "teacher"
    divergence: Literal["forward_kl", "reverse_kl", "js"] = "forward_kl"
    beta: ProperFraction = _EVEN
    temperature: PositiveFloat = 1.0
    weight: PositiveFraction = 0.5
    top_k: PositiveInt | None = None
    cache: bool = False
    teacher_loss: bool = False

    def __post_init__(self):
        if self.beta != _EVEN and self.divergence != "js":
            raise ConfigError(
                f"objective.beta: {self.beta} given, which has no effect with divergence: {self.divergence}. Remove it, or"
                " set divergence: js"
            )
        if self.cache and self.top_k is None:
            raise ConfigError("objective.cache: true given without top_k. Set top_k: a whole distribution is too large")
        if self.teacher_loss and self.top_k is not None:
            raise ConfigError(
                f"objective.teacher_loss: true given with top_k: {self.top_k}, which does not say how likely the teacher"
                " considers every token. Remove one of them"
            )

    @property
    def references(self) -> tuple[str, ...]:
        return (self.teacher,)

    @property
    def annotation_key(self) -> Mapping[str, Any] | None:
        return {"top_k": self.top_k, "temperature": self.temperature} if self.cache else None

    @property
    def reports_teacher_loss(self) -> bool:
        return self.teacher_loss

    def annotate(self, refs: Mapping[str, LanguageModel], batch: TokenBatch) -> TokenBatch:
        """Adds the teacher's hidden states and head, or its top k. Without an effect on a batch that has them."""
        if batch.annotations is not None:
            return batch
        teacher = refs[self.teacher]
        if self.top_k is not None and self.top_k >= teacher.Vocab.size:
            raise ConfigError(
                f"objective.top_k: {self.top_k} given, but the vocabulary has {teacher.Vocab.size} tokens. Give fewer, or"
                " null for all of them"
            )
        hidden = teacher.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids)).final
        states = TeacherStates(hidden, teacher.lm_head(), teacher.logit_soft_cap)
        annotations = states if self.top_k is None else top_k_of(states, self.top_k, self.temperature)
        return replace(batch, annotations=annotations)

    def weights(self, batch: TokenBatch) -> dict[str, jax.Array]:
        """The number of tokens in the loss mask, and of those that are not padding."""
        return {"loss": hax.sum(batch.loss_mask).scalar(), AUXILIARY: auxiliary_weight(batch)}

    def terms(
        self, model: LanguageModel, batch: TokenBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms `loss` and the layers' auxiliary losses.

        The metrics are `loss` (plain cross-entropy in nats), `divergence` (in nats, at the temperature and without the
        factor `temperature**2`), `mean_token_accuracy`, `agreement` (the fraction of tokens where student and teacher
        have the same most likely token), `teacher_loss` (the teacher's cross-entropy) if enabled, and those of the layers.
        """
        hidden = model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids), key=key)
        sums = distillation_sums(
            hidden.final,
            model.lm_head(),
            batch.targets,
            batch.loss_mask,
            batch.annotations,
            divergence=self._divergence(),
            temperature=self.temperature,
            weight=self.weight,
            soft_cap=model.logit_soft_cap,
            vocab_multiple=model.vocab_multiple,
            teacher_loss=self.teacher_loss,
        )
        weight = self.weights(batch)["loss"]
        metrics = {
            "loss": Sum(sums.cross_entropy, weight),
            "divergence": Sum(sums.divergence, weight),
            "mean_token_accuracy": Sum(sums.correct, weight),
            "agreement": Sum(sums.agreement, weight),
        }
        if sums.teacher_cross_entropy is not None:
            metrics[TEACHER_LOSS] = Sum(sums.teacher_cross_entropy, weight)
        aux_terms, aux_metrics = auxiliary_terms(hidden.aux)
        return {"loss": Sum(sums.total, weight), **aux_terms}, metrics | aux_metrics, slot

    def _divergence(self) -> Divergence:
        return {"forward_kl": ForwardKL(), "reverse_kl": ReverseKL(), "js": JensenShannon(self.beta)}[self.divergence]
