"""Entering a phase: surgery, then the choice of what trains, then fresh optimizer state. And the same again without
numbers, to know what a checkpoint must look like."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxlm.core.imports import gc_paused

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax

from jaxlm.core import tree
from jaxlm.core.guards import StepGuard
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.engine.state import RunState, build_state, initial_update_counts
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.optim.averaging import AveragingConfig
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, parameter_groups
from jaxlm.surgery.base import SurgeryConfig

InitialLeaves = Mapping[str, hax.NamedArray]
"""Leaves by path."""
# What the run's key is folded with first, so that no two uses share randomness.
_INIT, _SURGERY, _STEPS = 0, 1, 2


@dataclass(frozen=True)
class Phase:
    """One stretch of training with a fixed tree and a fixed compiled step.

    Attributes:
        index: its place in the run, from 0.
        name: for people, logs and checkpoint names.
        surgeries: applied in order on entry.
        trainable: regular expressions on leaf paths; a leaf that none matches is frozen.
        start, end: steps of the whole run that are done before and after it.
        averages: of the weights, by the name that they are evaluated under.
    """

    index: int
    name: str
    surgeries: Sequence[SurgeryConfig]
    trainable: Sequence[str]
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    start: int
    end: int
    averages: Mapping[str, AveragingConfig] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Steps of this phase alone: what its learning-rate schedule spans."""
        return self.end - self.start

    def mask(self, model: LanguageModel) -> Any:
        """True at every leaf that trains."""
        return tree.select(model, self.trainable)

    def split(self, model: LanguageModel) -> tuple[Any, Any]:
        """(trainable, frozen): the same tree twice, with None where the other has the leaf."""
        return tree.partition(model, self.mask(model))

    def guards(self, precision: Precision) -> tuple[StepGuard, ...]:
        """What looks at every step, and may have its update left out."""
        return (*self.optimizer.guards, *precision.loss_scale.guards)

    def averaged(self, state: RunState) -> dict[str, LanguageModel]:
        """The model with each average in the place of what trains, by name; in the model's dtype."""
        return {name: self.with_average(state.model, state.slots[name].weights) for name in self.averages}

    def with_average(self, model: LanguageModel, average: Any) -> LanguageModel:
        """The model with an average, which has its trainable leaves only, in their place; in the model's dtype."""
        trainable, frozen = self.split(model)
        weights = jax.tree.map(lambda a, w: a.astype(w.dtype), average, trainable)
        return eqx.combine(weights, frozen, is_leaf=tree.is_named)

    def groups(self, model: LanguageModel) -> list[ParameterGroup]:
        """The parameter-group table, every trainable leaf in exactly one row."""
        return parameter_groups(self.split(model)[0], self.optimizer)

    def transformation(self, model: LanguageModel) -> optax.GradientTransformationExtraArgs:
        """The optimizer of this phase for this tree (concrete or abstract)."""
        return self.optimizer.build(self.groups(model), self.num_steps)


