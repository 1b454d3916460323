"""Log-likelihoods of completions, and objectives that compare them with those of a reference."""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core.axes import BATCH, PAIR, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import STEPS_OF_PHASE, NonNegativeInt, PositiveFraction
from jaxlm.core.rules import Rules, excludes, needs, only
from jaxlm.core.tree import is_named
from jaxlm.core.values.batch_types import PairBatch, TokenBatch
from jaxlm.models.base import AuxLoss, Inputs, LanguageModel
from jaxlm.models.chunked_loss import ChunkLogits
from jaxlm.models.loss import token_numbers
from jaxlm.objectives.base import ObjectiveConfig, ObjectiveFacts

_INITIAL, _NONE = "initial", "none"  # references that are not in the section `refs`
_WHOLE = 1.0
_ASKED_BEFORE = "but only a model of the section refs can be asked before training"


class ReferenceLogps(eqx.Module):
    """Holds what a reference says about completions.

    Attributes:
        logps: float32, its log-likelihoods, with the axes of the objective.
    """

    logps: NamedArray


def token_logps(
    model: LanguageModel,
    batch: TokenBatch,
    *others: Callable[[ChunkLogits], jax.Array],
    key: jax.Array | None = None,
    temperature: float = 1.0,
) -> tuple[Any, ...]:
    """Numbers of each target, float32 {batch, position}, 0 where the loss mask is; and the layers' auxiliary losses, last.

    Differentiable, without the logits of all tokens in memory.

    Args:
        others: numbers besides the log-likelihood, which is the first.
        temperature: the logits are divided by it.
    """
    hidden = model.hidden(Inputs.of(batch), key=key)
    options = {**model.traits.loss_options, "temperature": temperature}
    numbers = lambda chunk: (-chunk.nats(), *(other(chunk) for other in others))  # noqa: E731
    by_token = token_numbers(numbers, hidden.final, model.lm_head(), batch.targets, **options)
    return *(hax.where(batch.loss_mask > 0, column, 0.0) for column in by_token), hidden.aux


def completion_logps(
    model: LanguageModel, batch: TokenBatch, *, key: jax.Array | None = None
) -> tuple[NamedArray, Mapping[str, AuxLoss]]:
    """The log-likelihood of each completion, which the loss mask selects, float32 {batch}, and the layers' losses."""
    logps, aux = token_logps(model, batch, key=key)
    return hax.sum(logps * batch.loss_mask, POSITION), aux


def by_pair(of_sequences: hax.NamedArray, batch: PairBatch) -> hax.NamedArray:
    """{batch} of `PairBatch.sequences` to {batch, pair}."""
    tokens = batch.pairs.tokens
    return of_sequences.unflatten_axis(BATCH, (tokens.resolve_axis(BATCH), tokens.resolve_axis(PAIR)))


def is_pair(batch: PairBatch) -> hax.NamedArray:
    """bool {[microbatch,] batch}: whether both completions have tokens in the loss. Rows that fill up a batch have none."""
    return hax.all(hax.any(batch.pairs.loss_mask > 0, POSITION), PAIR)


class HeldReference(eqx.Module):
    """A reference in the state of an objective: the model from the start of the phase, or from the last sync.

    Attributes:
        weights: the leaves that train, in the dtypes of the computation; None for the others, which never change. None if the
            reference is not held. If it follows the model by fractions, at least float32: in bfloat16, steps of less than
            1/256 of a weight would be lost.
        statistics: numbers of the objective's own, by name.
    """

    weights: Any
    statistics: dict[str, jax.Array] = eqx.field(default_factory=dict)

    def model(self, model: LanguageModel) -> LanguageModel:
        """The reference. Args: model: the model that trains, for its frozen leaves."""

        def computing(ours: Any, theirs: Any) -> Any:
            return theirs if ours is None else ours.astype(theirs.dtype)

        return jax.tree.map(computing, self.weights, model, is_leaf=lambda leaf: leaf is None or is_named(leaf))

    def synced(self, trainable: Any, updates: jax.Array, interval: int, mixup: float) -> "HeldReference":
        """The reference after an update: every `interval` updates, it moves by the fraction `mixup` to `trainable`.

        Source: Gorbatovski et al. 2024 (arXiv:2404.09656), equations 6 and 7.
        """
        if not interval:
            return self
        is_due = updates % interval == 0

        def moved(ours: jax.Array, theirs: jax.Array) -> jax.Array:
            new = theirs.astype(ours.dtype) if mixup == _WHOLE else ours + (theirs.astype(ours.dtype) - ours) * mixup
            return jnp.where(is_due, new, ours)

        return replace(self, weights=jax.tree.map(moved, self.weights, trainable))


