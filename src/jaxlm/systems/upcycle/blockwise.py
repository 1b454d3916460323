"""Blockwise distillation: every layer learns to compute what the teacher's layer computes from the same input.

Given the teacher's streams as inputs, the loss of a layer depends on its own parameters alone, so that the gradient of the
sum over all layers is that of each of them: one step trains all of them.

Of each block it remembers how far it is, whether it has converged, and the scale of its learning rate (`BlockProgress`).
Every number is a vector with an entry for each block, so that a decision about one of them changes no other.

Source: Bick et al. 2024, "Transformers to SSMs" (MOHAWK, arXiv:2408.10189), section 3.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core import tree
from jaxlm.core.axes import BATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import (
    STEPS_OF_PHASE,
    BelowOne,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
)
from jaxlm.core.pace import Pace, Pacing
from jaxlm.core.rules import Rules, ordered
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.core.values.sums import Largest, Sum
from jaxlm.models.base import Inputs, LanguageModel, ModelConfig
from jaxlm.models.distillation.layerwise import Int8Streams, Target, layer_body, layer_errors, layer_streams, unreached
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.stack_paths import path_before_splits
from jaxlm.models.step_flops import ModelInStep
from jaxlm.objectives.base import Metrics, ObjectiveConfig, ObjectiveFacts
from jaxlm.plan.run_config import PhaseConfig
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import choice_name

# A spike is measured against recent steps: their mean forgets faster than their spread.
_SPREAD_DECAY = 0.99
_MIN_OBSERVED = 20
_WINSOR = 3.0  # a spike widens the spread no more than a step of this many deviations


@dataclass(frozen=True)
class Convergence:
    """Decides when a block has learned enough. It then stays as it is, with its optimizer state.

    Attributes:
        target: a block is done when its averaged error is at most this; null has no such limit.
        patience: a block is done after this many of its steps in a row without improvement; null has no such limit.
        min_delta: the averaged error must be lower by more than this to count as an improvement.
        max_steps: a block is done after this many of its steps; null has no such limit.
        min_steps: a block is not done before this many of its steps.
        decay: of the running average of the error, which has no bias at its start. 0 takes each step by itself.
    """

    target: PositiveFloat | None = None
    patience: Annotated[PositiveInt, STEPS_OF_PHASE] | None = None
    min_delta: NonNegativeFloat = 0.0
    max_steps: Annotated[PositiveInt, STEPS_OF_PHASE] | None = None
    min_steps: PositiveInt = 1
    decay: BelowOne = 0.9

    key_rules: ClassVar[Rules] = (ordered("min_steps", "max_steps"),)


@dataclass(frozen=True)
class Autotune:
    """Lowers the learning rate of a block whose error spikes, or no longer improves.

    Attributes:
        mode: `active` lowers it. `monitor` computes and logs the same, and changes nothing. `off` does neither.
        patience: steps in a row without improvement after which the learning rate is lowered.
        decay: factor of the learning rate.
        min_scale: lowest product of these factors.
        spike_std: an error is a spike if it is above the average of recent steps by more than this many standard deviations.
    """

    mode: Literal["off", "monitor", "active"] = "off"
    patience: Annotated[PositiveInt, STEPS_OF_PHASE] = 100
    decay: ProperFraction = 0.5
    min_scale: PositiveFraction = 0.01
    spike_std: PositiveFloat = 3.0


class BlockProgress(eqx.Module):
    """The state between steps. All arrays are {blocks}, float32 or int32.

    Attributes:
        total, weight: sums of the errors over the microbatches of a step, and of tokens (a scalar).
        steps: number of updates of the block.
        average: running average of its error.
        best, stale: the lowest average, and the number of steps since it improved.
        done: 1 if the block no longer trains.
        scale: of its learning rate.
        level, drift, spread, observed: recent mean of the error, how far the error is from it on average because it falls,
            and the variance around both; and the number of steps that they are from.
        flat: steps without improvement since the learning rate was lowered.
        events: how often the learning rate was lowered, or would have been.
    """

    total: jax.Array
    weight: jax.Array
    steps: jax.Array
    average: jax.Array
    best: jax.Array
    stale: jax.Array
    done: jax.Array
    scale: jax.Array
    level: jax.Array
    drift: jax.Array
    spread: jax.Array
    observed: jax.Array
    flat: jax.Array
    events: jax.Array

    @staticmethod
    def init(num_blocks: int) -> "BlockProgress":
        """Of no steps."""
        zeros, counts = jnp.zeros(num_blocks, jnp.float32), jnp.zeros(num_blocks, jnp.int32)
        return BlockProgress(
            total=zeros,
            weight=jnp.zeros((), jnp.float32),
            steps=counts,
            average=zeros,
            best=jnp.full(num_blocks, jnp.inf, jnp.float32),
            stale=counts,
            done=counts,
            scale=jnp.ones(num_blocks, jnp.float32),
            level=zeros,
            drift=zeros,
            spread=zeros,
            observed=counts,
            flat=counts,
            events=counts,
        )

    @property
    def current(self) -> jax.Array:
        """int32, the first block that is not done; the number of blocks if all are."""
        return jnp.sum(jnp.cumprod(self.done))

    def with_errors(self, total: jax.Array, weight: jax.Array) -> "BlockProgress":
        """With the errors of one more microbatch. Args: total: {blocks}; weight: number of tokens."""
        summed = (self.total + jax.lax.stop_gradient(total), self.weight + weight)
        return eqx.tree_at(lambda p: (p.total, p.weight), self, summed)

    def after_update(self, trained: jax.Array, convergence: Convergence, autotune: Autotune) -> "BlockProgress":
        """After a step that updated some blocks. Args: trained: bool {blocks}, those."""
        error = self.total / jnp.maximum(self.weight, 1.0)
        steps = self.steps + 1
        # Written so, the average of a constant is the constant, to the bit.
        average = self.average + _newest(convergence.decay, steps) * (error - self.average)
        improved = average < self.best - convergence.min_delta
        best, stale = jnp.where(improved, average, self.best), jnp.where(improved, 0, self.stale + 1)
        ends = jnp.zeros_like(improved)
        if convergence.target is not None:
            ends |= average <= convergence.target
        if convergence.patience is not None:
            ends |= stale >= convergence.patience
        ends &= steps >= convergence.min_steps
        if convergence.max_steps is not None:
            ends |= steps >= convergence.max_steps
        after = BlockProgress(
            total=jnp.zeros_like(self.total),
            weight=jnp.zeros_like(self.weight),
            steps=steps,
            average=average,
            best=best,
            stale=stale,
            done=ends.astype(jnp.int32),
            **self._tuned(error, improved, convergence.decay, autotune),
        )
        kept = eqx.tree_at(lambda p: (p.total, p.weight), self, (after.total, after.weight))
        return jax.tree.map(lambda new, old: jnp.where(trained, new, old) if new.ndim else new, after, kept)

    def _tuned(self, error: jax.Array, improved: jax.Array, decay: float, autotune: Autotune) -> dict[str, jax.Array]:
        """Updates the scale of each block's learning rate, and what it follows from."""
        if autotune.mode == "off":
            fields = ("scale", "level", "drift", "spread", "observed", "flat", "events")
            return {name: getattr(self, name) for name in fields}
        # The mean lags behind an error that falls, by an amount that is itself averaged.
        residual = error - self.level
        surprise, deviation = residual - self.drift, jnp.sqrt(self.spread)
        is_known = self.observed >= _MIN_OBSERVED
        spikes = is_known & (surprise > autotune.spike_std * deviation)
        limit = jnp.where(is_known, _WINSOR * deviation, jnp.inf)
        surprise = jnp.clip(surprise, -limit, limit)
        residual = self.drift + surprise
        # The first error is the level, and the first residuals are the drift; only then are there deviations.
        observed = self.observed + 1
        level = self.level + _newest(decay, observed) * residual
        drift = jnp.where(observed > 1, self.drift + _newest(decay, observed - 1) * surprise, 0.0)
        spread = jnp.where(
            observed > 2, self.spread + _newest(_SPREAD_DECAY, observed - 2) * (surprise * surprise - self.spread), 0.0
        )
        flat = jnp.where(improved, 0, self.flat + 1)
        lowers = spikes | (flat >= autotune.patience)
        scale = jnp.where(lowers, jnp.maximum(self.scale * autotune.decay, autotune.min_scale), self.scale)
        restarts = lambda value: jnp.where(lowers, jnp.zeros_like(value), value)  # noqa: E731
        return {
            "scale": scale,
            "level": restarts(level),
            "drift": restarts(drift),
            "spread": restarts(spread),
            "observed": restarts(observed),
            "flat": restarts(flat),
            "events": self.events + lowers,
        }


