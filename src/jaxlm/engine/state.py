"""The one thing that training changes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core.sharding import Layout
from jaxlm.models.base import LanguageModel

T = TypeVar("T")


class UpdateCounts(eqx.Module):
    """Counts of the finite guard.

    Attributes:
        updates: int32, updates applied in this phase: what the learning-rate schedule is read at.
        skipped: int32, steps of the whole run whose update was not finite and was left out.
    """

    updates: jax.Array
    skipped: jax.Array


class RunState(eqx.Module):
    """Everything that a step reads and writes, and all of it is checkpointed.

    Attributes:
        step: int32, batches consumed: `step-N` holds N.
        key: uint32[2], the run's root key. It never changes; a step folds its number in.
        model: parameters, trainable and frozen.
        opt_state: of the trainable leaves only.
        guard: what the finite guard counted.
        slots: owner -> the state that the owner keeps between steps.
    """

    step: jax.Array
    key: jax.Array
    model: LanguageModel
    opt_state: Any
    guard: UpdateCounts
    slots: dict[str, Any]


def step_key(state: RunState) -> jax.Array:
    """The randomness of the step that comes next: a function of the run's key and the step's number alone."""
    return jax.random.fold_in(state.key, state.step)


def shardings(tree: Any, layout: Layout) -> Any:
    """Where each array of a state rests: named arrays by the parameter mapping, everything else on every device."""

    def place(leaf):
        if isinstance(leaf, hax.NamedArray):
            return hax.NamedArray(layout.parameter_sharding(leaf.axes), leaf.axes)  # type: ignore[arg-type]
        return layout.replicated()

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, hax.NamedArray))


def place_state(make: Callable[..., T], like: T, layout: Layout, *args: Any) -> T:
    """Runs `make(*args)` under jit so that every array is born where it rests, never whole on one device.

    The buffers of `args` are given up to the result.

    Args:
        like: shapes and dtypes of what it makes.
    """
    return build_state(make, like, layout, *args)()


def build_state(make: Callable[..., T], like: T, layout: Layout, *args: Any) -> Callable[[], T]:
    """Like `place_state`, which is done when the result is called: until then, the program compiles in a thread."""
    program = jax.jit(
        make,
        out_shardings=shardings(like, layout),
        donate_argnums=tuple(range(len(args))),
        # It runs once: compiling it well takes longer than running it badly.
        compiler_options={"xla_backend_optimization_level": 1},
    )
    thread = ThreadPoolExecutor(1)
    compiled = thread.submit(program.lower(*args).compile)
    thread.shutdown(wait=False)
    return lambda: compiled.result()(*args)


def initial_update_counts() -> UpdateCounts:
    """Nothing counted yet. Traced, so that it is created on the mesh with the rest."""
    return UpdateCounts(updates=jnp.zeros((), jnp.int32), skipped=jnp.zeros((), jnp.int32))
