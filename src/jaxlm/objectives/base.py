"""The objective interface: losses to minimize, as weighted sums."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import draccus
import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.core.pace import Pacing
from jaxlm.core.values.batch_types import LabeledBatch, MaskedBatch, TokenBatch
from jaxlm.core.values.sums import Largest, Sum
from jaxlm.models.base import AuxLoss, LanguageModel, ModelConfig
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.step_flops import ModelInStep, trained_and_read
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import choice_name

Metrics = dict[str, Sum | Largest]
ITSELF = "the model that trains"
"""The name under which `annotate` asks it (`ObjectiveFacts.asks_itself`), which no reference has."""
AUXILIARY = "auxiliary"
"""Name of the loss term that layers add, such as router losses."""
TEACHER_LOSS = "teacher_loss"
"""Name of the metric of a teacher's next-token loss in nats, on the batch and the tokens of the metric `loss`."""


def auxiliary_weight(batch: TokenBatch | MaskedBatch | LabeledBatch) -> jax.Array:
    """The denominator of the auxiliary term: the number of tokens that are not padding."""
    return jnp.sum(batch.segment_ids.array != 0, dtype=jnp.float32)


def auxiliary_terms(aux: Mapping[str, AuxLoss]) -> tuple[dict[str, Sum], Metrics]:
    """The auxiliary loss term of a model's layers, if there is one, and its unweighted parts as metrics."""
    metrics: Metrics = {name: loss.sum for name, loss in aux.items()}
    minimized = [loss for loss in aux.values() if loss.coefficient]
    if not minimized:
        return {}, metrics
    total = sum((loss.coefficient * loss.sum.total for loss in minimized), jnp.zeros(()))
    return {AUXILIARY: Sum(total, minimized[0].sum.weight)}, metrics


@dataclass(frozen=True)
class ObjectiveFacts:
    """Declares what plans, reports and controllers must know of an objective with its keys.

    Attributes:
        batch_types: the kinds of batches that it reads.
        inner: the objective inside of it whose loss it computes, for messages; None if the loss is its own.
        other_batches: what to change if the data makes batches of other kinds.
        sequences_axis: the axis of the sequences of an example, if the model reads all of them; None if it reads one.
        reads_later_tokens: whether tokens of the model have to attend to later ones: false if the loss predicts these; None
            if either will do.
        inputs_repeat: whether the model reads the same each time that an example comes, so that what depends on it can be
            stored. Masks belong to the example (`Examples.arrangement`).
        compares_examples: whether the loss of an example depends on the others of its batch, which then has no microbatches.
        num_shares: the number of blocks of layers that each compute an equal share of the rows of every microbatch.
        head_in_fp8: whether the loss multiplies with the head as `ModelTraits.head_fp8` says. If it does not, the start-up
            table says so.
        trains_writing: whether the model is trained to write text, rather than to score it.
        reports_teacher_loss: whether the metrics have `loss` and `TEACHER_LOSS`.
        references: names of the models in the section `refs` that `annotate` asks.
        holds_reference: whether its slot has a further reference, with the sizes of the model that trains.
        asks_itself: whether `annotate` asks the model that trains, under the name `ITSELF`, of which a part is frozen. Needs
            an `annotation_key`.
        annotation_key: the facts that annotations on disk depend on, besides references and tokens. With a key, each sequence
            that the phase's steps read is annotated once, before the first step. None if each step asks.
        pacing: sets the pace of layers, and ends the phase early; None if the optimizer alone does that.
        trains_mtp: whether the loss trains the layer that predicts the token after the next one (`model.mtp`).
        flops: (the model that trains, the references that the step queries) -> FLOPs per training token.
    """

    batch_types: tuple[type, ...] = (TokenBatch,)
    inner: "ObjectiveConfig | None" = None
    other_batches: str = "Choose another objective or another kind of data"
    sequences_axis: str | None = None
    reads_later_tokens: bool | None = False
    inputs_repeat: bool = False
    compares_examples: bool = False
    num_shares: int = 1
    head_in_fp8: bool = True
    trains_writing: bool = True
    reports_teacher_loss: bool = False
    references: tuple[str, ...] = ()
    holds_reference: bool = False
    asks_itself: bool = False
    annotation_key: Mapping[str, Any] | None = None
    pacing: Pacing | None = None
    trains_mtp: bool = False
    flops: Callable[[ModelInStep, Sequence[ModelInStep]], FlopsPerToken] = trained_and_read


