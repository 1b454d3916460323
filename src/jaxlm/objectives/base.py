"""The objective interface: losses to minimize, as weighted sums."""

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import draccus
import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.core.pace import Pacing
from jaxlm.core.values.batch_types import LabeledBatch, MaskedBatch, TokenBatch
from jaxlm.core.values.sums import Largest, Sum
from jaxlm.models.base import AuxLoss, Inputs, LanguageModel, ModelConfig
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.step_flops import ModelInStep
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import choice_name

Metrics = dict[str, Sum | Largest]
ITSELF = "the model that trains"
"""The name by which `annotate` asks it, which no reference has."""
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
class ObjectiveConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A loss as weighted sums.

    The engine divides each term by its weight over the *global* batch, so the gradient does not depend on how the batch is
    split into microbatches or sharded over devices.
    """

    batch_types: ClassVar[tuple[type, ...]] = (TokenBatch,)
    """The kinds of batches that the objective reads."""
    other_batches: ClassVar[str] = "Choose another objective or another kind of data"
    """What to change if the data makes batches of other kinds."""
    head_in_fp8: ClassVar[bool] = True
    """Whether the loss multiplies with the head as `ModelTraits.head_fp8` says. If not, the start-up table says so."""
    trains_writing: ClassVar[bool] = True
    """Whether the model is trained to write text, rather than to score it."""
    reads_later_tokens: ClassVar[bool | None] = False
    """Whether tokens of the model have to attend to later ones: false if the loss predicts these; None if either will do."""
    sequences_axis: ClassVar[str | None] = None
    """The axis of the sequences of an example, if the model reads all of them; None if it reads one."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The objective used when a config has no `type:`."""
        return "next_token"

    def prepare(self, phase: Any) -> Any:
        """The phase as it trains this objective, with surgeries of its own, for example. Called once, in planning.

        Args:
            phase: a `PhaseConfig` with its sections `data` and `optimizer`.

        Raises:
            ConfigError: the objective cannot be trained with the phase's other sections.
        """
        return phase

    def check_columns(self, columns: Collection[str], model: LanguageModel) -> None:
        """Raises `ConfigError` if the objective cannot train a model like this, with shapes, on columns of these names."""

    def check_model(self, model: ModelConfig) -> None:
        """Raises `ConfigError` if the loss means nothing for this model."""
        name, key = f"objective.type: {choice_name(type(self))}", "model.use_bidirectional_attention"
        if self.reads_later_tokens is False and not model.is_causal:
            raise ConfigError(
                f"{name} predicts each token from those before it, but with {key}: true, the model reads the token itself."
                " Set it to false, or predict hidden tokens: objective.type: diffusion or mlm, with data.masking"
            )
        if self.reads_later_tokens and model.is_causal:
            raise ConfigError(
                f"{name} predicts hidden tokens from those on both sides, but tokens of this model attend only to earlier"
                f" ones. Set {key}: true (families that have it: llama, qwen2, qwen3, gemma3), or objective.type: clm"
            )

    def check_batch(self, batch: Any) -> None:
        """Raises `ConfigError` if the objective cannot train on batches like this one, whose columns are None."""

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

    @property
    def pacing(self) -> Pacing | None:
        """Sets the pace of layers, and ends the phase early; None if the optimizer alone does that."""
        return None

    @property
    def trunk(self) -> "Trunk | None":
        """Stores the input of the layers that train; None if each step computes it."""
        return None

    @property
    def references(self) -> tuple[str, ...]:
        """Names of the models in the section `refs` that `annotate` asks."""
        return ()

    @property
    def holds_reference(self) -> bool:
        """Tells whether `references_in_slot` has a model with the sizes of the one that trains."""
        return False

    @property
    def reports_teacher_loss(self) -> bool:
        """Tells whether the metrics have `loss` and `TEACHER_LOSS`."""
        return False

    @property
    def num_denoisers(self) -> int | None:
        """The number of blocks of layers that each compute an equal share of the rows of every microbatch, by their mask
        fractions. The phase then begins with the surgery `denoisers`. None if all layers compute every row."""
        return None

    def flops_per_token(self, model: ModelInStep, references: Sequence[ModelInStep]) -> FlopsPerToken:
        """FLOPs per training token: the model's, forward and backward, and the forward passes of the references.

        Args:
            model: the model that trains.
            references: those that the step queries.
        """
        flops = model.trained()
        for reference in references:
            flops = flops.with_forward(reference.flops_per_token())
        return flops

    @property
    def compares_examples(self) -> bool:
        """Tells whether the loss of an example depends on the others of its batch, which then has no microbatches."""
        return False

    def references_in_slot(self, slot: Any, model: LanguageModel) -> Mapping[str, LanguageModel]:
        """Models by name that the objective keeps in its state, and that `annotate` queries besides `references`.

        Args:
            model: the model that trains, in the dtypes of the computation, for what the state has no copy of.
        """
        return {}

    @property
    def annotation_key(self) -> Mapping[str, Any] | None:
        """The facts that annotations on disk depend on, besides references and tokens; None if steps ask the references.

        With a key, each sequence that the phase's steps read is annotated once, before the first step.
        """
        return None

    @property
    def inputs_key(self) -> Mapping[str, Any] | None:
        """The facts that the model's tokens depend on, besides the example; {} if `read_inputs` are those of the batch.
        Masks belong to the example (`Examples.arrangement`). None if that is not known, or random: then nothing that depends
        on them can be stored."""
        return None

    def read_inputs(self, batch: Any) -> Inputs:
        """Selects what the model reads of a batch, for an objective with `inputs_key`."""
        return Inputs.of(batch.supervised())

    def annotate(self, refs: Mapping[str, LanguageModel], batch: Any) -> Any:
        """Adds what the references say about a microbatch, as its `annotations`. Has no gradient.

        Args:
            refs: the models named by `references`, and those of `references_in_slot`.
            batch: {batch, ...}. If it has annotations already, it must be returned unchanged.
        """
        return batch

    def with_batch_statistics(self, batch: Any) -> Any:
        """The batch with what the loss of an example needs to know of all of them, before they are split into microbatches.

        Args:
            batch: {[microbatch,] batch, ...}, the whole batch, not annotated.
        """
        return batch

    def with_row_keys(self, batch: Any, key: jax.Array) -> Any:
        """The batch with random keys for its rows, for an objective with noise of its own that must not depend on how the
        batch is split. Only training calls it.

        Args:
            batch: {microbatch, batch, ...}, the whole batch.
            key: of the step.
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


class Trunk(abc.ABC):
    """Stores the output of frozen lower layers, once per training sequence, when the phase begins.

    `annotate` gets the model that trains as the reference `ITSELF`. The stored output must not change during the phase.
    """

    objective: ObjectiveConfig
    """The objective of the layers above."""

    @abc.abstractmethod
    def first_layer(self, model: LanguageModel) -> int:
        """The number of the first layer that a step computes, whose input is stored."""

    @abc.abstractmethod
    def check_trainable(self, model: LanguageModel, trainable: Any) -> None:
        """Raises `ConfigError` if what is stored would change while the model trains. Called with shapes.

        Args:
            trainable: the model, with None in place of frozen leaves.
        """
