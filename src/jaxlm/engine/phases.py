"""Phases, and how the state at the start of a phase is built: surgery, trainable mask, fresh optimizer state.

Tracing the same functions on shapes gives the structure that a checkpoint of the phase must have.
"""

import difflib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jaxlm.core.imports import gc_paused

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlm.controllers.base import Controller
from jaxlm.core import controls, tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import StepGuard
from jaxlm.core.matmul import StoredWeight
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.engine.state import RunState, UpdateCounts, build_state, shardings
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.optim.averaging import AveragingConfig
from jaxlm.optim.base import OptimizerConfig, ParameterGroup
from jaxlm.optim.groups import build_optimizer, parameter_groups
from jaxlm.surgery.base import SurgeryConfig

T = TypeVar("T")
InitialLeaves = Sequence[Mapping[str, hax.NamedArray]]
"""For each surgery of a phase: leaf path -> the value that replaces the one made by the surgery."""
# Folded into the run's key first, so that no two uses share randomness.
_INIT, _SURGERY, _STEPS = 0, 1, 2


@dataclass(frozen=True)
class Phase:
    """A part of training with a fixed tree and a fixed compiled step.

    Attributes:
        index: its position in the run, from 0.
        name: used in logs and checkpoint names.
        surgeries: applied in order on entry.
        trainable: regular expressions on leaf paths; a leaf that none of them matches is frozen.
        start, end: steps of the whole run that are done before and after this phase.
        averages: averages of the weights, by the name that they are evaluated under.
        controllers: decide between steps what happens next, in the order in which they are asked.
        scheduled_steps: number of steps that were planned, if the phase has ended early.
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
    controllers: Sequence[Controller] = ()
    scheduled_steps: int | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps that the phase's learning-rate schedule spans. The phase may have ended before."""
        return self.end - self.start if self.scheduled_steps is None else self.scheduled_steps

    def mask(self, model: LanguageModel) -> Any:
        """A tree that is True at every trainable leaf. Raises `ConfigError` if one of them is part of a stored weight."""
        mask = tree.select(model, self.trainable)
        for path, selected in tree.modules_by_path(mask, StoredWeight):
            if any(jax.tree.leaves(selected)):
                raise ConfigError(
                    f"phase '{self.name}': trainable matches {path}, which is stored as {type(selected).__name__} and cannot"
                    " be trained. Train a model with floating-point weights, or change trainable to leave this one out"
                )
        return mask

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
        return build_optimizer(self.optimizer, self.groups(model), self.num_steps)


