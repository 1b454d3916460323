"""The optimizer interface: turns the gradients of groups of parameters into updates."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import draccus
import jax
import optax

from jaxlm.core import tree
from jaxlm.core.field_types import (
    Fraction,
    LearningRate,
    NonNegativeFloat,
    PositiveInt,
    PositiveScheduleLength,
    ScheduleLength,
)
from jaxlm.core.guards import OptimizerFacts, StepGuard, scaled
from jaxlm.core.parameters import UpdateRule
from jaxlm.core.rules import Rules, excludes
from jaxlm.optim.bad_steps import SkipBadSteps, WindowLength, bad_step_guards
from jaxlm.optim.clipping import AdaGc
from jaxlm.optim.schedules import LrShape, Schedule, ScheduleSpec, make_schedule
from jaxlm.optim.stored_state import Full, StateFormat
from jaxlm.optim.telemetry import Telemetry, telemetry_guards
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import INHERITS


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated in the same way.

    Attributes:
        num_parameters: total number of elements.
        weight_decay: decoupled decay, before multiplication by the learning rate.
        as_matrices: whether the optimizer applies its update rule for matrices to them.
        owner: index in `OptimizerConfig.groups` of the optimizer that updates them; None for the outer optimizer.
        rule: updates them in place of an optimizer, which never sees them; None for all that optimizers update.
    """

    name: str
    paths: tuple[str, ...]
    num_parameters: int
    weight_decay: float
    as_matrices: bool = False
    owner: int | None = None
    rule: UpdateRule | None = None


@dataclass(frozen=True)
class OptimizerConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """Options shared by all optimizers. `type:` in YAML selects the optimizer.

    Lengths are steps or fractions. An integer is a number of steps, so `1` is one step. A number with a decimal point is a
    fraction, so `1.0` is all; above 1.0 it is a whole number of steps too.

    Attributes:
        learning_rate: peak learning rate.
        weight_decay: decoupled weight decay, as in AdamW; multiplied by the learning rate of the step.
        lr_schedule: shape of the learning-rate decay: constant, linear, cosine, sgdr, polynomial, inv_sqrt, inv or power, as
            a name or as a section with `type` and the keys of that shape.
        min_lr_ratio: learning rate at the end of each cycle, as a fraction of the peak.
        lr_floor: lowest learning rate of all updates, those of the warmup too, as a fraction of the peak. With
            `min_lr_ratio: 0`, the decay has its full shape and stops at the floor.
        warmup: length of the linear warmup from 0 to the peak in the first cycle, limited to the length of that cycle.
            An integer: steps; 0.0 to 1.0: fraction of the cycle.
        warmup_from_zero: the first update of a warmup has the learning rate that it starts from: 0 in the first cycle. False
            starts one step further, so that no update is lost: the first of N steps of warmup has 1/N of the peak.
        decay: length of the decay from the peak at the end of each cycle, limited to what the warmup leaves. An
            integer: steps; 0.0 to 1.0: fraction of the cycle. Null decays over everything after the warmup.
        rewarmup: length of the warmup of each later cycle, from the last learning rate of the previous cycle to the peak. An
            integer: steps; 0.0 to 1.0: fraction of the cycle. 0 jumps to the peak.
        cycles: number of cycles of equal length, or a list of the steps at which cycles end. Null means one cycle.
        cycle_length: length of each cycle, or a list of lengths of the first cycles; the last cycle takes the remaining
            steps. An integer: steps; up to 1.0: fraction of the phase. Null means one cycle.
        weight_decay_modules: regular expression, or list of them, searched for in parameter paths; matching parameters get
            weight decay. Null uses the default mask.
        default_weight_decay_mask: apply weight decay to everything except norms, biases, embeddings and what else its layer
            says does not decay. Null does so only if `weight_decay_modules` is null. False without `weight_decay_modules`
            applies it to all parameters.
        skip_bad_steps: skip the update of a step whose loss or gradient norm is an outlier compared with recent steps:
            true, the number of steps to compare with, or a section. Non-finite steps are always skipped.
        telemetry: measure in every step the trend of the loss and of the gradient norm, spikes and plateaus, as metrics
            `telemetry/...` for controllers and trackers: true, or a section. It changes no update. Null measures nothing.
        adagc: scale the gradient of a tensor down if its norm is large compared with the tensor's own recent norms (AdaGC):
            null, or a section. It acts on the gradients of all parameters, before `max_grad_norm`; the paper uses it in place
            of that, with `max_grad_norm: null`.
        state: what the optimizer's state is stored as between updates: full, in the dtypes that it has; or 8bit, as
            8-bit optimizers do, as a name or as a section with `type` and the keys of that format. A run cannot resume with
            another one.
        groups: optimizers for some of the parameters. Each entry has `match`, and any `type` and keys of an optimizer. Keys
            that are set in the optimizer around the list apply to the entries too, unless they set them themselves; so does
            `type`. The first entry that matches a parameter updates it, and the optimizer around the list updates the rest.
            An entry without parameters is an error. `max_grad_norm`, `adagc`, `skip_bad_steps` and `telemetry` are about all
            parameters together and cannot differ in an entry.
        match: in an entry of `groups` only: regular expression searched for in parameter paths; the entry updates the
            parameters that match.
    """

    learning_rate: LearningRate = 1e-4
    weight_decay: NonNegativeFloat = 0.0
    lr_schedule: LrShape | str = "cosine"
    min_lr_ratio: Fraction = 0.1
    lr_floor: Fraction = 0.0
    warmup: ScheduleLength = 0.01
    warmup_from_zero: bool = True
    decay: ScheduleLength | None = None
    rewarmup: ScheduleLength = 0.0
    cycles: PositiveInt | list[PositiveInt] | None = None
    cycle_length: PositiveScheduleLength | list[PositiveInt] | None = None
    weight_decay_modules: str | list[str] | None = None
    default_weight_decay_mask: bool | None = None
    skip_bad_steps: bool | WindowLength | SkipBadSteps = False
    telemetry: bool | Telemetry | None = None
    adagc: AdaGc | None = None
    state: StateFormat = field(default_factory=Full)
    groups: "list[OptimizerConfig]" = field(default_factory=list, metadata=INHERITS)
    match: str | None = None

    key_rules: ClassVar[Rules] = (excludes("cycles", "cycle_length"),)

    separates_matrices: ClassVar[bool] = False
    """Whether the optimizer has a separate update rule for matrices (see `jaxlm.optim.matrices`)."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The optimizer used when a config has no `type:`."""
        return "adam"

    @abc.abstractmethod
    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        """Builds the gradient transformation for a phase of `num_steps` steps.

        Its extra arguments are `curvature` and, if a controller of the phase sets any, `controls` (`core/guards.py`).
        `scale_by_learning_rate` reads those.

        The schedule's step count is part of the optimizer state, so a skipped step does not advance the schedule.
        """

    @property
    def guards(self) -> tuple[StepGuard, ...]:
        """Guards that judge each step."""
        return (*bad_step_guards(self.skip_bad_steps), *telemetry_guards(self.telemetry))

    @property
    def facts(self) -> OptimizerFacts:
        """What the rest of a run may know."""
        window = next((guard.window for guard in telemetry_guards(self.telemetry)), None)
        rule = next((guard.rewind_rule for guard in bad_step_guards(self.skip_bad_steps)), None)
        return OptimizerFacts(self.learning_rate, telemetry_window=window, rewind_rule=rule)

    def schedule(self, num_steps: int) -> Schedule:
        """The learning rate of an update, as a function of the number of updates applied before it in the phase."""
        spec = ScheduleSpec(
            peak=self.facts.learning_rate,
            warmup=self.warmup,
            decay=self.decay,
            kind=self.lr_schedule,
            min_ratio=self.min_lr_ratio,
            rewarmup=self.rewarmup,
            cycles=self.cycles,
            cycle_length=self.cycle_length,
            from_zero=self.warmup_from_zero,
            floor=self.lr_floor,
        )
        return make_schedule(spec, num_steps)