@dataclass(frozen=True)
class ObjectiveConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A loss as weighted sums.

    The engine divides each term by its weight over the *global* batch, so the gradient does not depend on how the batch is
    split into microbatches or sharded over devices.
    """

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The objective used when a config has no `type:`."""
        return "next_token"

    @property
    def facts(self) -> ObjectiveFacts:
        """What others must know of the objective before it trains."""
        return ObjectiveFacts()

    def prepare(self, phase: Any) -> Any:
        """The phase as it trains this objective, with surgeries of its own, for example. Called once, in planning.

        Args:
            phase: a `PhaseConfig` with its sections `data` and `optimizer`.

        Raises:
            ConfigError: the objective cannot be trained with the phase's other sections.
        """
        return phase

    def check(self, batch: Any, model: LanguageModel, trainable: Any) -> None:
        """Checks what `facts` cannot say. Called in planning.

        Args:
            batch: of one of `batch_types`. Columns that the data does not have are None; the others have no values.
            model: shapes and dtypes of the model at the start of the phase.
            trainable: the model, with None in place of frozen leaves.

        Raises:
            ConfigError: the objective cannot train the model on such batches.
        """

    def init_slot(self, trainable: Any) -> Any:
        """The state that the objective keeps between steps, or None.

        Args:
            trainable: the model at the start of the phase, in the dtypes of the computation, with None for frozen leaves.
        """
        return None

    def update_slot(self, slot: Any, trainable: Any, updates: jax.Array) -> Any:
        """The state after an update that resulted in the leaves `trainable`, as in `init_slot`. Traceable.

        Args:
            slot: from the last microbatch's `terms`.
            updates: int32, number of updates in the phase, with this one. Skipped steps have none.
        """
        return slot

    def prepare_batch(self, batch: Any, key: jax.Array | None) -> Any:
        """The batch with what the loss of an example needs to know of all of them, and with noise of its own that must not
        depend on how the batch is split, before it is split into microbatches.

        Args:
            batch: {[microbatch,] batch, ...}, the whole batch, not annotated.
            key: of the step; None in evaluations.
        """
        return batch

    def annotate(self, refs: Mapping[str, LanguageModel], batch: Any, slot: Any = None, model: Any = None) -> Any:
        """Adds what the references say about a microbatch, as its `annotations`. Has no gradient.

        Args:
            refs: the models of `references`, by name.
            batch: {batch, ...}. If it has annotations already, it must be returned unchanged.
            slot: the state, which may hold a further reference.
            model: the model that trains, in the dtypes of the computation, for what the slot has no copy of. Not given where
                annotations are made before training.
        """
        return batch

    @abc.abstractmethod
    def weights(self, batch) -> dict[str, jax.Array]:
        """Each term's denominator (scalar float32) over a whole batch, before it is split into microbatches and annotated."""

    @abc.abstractmethod
    def terms(
        self, model: LanguageModel, batch, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """The loss terms of one microbatch (differentiable totals), metrics to log, and the new slot."""


def check_data(objective: ObjectiveConfig, data: Any, batch: Any) -> None:
    """Raises `ConfigError` if an objective does not read the batches of a data section. Args: batch: see `check`."""
    facts = objective.facts
    for one in (objective,) if facts.inner is None else (facts.inner, objective):
        kinds = one.facts.batch_types
        if not isinstance(batch, kinds):
            hides = data.batching.masking is not None and TokenBatch in kinds
            other = "Remove data.masking, or predict what it hides: objective.type: mlm or diffusion"
            raise ConfigError(
                f"{_name(one)} cannot train on data.type: {choice_name(type(data))}: it reads"
                f" {' or '.join(kind.__name__ for kind in kinds)}, and the data makes {type(batch).__name__}."
                f" {other if hides else one.facts.other_batches}"
            )
    if facts.annotation_key is not None and (changes := data.batching.never_repeats) is not None:
        other = "use the objective inside of it alone" if facts.asks_itself else "set objective.cache: false"
        raise ConfigError(
            f"{_name(objective)} stores what a model computes of each sequence, but {changes}, or {other}"
        )


def check_model(objective: ObjectiveConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` if the loss means nothing for a model of this config."""
    facts, key = objective.facts, "model.use_bidirectional_attention"
    name = _name(facts.inner or objective)
    if facts.reads_later_tokens is False and not model.is_causal:
        raise ConfigError(
            f"{name} predicts each token from those before it, but with {key}: true, the model reads the token itself."
            " Set it to false, or predict hidden tokens: objective.type: diffusion or mlm, with data.masking"
        )
    if facts.reads_later_tokens and model.is_causal:
        raise ConfigError(
            f"{name} predicts hidden tokens from those on both sides, but tokens of this model attend only to earlier"
            f" ones. Set {key}: true (families that have it: llama, qwen2, qwen3, gemma3), or objective.type: clm"
        )


def _name(objective: ObjectiveConfig) -> str:
    return f"objective.type: {choice_name(type(objective))}"