class StateBuilder:
    """Builds a run's models and states: the initial model, and the state at the start of each phase.

    Attributes:
        model: config of the model.
        seed: random seed of the whole run.
        precision: dtypes of storage and computation.
        phases: all phases of the run.
        token_leaves: path -> value of the leaves of the initial model that were computed from the training tokens.
    """

    def __init__(
        self,
        model: ModelConfig,
        Vocab: hax.Axis,
        seed: int,
        precision: Precision,
        phases: Sequence[Phase] = (),
        token_leaves: Mapping[str, np.ndarray] | None = None,
    ):
        self.model, self.Vocab, self.precision, self.phases = model, Vocab, precision, tuple(phases)
        self.seed, self.token_leaves = seed, dict(token_leaves or {})
        self._abstract: dict[int, RunState] = {}

    def initial_model(self) -> LanguageModel:
        """The model before the first phase's surgeries. Traceable."""
        model = self.precision.cast_to_params(self.model.build(self.Vocab, key=self._key(_INIT)))
        given = self.token_leaves

        def replaced(path: str, leaf: Any) -> Any:
            return hax.NamedArray(jnp.asarray(given[path], leaf.dtype), leaf.axes) if path in given else leaf

        return tree.map_leaves(replaced, model)

    def with_vocabulary(self, size: int) -> "StateBuilder":
        """A builder of the same models with another number of tokens."""
        return StateBuilder(self.model, self.Vocab.resize(size), self.seed, self.precision, self.phases)

    @functools.cached_property
    def abstract_initial_model(self) -> LanguageModel:
        """Shapes and dtypes of `initial_model`."""
        return jax.eval_shape(self.initial_model)

    def surgeries_until(self, phase: Phase) -> tuple[SurgeryConfig, ...]:
        """The surgeries of all phases up to and including this one, in order."""
        return tuple(surgery for earlier in self.phases[: phase.index + 1] for surgery in earlier.surgeries)

    def apply_surgeries(
        self, model: LanguageModel, phase: Phase, initial_leaves: InitialLeaves | None = None
    ) -> LanguageModel:
        """The model after the phase's surgeries. Traceable."""
        for number in range(len(phase.surgeries)):
            model = self._apply_surgery(model, phase, number)
            if initial_leaves:
                model = tree.map_leaves(lambda path, leaf, given=initial_leaves[number]: given.get(path, leaf), model)
        return self.precision.cast_to_params(model)

    def _apply_surgery(self, model: LanguageModel, phase: Phase, number: int) -> LanguageModel:
        key = jax.random.fold_in(self._key(_SURGERY), phase.index)
        return phase.surgeries[number].apply(model, key=jax.random.fold_in(key, number))

    def initial_leaves(self, phase: Phase) -> InitialLeaves:
        """The leaves that the phase's surgeries bring themselves, as host arrays in the dtype of storage.

        Raises:
            ConfigError: they cannot be read, or do not fit the model.
        """
        model, found = self._abstract_model_before(phase), []
        for number, surgery in enumerate(phase.surgeries):
            model = jax.eval_shape(functools.partial(self._apply_surgery, phase=phase, number=number), model)
            stored = dict(tree.leaves(jax.eval_shape(self.precision.cast_to_params, model)))
            leaves: Mapping[str, Any] = _readable(surgery.initial_leaves, f"surgery.{number}", model, self.model)
            _check_fit(leaves, stored, f"surgery.{number}")
            found.append({p: hax.NamedArray(a.astype(stored[p].dtype), stored[p].axes) for p, a in leaves.items()})
        return found

    def state(self, model: LanguageModel, phase: Phase, skipped: jax.Array | int = 0) -> RunState:
        """The state at the start of a phase, for a model after the phase's surgeries. Traceable."""
        trainable, _ = phase.split(model)
        slot = phase.objective.init_slot(self.precision.cast_to_compute(trainable))
        slots = {} if slot is None else {"objective": slot}
        slots |= {guard.name: guard.init_slot() for guard in phase.guards(self.precision)}
        slots |= {name: average.init_slot(trainable) for name, average in phase.averages.items()}
        if initial := phase.controls:
            slots[controls.SLOT] = {name: jnp.asarray(value, jnp.float32) for name, value in initial.items()}
        return RunState(
            step=jnp.asarray(phase.start, jnp.int32),
            key=self._key(_STEPS),
            model=model,
            opt_state=phase.transformation(model).init(trainable),
            guard=UpdateCounts(updates=jnp.zeros((), jnp.int32), skipped=jnp.asarray(skipped, jnp.int32)),
            slots=slots,
        )

    def abstract_state(self, phase: Phase) -> RunState:
        """Shapes and dtypes of the state in a phase: traces the surgeries of all phases up to it.

        Cached per phase, because a start needs it several times.
        """
        index = phase.index
        if index not in self._abstract:
            previous = self._abstract_model_before(phase)
            self._abstract[index] = jax.eval_shape(functools.partial(self.entry_state, phase=phase), previous)
        return self._abstract[index]

    def _abstract_model_before(self, phase: Phase) -> LanguageModel:
        """Shapes and dtypes of the model that the phase's surgeries change."""
        if phase.index == 0:
            return self.abstract_initial_model
        return self.abstract_state(self.phases[phase.index - 1]).model

    def entry_state(
        self,
        model: LanguageModel,
        skipped: jax.Array | int = 0,
        initial_leaves: InitialLeaves | None = None,
        *,
        phase: Phase,
    ) -> RunState:
        """The state at the start of a phase, for the model at the end of the previous one. Traceable."""
        return self.state(self.apply_surgeries(model, phase, initial_leaves), phase, skipped)

    def initial_state(self, phase: Phase, initial_leaves: InitialLeaves | None = None) -> RunState:
        """The state at the start of a phase as if the previous phases had not trained. Traceable."""
        model = self.initial_model()
        for earlier in self.phases[: phase.index]:
            model = self.apply_surgeries(model, earlier)
        return self.entry_state(model, initial_leaves=initial_leaves, phase=phase)

    def _key(self, use: int) -> jax.Array:
        return jax.random.fold_in(jax.random.PRNGKey(self.seed), use)


