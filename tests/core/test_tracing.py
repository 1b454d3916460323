"""Trace options: functions traced under other options are traced again, also inside an outer trace."""

import jax
import pytest

from jaxlm.core.tracing import BlockSizes, CustomVjp, TraceOptions, trace_options, tracing


@pytest.mark.slow
def test_other_options_are_another_entry_in_the_caches_of_jax():
    traced = []

    @jax.jit
    def double(x):
        traced.append(trace_options())
        return 2 * x

    everywhere = [{}, {"twice_differentiable": True}, {"auto_remat": "full"}, {"assume_kernels": True}]
    everywhere.append({"block_sizes": BlockSizes(loss_chunk_tokens=16)})
    for changes in (*everywhere, *everywhere):
        with tracing(**changes):
            assert double(1.0) == 2.0
    assert traced == [TraceOptions(**changes) for changes in everywhere]


square = CustomVjp(lambda x: x * x)
square.defvjp(lambda x: (x * x, x), lambda x, d: (2 * x * d,))


@jax.jit
def fourth_power(x):
    return jax.lax.scan(lambda y, _: (jax.checkpoint(square)(y), None), x, length=2)[0]


def test_second_derivatives_of_a_function_that_was_traced_without_them():
    """Both in one program, as in a training step: jax cannot differentiate the kernel's backward pass in a loop."""

    @jax.jit
    def program(x):
        first = jax.grad(fourth_power)
        plain = first(x)
        with tracing(twice_differentiable=True):
            return plain, jax.jvp(first, (x,), (1.0,))

    plain, (gradient, second) = program(3.0)
    assert plain == gradient == pytest.approx(4 * 27)
    assert second == pytest.approx(12 * 9)


def test_changes_nest_and_end_with_the_block():
    with tracing(auto_remat="full"):
        with tracing(twice_differentiable=True):
            assert trace_options() == TraceOptions(auto_remat="full", twice_differentiable=True)
        assert trace_options() == TraceOptions(auto_remat="full")
    assert trace_options() == TraceOptions()


def test_a_backward_pass_has_the_options_of_its_forward_pass():
    """A step sets them for the loss, and differentiates it outside."""
    passes = []

    def traced(result):
        passes.append(trace_options())
        return result

    cube = CustomVjp(lambda power, x: x**power, nondiff_argnums=(0,))
    cube.defvjp(lambda power, x: traced((x**power, x)), lambda power, x, d: traced((power * x ** (power - 1) * d,)))

    def loss(x):
        with tracing(quantized_products=True):
            return jax.lax.scan(lambda y, _: (jax.checkpoint(lambda y: cube(3, y))(y), None), x, length=1)[0]

    assert jax.jit(jax.grad(loss))(2.0) == 12.0
    assert len(passes) >= 2
    assert set(passes) == {TraceOptions(quantized_products=True)}
    assert trace_options() == TraceOptions()
