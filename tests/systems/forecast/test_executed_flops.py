"""FLOPs of compiled programs, whose loops may end when the data says so."""

import contextlib

import jax
import jax.numpy as jnp

from jaxlm.hardware.hlo import (
    loops_counted_once,
    turns_scope,
    with_trip_count,
)
from jaxlm.systems.forecast.roofline import executed_flops, loop_steps


def test_loops_that_end_when_the_data_says_so_get_a_trip_count():
    """Sampling ends when all rows have ended: the loop over tokens has no trip count, the loop over layers inside has one."""

    def sampled(x, most):
        layer = lambda x, _: (jnp.tanh(x @ x), None)  # noqa: E731
        step = lambda at: (jax.lax.scan(layer, at[0], None, length=5)[0], at[1] + 1)  # noqa: E731
        return jax.lax.while_loop(lambda at: (at[1] < most) & jnp.any(at[0] > 0.5), step, (x, 0))[0]

    text = jax.jit(sampled).lower(jnp.ones((8, 8)), 7).compile().as_text()
    flops = 2 * 8**3
    assert executed_flops(text) == 5 * flops
    assert executed_flops(with_trip_count(text, 3)) == 3 * 5 * flops
    known = jax.jit(lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=4)[0]).lower(jnp.ones((8, 8)))
    assert executed_flops(with_trip_count(known.compile().as_text(), 3)) == 4 * flops


def test_loops_whose_turns_the_data_determines_have_those_of_their_scope():
    def attend(x, counts, *scopes):
        def turn(_, y):
            return jnp.tanh(y @ y)

        def block(count):
            with contextlib.ExitStack() as stack:
                for scope in scopes:
                    stack.enter_context(jax.named_scope(scope))
                return jax.lax.fori_loop(0, count, turn, x)

        return jax.lax.map(block, counts)

    def text(*scopes):
        shapes = jnp.ones((8, 8)), jnp.ones(6, int)
        return jax.jit(lambda x, counts: attend(x, counts, *scopes)).lower(*shapes).compile().as_text()

    flops, unknown, known = 2 * 8**3, text(), text("attention", turns_scope(2.5))
    assert executed_flops(unknown) == 6 * flops
    assert executed_flops(known) == 6 * 2.5 * flops
    assert (loop_steps(unknown), loop_steps(known)) == (6 + 6, 6 + 6 * 2.5)
    assert executed_flops(text(turns_scope(9), turns_scope(2))) == 6 * 2 * flops, "the innermost"
    assert loops_counted_once(known) == []
    assert len(loops_counted_once(unknown)) == 1
    others = jax.jit(lambda x: jax.lax.while_loop(lambda x: jnp.any(x > 1), lambda x: x / 2, x)).lower(jnp.ones(8))
    assert loops_counted_once(others.compile().as_text()) == [], "without products"