def _newest(decay: float, count: jax.Array) -> jax.Array:
    """The weight of the newest of `count` numbers in an average without bias, in which weights fall by `decay`."""
    return (1 - decay) / (1 - decay ** jnp.maximum(count, 1).astype(jnp.float32))


BLOCKS_LEFT = "train/blocks_left"


@choice(ObjectiveConfig, "blockwise")
class Blockwise(ObjectiveConfig, Pacing):
    """The sum over all blocks of the mean absolute difference from the teacher's block. Only what a block's `target` depends
    on can be trained. The optimizer's `max_grad_norm` clips the gradient of all blocks together.

    Metrics with the number of a block at their end: `block_error` (its loss), `block_nmse` (the mean squared error divided by
    the mean square of the target), `block_average` (the average that convergence is judged by), `block_steps`, and
    `block_lr_scale` (what autotuning has made, or would have made, of 1). `loss` and `block_nmse` are over all blocks that
    are measured, `block_events` counts what autotuning reacted to. The phase ends when `blocks_left` is 0.

    Attributes:
        teacher: name of the teacher in the section `refs`. It has as many layers as the model, of the same width.
        target: what is compared: `attention` (its output, after its last projection), `residual` (the residual stream after
            the layer) or `mixing` (the softmax of the scores; needs memory for the square of the sequence length).
        order: `parallel` trains all blocks in every step. `sequential` trains one after the other, the first one first, each
            with a new optimizer state and a learning-rate schedule of its own.
        inputs: what a block reads: the `teacher`'s residual stream, or that of the `student`, whose earlier blocks computed
            it.
        convergence: when a block is done.
        autotune: when the learning rate of a block is lowered.
        cache: ask the teacher once for each sequence that steps read, and keep on disk what its layers read and computed.
            Later epochs and runs read them instead of loading the teacher. True stores them as they are; `int8` with a scale
            for each token of each layer, in half or a quarter of the space.
    """

    teacher: str = "teacher"
    target: Target = "attention"
    order: Literal["parallel", "sequential"] = "parallel"
    inputs: Literal["teacher", "student"] = "teacher"
    convergence: Convergence = field(default_factory=Convergence)
    autotune: Autotune = field(default_factory=Autotune)
    cache: bool | Literal["int8"] = False

    def __post_init__(self):
        if self.cache == "int8" and self.target == "mixing":
            raise ConfigError(
                "objective.cache: int8 given with target: mixing, whose numbers are between 0 and 1. Set cache: true"
            )

    @property
    def facts(self) -> ObjectiveFacts:
        return ObjectiveFacts(
            head_in_fp8=False,
            trains_writing=False,
            references=(self.teacher,),
            annotation_key={"target": self.target, "cache": self.cache} if self.cache else None,
            pacing=self,
            flops=self._flops,
        )

    @property
    def finished_metric(self) -> str:
        return BLOCKS_LEFT

    @property
    def restarts_optimizer(self) -> bool:
        return self.order == "sequential"

    def prepare(self, phase: PhaseConfig) -> PhaseConfig:
        assert phase.optimizer is not None
        if self.restarts_optimizer and phase.optimizer.skip_bad_steps:
            raise ConfigError(
                f"phase '{phase.name}': optimizer.skip_bad_steps given, but the loss jumps where objective"
                f" {choice_name(type(self))} goes on to the next block, and its first steps would be skipped. Set"
                " skip_bad_steps: false"
            )
        return phase

    def scheduled_steps(self, num_steps: int, model: ModelConfig) -> int | None:
        if self.order == "parallel":
            return None
        num_blocks, max_steps = model.Layers.size, self.convergence.max_steps
        if max_steps is None:
            raise ConfigError(
                "objective.order: sequential given without convergence.max_steps. Set it to the number of steps of each"
                " block, which its learning-rate schedule spans"
            )
        if num_steps < num_blocks * max_steps:
            raise ConfigError(
                f"num_train_steps: {num_steps} given, but {num_blocks} blocks train one after the other, each for up to"
                f" {max_steps} steps (objective.convergence.max_steps). Give {num_blocks * max_steps} or more; the phase ends"
                " when all blocks are done"
            )
        return max_steps

    def _flops(self, model: ModelInStep, references: Sequence[ModelInStep]) -> FlopsPerToken:
        """Of the model what the targets depend on, and the layers that the next one reads; of the teacher all layers. The
        head is not needed. In sequential order, the mean over blocks."""
        flops = model.trained(unreached(model.model, self.target))
        layers = model.flops_per_token(unreached(model.model, "residual"))
        if self.order == "sequential":
            num_blocks = layer_body(model.model, self.target, "objective blockwise").num_layers
            flops, layers = flops.share(1 / num_blocks), layers.share((num_blocks - 1) / 2 / num_blocks)
        elif self.inputs == "student":
            flops = flops.share(2 / 3)  # the forward pass is that of the layers
        if self.inputs == "student":
            flops = flops.with_forward(layers)
        for teacher in references:
            flops = flops.with_forward(teacher.flops_per_token(unreached(teacher.model, "residual")))
        return flops

    def check(self, batch: TokenBatch, model: LanguageModel, trainable: Any) -> None:
        if paths := unreached(trainable, self.target):
            raise ConfigError(
                f"trainable: {paths[0]} is given, but target: {self.target} does not depend on it, so that it has no"
                " gradient. Set phases[i].trainable to patterns for what it depends on, such as ['attn\\.[qk]_']"
            )

    def init_slot(self, trainable: Any) -> BlockProgress:
        return BlockProgress.init(layer_body(trainable, self.target, "objective blockwise").num_layers)

    def update_slot(self, slot: BlockProgress, trainable: Any, updates: jax.Array) -> BlockProgress:
        return slot.after_update(self._trains(slot), self.convergence, self.autotune)

    def pace(self, slot: BlockProgress, trainable: Any) -> Pace:
        scale = slot.scale if self.autotune.mode == "active" else jnp.ones_like(slot.scale)
        factors, body = (
            jnp.where(self._trains(slot), scale, 0.0),
            layer_body(trainable, self.target, "objective blockwise"),
        )
        by_path = {path: factors[jnp.asarray(path_before_splits(path, body)[1])] for path, _ in tree.leaves(trainable)}
        if self.order == "parallel":
            return Pace(by_path)
        return Pace(by_path, slot.steps[jnp.minimum(slot.current, body.num_layers - 1)])

    def annotate(
        self, refs: Mapping[str, LanguageModel], batch: TokenBatch, slot: Any = None, model: Any = None
    ) -> TokenBatch:
        """Adds the streams of the teacher's layers. Without an effect on a batch that has them."""
        if batch.annotations is not None:
            return batch
        streams: Any = layer_streams(refs[self.teacher], Inputs.of(batch), self.target)
        if self.cache == "int8":
            streams = Int8Streams.of(streams)
        if self.cache:  # columns of examples
            streams = jax.tree.map(lambda leaf: leaf.rearrange((BATCH, ...)), streams, is_leaf=tree.is_named)
        return replace(batch, annotations=streams)

    def weights(self, batch: TokenBatch) -> dict[str, jax.Array]:
        """The number of tokens that are not padding."""
        return {"loss": _num_tokens(batch)}

    def terms(
        self, model: LanguageModel, batch: TokenBatch, slot: BlockProgress, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, BlockProgress]:
        """The loss term is the sum of the errors of all blocks that are measured. Only those that train have a gradient."""
        streams = batch.annotations.floats() if self.cache == "int8" else batch.annotations
        is_sequential = self.order == "sequential"
        errors = layer_errors(
            model,
            Inputs.of(batch),
            streams,
            self.target,
            current=slot.current if is_sequential else None,
            own_inputs=self.inputs == "student",
            key=key,
        )
        absolute, weight, trains = errors.absolute.array, _num_tokens(batch), self._trains(slot)
        measured = trains if is_sequential else jnp.ones_like(trains)
        metrics: Metrics = {"loss": Sum(jnp.sum(absolute), weight * jnp.sum(measured))}
        metrics["block_nmse"] = Sum(jnp.sum(errors.squared.array), jnp.sum(errors.size.array))
        numbers = {"block_average": slot.average, "block_lr_scale": slot.scale, "block_steps": slot.steps}
        for block in range(absolute.shape[0]):
            if not is_sequential:
                metrics[f"block_error/{block}"] = Sum(absolute[block], weight)
                metrics[f"block_nmse/{block}"] = Sum(errors.squared.array[block], errors.size.array[block])
            metrics |= {
                f"{name}/{block}": Largest(values[block].astype(jnp.float32)) for name, values in numbers.items()
            }
        metrics["blocks_left"] = Largest(jnp.sum(1 - slot.done).astype(jnp.float32))
        metrics["block_events"] = Largest(jnp.sum(slot.events).astype(jnp.float32))
        total = jnp.sum(jnp.where(trains, absolute, jax.lax.stop_gradient(absolute)))
        return {"loss": Sum(total, weight)}, metrics, slot.with_errors(absolute, weight)

    def _trains(self, slot: BlockProgress) -> jax.Array:
        """bool {blocks}: which blocks the next update changes."""
        if self.order == "sequential":
            return jnp.arange(slot.done.shape[0]) == slot.current
        return slot.done == 0


def _num_tokens(batch: TokenBatch) -> jax.Array:
    return jnp.sum(batch.segment_ids.array != 0, dtype=jnp.float32)
