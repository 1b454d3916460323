"""Distillation: the model learns from the distributions of a teacher, and from the next token.

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531), section 2: soft targets at
a temperature, mixed with the loss on the true targets; reverse and generalized Jensen-Shannon divergences as in Agarwal
et al. 2024 (arXiv:2306.13649), equation 1. Top k: `jaxlm.models.distillation.chunked`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import equinox as eqx
import haliax as hax
import jax
from haliax import NamedArray

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, PositiveFloat, PositiveFraction, PositiveInt, ProperFraction
from jaxlm.core.rules import Rules, excludes, needs, only
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import Hidden, Inputs, LanguageModel
from jaxlm.models.distillation.chunked import (
    ForwardKL,
    JensenShannon,
    ReverseKL,
    TeacherStates,
    TeacherTopK,
    distillation_sums,
    top_k_of,
)
from jaxlm.models.distillation.layerwise import hidden_distance, with_streams
from jaxlm.objectives.base import (
    AUXILIARY,
    TEACHER_LOSS,
    Metrics,
    ObjectiveConfig,
    ObjectiveFacts,
    auxiliary_terms,
    auxiliary_weight,
)
from jaxlm.reading.choices import choice

_EVEN = 0.5


class _Answer(eqx.Module):
    """Holds what a teacher says about a batch, and its residual stream {batch, position, embed} after each layer."""

    answer: TeacherStates | TeacherTopK
    streams: tuple[NamedArray, ...]


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
        hidden: weight of the distance between residual streams, which is added to the loss: of each token |s - t|^2 / |t|^2,
            averaged over layers. The teacher has the same width; its layers at the same fractions of the depth count. 0
            compares none.
        cache: ask the teacher once for each sequence that steps read, and store its top k on disk. Later epochs and runs read
            them instead of loading the teacher. Needs `top_k`.
        teacher_loss: log the teacher's own next-token loss as `train/teacher_loss`, for the controller `handover`. Without
            `top_k`, with which the probability of a token is not known.
    """

    teacher: str = "teacher"
    divergence: Literal["forward_kl", "reverse_kl", "js"] = "forward_kl"
    beta: ProperFraction = _EVEN
    temperature: PositiveFloat = 1.0
    weight: PositiveFraction = 0.5
    top_k: PositiveInt | None = None
    hidden: NonNegativeFloat = 0.0
    cache: bool = False
    teacher_loss: bool = False

    key_rules: ClassVar[Rules] = (
        only("beta", when="divergence", is_="js"),
        needs("top_k", when="cache", why="but a whole distribution is too large to store"),
        excludes("cache", "hidden", why="but only top k are stored"),
        excludes("teacher_loss", "top_k", why="which does not say how likely the teacher considers every token"),
    )

    @property
    def facts(self) -> ObjectiveFacts:
        return ObjectiveFacts(
            head_in_fp8=False,
            reports_teacher_loss=self.teacher_loss,
            references=(self.teacher,),
            annotation_key={"top_k": self.top_k, "temperature": self.temperature} if self.cache else None,
        )

    def annotate(
        self, refs: Mapping[str, LanguageModel], batch: TokenBatch, slot: Any = None, model: Any = None
    ) -> TokenBatch:
        """Adds the teacher's hidden states and head, or its top k. Without an effect on a batch that has them."""
        if batch.annotations is not None:
            return batch
        teacher = refs[self.teacher]
        if self.top_k is not None and self.top_k >= teacher.Vocab.size:
            raise ConfigError(
                f"objective.top_k: {self.top_k} given, but the vocabulary has {teacher.Vocab.size} tokens. Give fewer, or"
                " null for all of them"
            )
        hidden, streams = self._run(teacher, batch, "the teacher", key=None)
        states = TeacherStates(hidden.final, teacher.lm_head(), teacher.traits.logit_soft_cap)
        answer = states if self.top_k is None else top_k_of(states, self.top_k, self.temperature)
        return replace(batch, annotations=_Answer(answer, streams) if self.hidden else answer)

    def weights(self, batch: TokenBatch) -> dict[str, jax.Array]:
        """The number of tokens in the loss mask, and of those that are not padding."""
        return {"loss": hax.sum(batch.loss_mask).scalar(), AUXILIARY: auxiliary_weight(batch)}

    def terms(
        self, model: LanguageModel, batch: TokenBatch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms `loss` and the layers' auxiliary losses.

        The metrics are `loss` (plain cross-entropy in nats), `divergence` (in nats, at the temperature and without the
        factor `temperature**2`), `mean_token_accuracy`, `agreement` (the fraction of tokens where student and teacher
        have the same most likely token), and those of the layers; if enabled, also `teacher_loss` (the teacher's
        cross-entropy) and `hidden_distance` (between residual streams).
        """
        hidden, streams = self._run(model, batch, "the model", key=key)
        answer = batch.annotations.answer if self.hidden else batch.annotations
        divergences = {"forward_kl": ForwardKL(), "reverse_kl": ReverseKL(), "js": JensenShannon(self.beta)}
        sums = distillation_sums(
            hidden.final,
            model.lm_head(),
            batch.targets,
            batch.loss_mask,
            answer,
            divergence=divergences[self.divergence],
            temperature=self.temperature,
            weight=self.weight,
            teacher_loss=self.teacher_loss,
            **model.traits.loss_options,
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
        total = sums.total
        if self.hidden:
            distance = hidden_distance(streams, batch.annotations.streams, batch.loss_mask)
            metrics["hidden_distance"] = Sum(distance, weight)
            total += self.hidden * distance
        aux_terms, aux_metrics = auxiliary_terms(hidden.aux)
        return {"loss": Sum(total, weight), **aux_terms}, metrics | aux_metrics, slot

    def _run(
        self, model: LanguageModel, batch: TokenBatch, what: str, *, key: jax.Array | None
    ) -> tuple[Hidden, tuple[NamedArray, ...]]:
        """A model's output, and its residual streams if they are compared."""
        inputs = Inputs.of(batch)
        if not self.hidden:
            return model.hidden(inputs, key=key), ()
        return with_streams(model, inputs, f"objective.hidden: {what}", key=key)