@dataclass(frozen=True)
class StateBuilder:
    """How a run's trees come about: the model before any phase, and every phase's surgery.

    Attributes:
        seed: of the whole run.
    """

    model: ModelConfig
    Vocab: hax.Axis
    seed: int
    precision: Precision
    phases: Sequence[Phase] = field(default_factory=tuple)
    _abstract: dict[int, RunState] = field(default_factory=dict, init=False, repr=False, compare=False)

    def initial_model(self) -> LanguageModel:
        """The model before the first phase. Traceable."""
        return self.precision.to_params(self.model.build(self.Vocab, key=self._key(_INIT)))

    @functools.cached_property
    def abstract_initial_model(self) -> LanguageModel:
        """Shapes and dtypes of the model before the first phase."""
        return jax.eval_shape(self.initial_model)

    def apply_surgeries(self, model: LanguageModel, phase: Phase) -> LanguageModel:
        """The model with the phase's surgeries done. Traceable."""
        key = jax.random.fold_in(self._key(_SURGERY), phase.index)
        for number, surgery in enumerate(phase.surgeries):
            model = surgery.apply(model, refs={}, calibration=None, key=jax.random.fold_in(key, number))
        return self.precision.to_params(model)

    def state(self, model: LanguageModel, phase: Phase, skipped: jax.Array | int = 0) -> RunState:
        """A state at the very start of a phase, for a model that has been operated on. Traceable."""
        trainable, _ = phase.split(model)
        slot = phase.objective.init_slot(model)
        slots = {} if slot is None else {"objective": slot}
        slots |= {judge.name: judge.init_slot() for judge in phase.guards(self.precision)}
        slots |= {name: average.init_slot(trainable) for name, average in phase.averages.items()}
        return RunState(
            step=jnp.asarray(phase.start, jnp.int32),
            key=self._key(_STEPS),
            model=model,
            opt_state=phase.transformation(model).init(trainable),
            guard=eqx.tree_at(lambda g: g.skipped, initial_update_counts(), jnp.asarray(skipped, jnp.int32)),
            slots=slots,
        )

    def abstract_state(self, phase: Phase) -> RunState:
        """Shapes and dtypes of the state in a phase: all surgeries up to it, replayed without numbers.

        Traced once a phase: a start asks half a dozen times.
        """
        if phase.index not in self._abstract:
            before = (
                self.abstract_state(self.phases[phase.index - 1]).model if phase.index else self.abstract_initial_model
            )
            enter = functools.partial(self.entered, phase=phase)
            self._abstract[phase.index] = jax.eval_shape(enter, before)
        return self._abstract[phase.index]

    def entered(
        self, model: LanguageModel, skipped: jax.Array | int = 0, given: InitialLeaves | None = None, *, phase: Phase
    ) -> RunState:
        """The state at the start of a phase, for the model at the end of the one before. Traceable.

        Args:
            given: what takes the place of leaves that the phase's surgeries make.
        """
        operated = self.apply_surgeries(model, phase)
        if given:
            operated = tree.map_leaves(lambda path, leaf: given.get(path, leaf), operated)
        return self.state(operated, phase, skipped)

    def initial_state(self, phase: Phase, given: InitialLeaves | None = None) -> RunState:
        """The state at the start of a phase, had the ones before it not trained. Traceable. Args: given: see `entered`."""
        model = self.initial_model()
        for earlier in self.phases[: phase.index]:
            model = self.apply_surgeries(model, earlier)
        return self.entered(model, given=given, phase=phase)

    def _key(self, use: int) -> jax.Array:
        return jax.random.fold_in(jax.random.PRNGKey(self.seed), use)


@gc_paused()
def enter_phase(
    state_builder: StateBuilder,
    phase: Phase,
    layout: Layout,
    before: RunState | None,
    weights: LanguageModel | None = None,
    given: InitialLeaves | None = None,
) -> Callable[[], RunState]:
    """Makes the state at the start of a phase when it is called; what that takes is compiled meanwhile.

    Args:
        before: the state at the end of the phase before; None builds the model from the recipe's seed. Its buffers are
            given up.
        weights: the model to begin the first phase with, instead of one from the seed. Its buffers are given up.
        given: what takes the place of leaves that the phase's surgeries make. Its buffers are given up.
    """
    like, given = state_builder.abstract_state(phase), dict(given or {})
    if before is None and weights is None:
        return build_state(lambda given: state_builder.initial_state(phase, given), like, layout, given)
    enter = functools.partial(state_builder.entered, phase=phase)
    if before is None:
        return build_state(enter, like, layout, weights, jnp.zeros((), jnp.int32), given)
    enter = build_state(enter, like, layout, before.model, before.guard.skipped, given)

    def entered() -> RunState:
        # The program takes the model alone; whoever still holds the state would keep the rest of it on the devices.
        for array in jax.tree.leaves((before.opt_state, before.slots)):
            array.delete()
        return enter()

    return entered