def with_phase_ends(state_builder: StateBuilder, ends: Sequence[int]) -> StateBuilder:
    """The same builder, with the steps after which its first phases really ended. The other phases follow them."""
    shifted: list[Phase] = []
    for phase, end in itertools.zip_longest(state_builder.phases, ends[: len(state_builder.phases)]):
        start = shifted[-1].end if shifted else phase.start
        num_steps = phase.num_steps if end is None else end - start
        scheduled = None if num_steps == phase.num_steps else phase.num_steps
        shifted.append(replace(phase, start=start, end=start + num_steps, scheduled_steps=scheduled))
    model, Vocab = state_builder.model, state_builder.Vocab
    return StateBuilder(model, Vocab, state_builder.seed, state_builder.precision, shifted, state_builder.token_leaves)


def with_token_leaves(state_builder: StateBuilder, leaves: Mapping[str, np.ndarray]) -> StateBuilder:
    """The same builder for an initial model with these leaves, by path."""
    of = state_builder
    return StateBuilder(of.model, of.Vocab, of.seed, of.precision, of.phases, leaves)


@gc_paused()
def _readable(read: Callable[..., T], path: str, *arguments: Any) -> T:
    try:
        return read(*arguments)
    except OSError as error:
        raise ConfigError(f"{path}: {error.filename or 'a file'} cannot be read ({error.strerror or error})") from error


def _check_fit(leaves: Mapping[str, Any], stored: Mapping[str, hax.NamedArray], path: str) -> None:
    """Raises `ConfigError` if an array that a surgery brings has no place in the model, or another shape."""
    for name, array in leaves.items():
        if name not in stored:
            near = difflib.get_close_matches(name, stored, n=1)
            hint = f". Did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"{path}: the array '{name}' has no place in the model{hint}")
        sizes = {axis.name: axis.size for axis in stored[name].axes}
        if tuple(array.shape) != tuple(sizes.values()):
            raise ConfigError(
                f"{path}: the array '{name}' has shape {tuple(array.shape)}, but the model's has the axes {sizes}"
            )


def enter_phase(
    state_builder: StateBuilder,
    phase: Phase,
    layout: Layout,
    previous: RunState | None,
    weights: LanguageModel | None = None,
) -> Callable[[], RunState]:
    """Returns a function that builds the state at the start of a phase. Until it is called, its program compiles in a thread.

    The buffers of `previous` and `weights` are donated.

    Args:
        previous: the state at the end of the previous phase; None builds the model from the run's seed.
        weights: the model to start the first phase with, instead of one built from the seed.
    """
    abstract, leaves = state_builder.abstract_state(phase), state_builder.initial_leaves(phase)
    leaves = jax.device_put(leaves, shardings(leaves, layout))
    if previous is None and weights is None:
        return build_state(lambda leaves: state_builder.initial_state(phase, leaves), abstract, layout, leaves)
    entry_state = functools.partial(state_builder.entry_state, phase=phase)
    if previous is None:
        return build_state(entry_state, abstract, layout, weights, jnp.zeros((), jnp.int32), leaves)
    build = build_state(entry_state, abstract, layout, previous.model, previous.guard.skipped, leaves)

    def enter() -> RunState:
        # The program donates the model only. Free the rest, which callers that still hold the state would keep alive.
        for array in jax.tree.leaves((previous.opt_state, previous.slots)):
            array.delete()
        return build()

    return enter
