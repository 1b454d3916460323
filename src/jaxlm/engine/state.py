"""The run's state: everything that training changes."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import jax
import numpy as np

from jaxlm.core import guards
from jaxlm.core.sharding import Layout
from jaxlm.models.base import LanguageModel

T = TypeVar("T")
OBJECTIVE_SLOT = "objective"
"""Owner of the objective's state in `RunState.slots`."""


class UpdateCounts(eqx.Module):
    """Counts of applied and skipped updates.

    Attributes:
        updates: int32, updates applied in this phase; the learning-rate schedule is evaluated at this count.
        skipped: int32, steps of the whole run whose update was skipped.
    """

    updates: jax.Array
    skipped: jax.Array


class RunState(eqx.Module):
    """Everything that a step reads and writes. All of it is checkpointed.

    Attributes:
        step: int32, batches consumed; the checkpoint `step-N` has N.
        key: uint32[2], the run's root PRNG key. It never changes; each step folds in its step number.
        model: parameters, trainable and frozen.
        opt_state: optimizer state of the trainable leaves.
        guard: counts of applied and skipped updates.
        slots: owner -> the state that the owner keeps between steps.
    """

    step: jax.Array
    key: jax.Array
    model: LanguageModel
    opt_state: Any
    guard: UpdateCounts
    slots: dict[str, Any]


def step_key(state: RunState) -> jax.Array:
    """PRNG key of the next step. It depends only on the run's key and the step number."""
    return jax.random.fold_in(state.key, state.step)


def on_devices(value: np.generic, layout: Layout) -> jax.Array:
    """A scalar that every device has."""
    return jax.make_array_from_callback((), layout.replicated(), lambda _: np.asarray(value))


def with_controls(state: RunState, values: Mapping[str, float], layout: Layout) -> RunState:
    """The state with these controls in place of all others. Without values, it has no slot for them."""
    slots = without_controls(state).slots
    if values:
        slots = slots | {guards.SLOT: {name: on_devices(np.float32(v), layout) for name, v in values.items()}}
    return dataclasses.replace(state, slots=slots)


def without_controls(state: RunState) -> RunState:
    """The state without the slot of the controls."""
    others = {name: slot for name, slot in state.slots.items() if name != guards.SLOT}
    return dataclasses.replace(state, slots=others)


def shardings(tree: Any, layout: Layout) -> Any:
    """Sharding of each array of a state: named arrays by the parameter mapping, everything else replicated.

    The named arrays of a `RunState`'s optimizer state are in `Layout.optimizer_memory`.
    """

    def placed(tree: Any, memory: str | None = None) -> Any:
        def place(leaf: Any) -> Any:
            if not isinstance(leaf, hax.NamedArray):
                return layout.replicated()
            sharding: Any = layout.parameter_sharding(leaf.axes)
            return hax.NamedArray(sharding if memory is None else sharding.with_memory_kind(memory), leaf.axes)

        return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, hax.NamedArray))

    if not isinstance(tree, RunState):
        return placed(tree)
    others = placed(dataclasses.replace(tree, opt_state=None))
    return dataclasses.replace(others, opt_state=placed(tree.opt_state, layout.optimizer_memory))


def in_device_memory(tree: T, after: jax.Array | None = None) -> T:
    """Copies what is in the host's memory to the devices, to compute with it. Call it in traced code.

    Args:
        after: the copies wait for this value. XLA would otherwise start them with the step, and their arrays would take
            memory beside everything else that the step computes.
    """

    def moved(array: jax.Array) -> jax.Array:
        if jax.typeof(array).memory_space != jax.memory.Space.Host:
            return array
        array, _ = jax.lax.optimization_barrier((array, after))
        return jax.device_put(array, jax.memory.Space.Device)

    return jax.tree.map(moved, tree)


def sharded_shapes(abstract: T, layout: Layout) -> T:
    """Shapes and dtypes with the `shardings` of a state."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings(abstract, layout),
    )


def place_state(make: Callable[..., T], abstract: T, layout: Layout, *args: Any) -> T:
    """Runs `make(*args)` under jit so that every array is created with its sharding, never whole on one device.

    `abstract` has the shapes and dtypes of the result. The buffers of `args` are donated.
    """
    return build_state(make, abstract, layout, *args)()


def build_state(
    make: Callable[..., T], abstract: T, layout: Layout, *args: Any, kept: tuple[Any, ...] = ()
) -> Callable[[], T]:
    """Compiles `make` in a thread and returns a function that waits for it and runs it; otherwise like `place_state`.

    Args:
        kept: further arguments, which keep their buffers.
    """
    program = jax.jit(
        make,
        out_shardings=shardings(abstract, layout),
        donate_argnums=tuple(range(len(args))),
        # It runs once, so optimizing the program costs more than it saves.
        compiler_options={"xla_backend_optimization_level": 1},
    )
    with warnings.catch_warnings():
        # Of a model that loses layers, no output takes the buffers.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        lowered = program.lower(*args, *kept)
    thread = ThreadPoolExecutor(1)
    compiled = thread.submit(lowered.compile)
    thread.shutdown(wait=False)
    return lambda: compiled.result()(*args, *kept)
