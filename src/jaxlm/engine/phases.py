"""Phases: what a part of training minimizes, on which leaves and how, and when it starts and ends."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import optax

from jaxlm.controllers.base import Controller
from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import StepGuard
from jaxlm.core.precision import Precision
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.engine.state import RunState
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.models.stack_paths import with_new_stack
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.optim.averaging import AveragingConfig
from jaxlm.optim.base import OptimizerConfig, ParameterGroup
from jaxlm.optim.groups import build_optimizer, parameter_groups
from jaxlm.surgery.base import SurgeryConfig


@dataclass(frozen=True)
class Phase:
    """A part of training with a fixed tree and a fixed compiled step.

    Attributes:
        index: its position in the run, from 0.
        name: used in logs and checkpoint names.
        model: config of its model, which its surgeries may have changed.
        surgeries: applied in order on entry.
        trainable: regular expressions on leaf paths, or `new_stack`; a leaf that none of them matches is frozen.
        start, end: steps of the whole run that are done before and after this phase.
        averages: averages of the weights, by the name that they are evaluated under.
        controllers: decide between steps what happens next, in the order in which they are asked.
        carries_optimizer: whether the optimizer state of leaves that the previous phase trained too goes on.
        schedule_start: the step at which the learning-rate schedule begins, if an earlier phase shares it.
        scheduled_steps: number of steps that the schedule spans, if that is not the length of the phase: the phase has ended
            early, or shares the schedule with others.
    """

    index: int
    name: str
    model: ModelConfig
    surgeries: Sequence[SurgeryConfig]
    trainable: Sequence[str]
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    start: int
    end: int
    averages: Mapping[str, AveragingConfig] = field(default_factory=dict)
    controllers: Sequence[Controller] = ()
    carries_optimizer: bool = False
    schedule_start: int | None = None
    scheduled_steps: int | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps that the phase's learning-rate schedule spans. The phase may have ended before."""
        return self.end - self.start if self.scheduled_steps is None else self.scheduled_steps

    @property
    def first_scheduled(self) -> int:
        """The step at which the learning-rate schedule begins."""
        return self.start if self.schedule_start is None else self.schedule_start

    @property
    def surgery_references(self) -> tuple[str, ...]:
        """Names of the models in the section `refs` that the surgeries read."""
        return tuple(dict.fromkeys(name for surgery in self.surgeries for name in surgery.wants.references))

    def mask(self, model: LanguageModel) -> Any:
        """A tree that is True at every trainable leaf. Raises `ConfigError` for a pattern that matches a stored weight."""
        patterns = with_new_stack(self.trainable, model, f"phase '{self.name}': trainable")
        for path, weight in tree.modules_by_path(model, StoredWeight):
            names = [path, *(f"{path}.{name}" for name, _ in tree.leaves(weight))]
            for pattern in patterns:
                if any(map(tree.compile_pattern(pattern).search, names)):
                    raise ConfigError(
                        f"phase '{self.name}': trainable: '{pattern}' matches {path}, which is stored as {weight.form} and"
                        " cannot be trained: an update is smaller than the distance between two numbers of that form. Train"
                        " adapters on it (surgery lora, trainable: ['\\.[ab]$']), or leave it out of trainable or of the"
                        " surgery quantize"
                    )
        return tree.select(model, patterns)

    def split(self, model: LanguageModel) -> tuple[Any, Any]:
        """(trainable, frozen): two copies of the tree; each has None where the other has the leaf."""
        return tree.partition(model, self.mask(model))

    @property
    def controls(self) -> dict[str, float]:
        """The controls that the controllers set, and their values at the start of the phase."""
        return {name: value for controller in self.controllers for name, value in controller.controls().items()}

    def guards(self, precision: Precision) -> tuple[StepGuard, ...]:
        """Guards that may reject a step's update."""
        return (*self.optimizer.guards, *precision.loss_scale.guards)

    def averaged(self, state: RunState) -> dict[str, LanguageModel]:
        """Average's name -> the model with the averaged weights, in the model's dtype."""
        return {name: self.with_average(state.model, state.slots[name].weights) for name in self.averages}

    def with_average(self, model: LanguageModel, average: Any) -> LanguageModel:
        """The model with its trainable leaves replaced by their average, in the model's dtype."""
        trainable, frozen = self.split(model)
        weights = jax.tree.map(lambda a, w: a.astype(w.dtype), average, trainable)
        return eqx.combine(weights, frozen, is_leaf=tree.is_named)

    def groups(self, model: LanguageModel) -> list[ParameterGroup]:
        """The parameter groups; every trainable leaf is in exactly one of them."""
        return parameter_groups(self.split(model)[0], self.optimizer)

    def transformation(self, model: LanguageModel) -> optax.GradientTransformationExtraArgs:
        """The optimizer of this phase for a concrete or abstract model."""
        return self.transformation_of(self.split(model)[0])

    def transformation_of(self, trainable: Any) -> optax.GradientTransformationExtraArgs:
        """The same for the trainable part of a model."""
        return build_optimizer(self.optimizer, parameter_groups(trainable, self.optimizer), self.num_steps)


def with_phase_ends(phases: Sequence[Phase], ends: Sequence[int]) -> tuple[Phase, ...]:
    """The phases, of which the first ones really ended after these steps. The others follow them."""
    shifted: list[Phase] = []
    starts: dict[int | None, int | None] = {None: None}
    for phase, end in itertools.zip_longest(phases, ends[: len(phases)]):
        start = shifted[-1].end if shifted else phase.start
        starts[phase.start] = start
        planned = phase.end - phase.start
        num_steps = planned if end is None else end - start
        shares = phase.scheduled_steps is not None
        scheduled = phase.num_steps if shares or num_steps != planned else None
        shifted.append(
            replace(
                phase,
                start=start,
                end=start + num_steps,
                schedule_start=starts[phase.schedule_start],
                scheduled_steps=scheduled,
            )
        )
    return tuple(shifted)