def decay_mask(groups: Sequence[ParameterGroup]):
    """The mask for `optax.add_decayed_weights`: maps params to True at every leaf of a group that decays."""
    decaying = {path for group in groups if group.weight_decay for path in group.paths}
    return lambda params: tree.map_leaves(lambda path, _: path in decaying, params)


def add_weight_decay(config: OptimizerConfig, groups: Sequence[ParameterGroup]) -> optax.GradientTransformation:
    """Adds decoupled weight decay to the parameters that decay. Place it before the learning rate."""
    return optax.add_decayed_weights(config.weight_decay, decay_mask(groups))


def chained(
    config: OptimizerConfig,
    groups: Sequence[ParameterGroup],
    num_steps: int,
    *directions: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Directions, weight decay, and the learning rate, one after the other."""
    rate = scale_by_learning_rate(config.schedule(num_steps))
    return optax.with_extra_args_support(optax.chain(*directions, add_weight_decay(config, groups), rate))


def clip_by_norm(max_norm: float | None) -> optax.GradientTransformation:
    """Scales gradients with a larger global norm down to `max_norm`; None disables clipping."""
    return optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)


def scale_by_learning_rate(schedule: Schedule) -> optax.GradientTransformationExtraArgs:
    """Multiplies directions by minus the learning rate of the step, to which the control `lr_scale` belongs."""

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, controls: Mapping[str, jax.Array] | None = None, **_: Any
    ) -> tuple[Any, Any]:
        rate = optax.scale_by_learning_rate(lambda count: scaled(schedule(count), controls or {}))  # pyright: ignore[reportArgumentType]
        return rate.update(updates, state, params)

    return optax.GradientTransformationExtraArgs(optax.scale_by_learning_rate(schedule).init, update_fn)  # pyright: ignore