@dataclass(frozen=True)
class ReferencedObjective(ObjectiveConfig):
    """An objective that compares the model with a reference.

    Attributes:
        reference: `initial` for the model at the start of the phase, the name of a model in `refs`, or `none`. Null is `none`
            if the other keys need no reference, and otherwise `initial`.
        cache: ask the reference in `refs` once for every training example, and store its log-likelihoods on disk. Later
            epochs and runs read them instead of loading the reference.
        sync_interval: update the initial reference from the model after every N updates; 0 never does.
        sync_mixup: fraction by which such an update moves the reference to the model; 1 replaces it.
    """

    reference: str | None = field(default=None, kw_only=True)
    cache: bool = field(default=False, kw_only=True)
    sync_interval: Annotated[NonNegativeInt, STEPS_OF_PHASE] = field(default=0, kw_only=True)
    sync_mixup: PositiveFraction = field(default=_WHOLE, kw_only=True)

    key_rules: ClassVar[Rules] = (
        needs("reference", when="cache", why=_ASKED_BEFORE),
        excludes("cache", when="reference", is_=(_INITIAL, _NONE), why=_ASKED_BEFORE),
        only("sync_mixup", when="sync_interval"),
    )

    @property
    @abc.abstractmethod
    def facts_alone(self) -> ObjectiveFacts:
        """The facts without those about the reference. Its `annotation_key` has what answers depend on besides the loss."""

    @property
    @abc.abstractmethod
    def needs_reference(self) -> bool:
        """Tells whether the loss reads the log-likelihoods of a reference."""

    @abc.abstractmethod
    def reference_logps(self, model: LanguageModel, batch: Any) -> NamedArray:
        """The log-likelihoods that the loss reads of a reference, for a microbatch."""

    def check_reference(self) -> None:
        """Raises `ConfigError` if the keys about the reference contradict each other, or have no effect."""
        if not self.needs_reference and self.reference not in (None, _NONE):
            raise ConfigError(
                f"objective.reference: '{self.reference}' given, but the loss needs none with these keys. Remove it"
            )
        if self.sync_interval and not self._holds_reference:
            raise ConfigError(
                f"objective.sync_interval: {self.sync_interval} given with reference: {self._reference}, which never"
                f" changes. Set reference to {_INITIAL}, or remove sync_interval"
            )

    def init_statistics(self) -> dict[str, jax.Array]:
        """Numbers that the objective keeps between steps, by name."""
        return {}

    def update_statistics(self, statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The numbers after an update. Args: statistics: as the last microbatch has left them."""
        return statistics

    @property
    def _reference(self) -> str:
        return self.reference or (_INITIAL if self.needs_reference else _NONE)

    @property
    def _holds_reference(self) -> bool:
        return self._reference == _INITIAL

    @property
    def facts(self) -> ObjectiveFacts:
        alone = self.facts_alone
        return replace(
            alone,
            head_in_fp8=False,
            references=() if self._reference in (_INITIAL, _NONE) else (self._reference,),
            holds_reference=self._holds_reference,
            annotation_key={"logps": type(self).__name__, **(alone.annotation_key or {})} if self.cache else None,
        )

    def init_slot(self, trainable: Any) -> HeldReference | None:
        statistics = self.init_statistics()
        if not self._holds_reference and not statistics:
            return None
        weights = trainable if self._holds_reference else None
        if self.sync_mixup != _WHOLE:
            weights = jax.tree.map(lambda array: array.astype(jnp.promote_types(array.dtype, jnp.float32)), weights)
        return HeldReference(weights, statistics)

    def update_slot(self, slot: HeldReference, trainable: Any, updates: jax.Array) -> HeldReference:
        after = slot.synced(trainable, updates, self.sync_interval, self.sync_mixup)
        return replace(after, statistics=self.update_statistics(slot.statistics))

    def annotate(
        self, refs: Mapping[str, LanguageModel], batch: Any, slot: HeldReference | None = None, model: Any = None
    ) -> Any:
        """Adds the reference's log-likelihoods. Without an effect on a batch that has them."""
        if batch.annotations is not None or self._reference == _NONE:
            return batch
        reference = slot.model(model) if slot is not None and self._holds_reference else refs[self._reference]
        return replace(batch, annotations=ReferenceLogps(self.reference_logps(reference, batch)))
