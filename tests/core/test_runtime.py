"""Processes that compare facts, and code that runs on process 0 first: a failure ends all of them with its message."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError, PeerError
from jaxlm.core.runtime import (
    all_processes,
    broadcast_from_main,
    differences_between_processes,
    from_main,
    main_first,
    main_only,
    release_ended,
    same_on_all_processes,
)
from tests.processes import Service, together


def fail(error):
    def act():
        raise error

    return act


NEVER = fail(AssertionError("must not be called"))


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (ConfigError("data.x: größe is wrong"), ConfigError, "process 0: data.x: größe is wrong"),
        (OSError(5, "Input/output error"), PeerError, "process 0: OSError: [Errno 5] Input/output error"),
        (KeyboardInterrupt(), PeerError, "process 0: KeyboardInterrupt: "),
        (ConfigError("ö" * 9999), ConfigError, f"process 0: {ConfigError('ö' * 9999)}"),
    ],
)
@pytest.mark.parametrize("function", [main_only, main_first, from_main])
def test_other_processes_fail_like_process_0(function, error, expected, message):
    first, *others = together(lambda: function(fail(error)), *[lambda: function(NEVER)] * 2)
    assert first is error
    for other in others:
        assert (type(other), str(other)) == (expected, message)


def test_what_process_0_makes_is_on_every_process():
    for value in (0, ["größe", None, 0.1, True], {"long": "x" * 5000}):
        assert together(lambda value=value: from_main(lambda: value), lambda: from_main(NEVER)) == [value, value]


def test_all_processes_learn_that_one_has_failed():
    error = OSError("no such disk")
    first, second, third = together(
        lambda: main_first(lambda: 3), lambda: main_first(fail(error)), lambda: main_first(lambda: 3)
    )
    assert second is error
    for end in (first, third):
        assert (type(end), str(end)) == (PeerError, "process 1: OSError: no such disk")


def test_without_errors_results_are_returned():
    assert main_first(lambda: 3) == main_only(lambda: 3) == from_main(lambda: 3) == 3  # one process
    assert together(lambda: main_first(lambda: 3), lambda: main_first(lambda: 4)) == [3, 4]
    assert together(lambda: main_only(lambda: 3), lambda: main_only(NEVER)) == [3, None]


def test_an_array_of_process_0_is_on_every_process_bit_for_bit():
    given = [np.array([1 / 3, np.nan, -0.0]), np.array(2**40 + 1), np.zeros((0, 2), np.int8)]
    for values in given:
        found = together(*(lambda like=like: broadcast_from_main(like) for like in (values, np.ones_like(values))))
        for one in found:
            assert (one.shape, one.dtype, one.tobytes()) == (values.shape, values.dtype, values.tobytes())


def test_facts_that_differ_are_named_with_their_values_and_processes():
    def compare(**facts):
        return lambda: differences_between_processes(facts)

    same, other = compare(seed="0", flags="", model="a"), compare(seed="1", flags="--x", model="a", more="2")
    lines = [
        "flags: none on processes 0, 2; --x on process 1",
        "more: missing on processes 0, 2; 2 on process 1",
        "seed: 0 on processes 0, 2; 1 on process 1",
    ]
    assert together(same, other, same) == [lines] * 3
    assert together(same, same) == [[], []]
    assert compare(seed="1")() == []  # one process


def test_processes_agree_on_a_condition_and_compare_texts():
    for values in ((True, True), (False, True), (True, False)):
        acts = [lambda value=value: (all_processes(value), same_on_all_processes(str(value))) for value in values]
        assert together(*acts) == [(all(values), values[0] == values[1])] * 2


def test_the_store_does_not_grow_with_the_number_of_exchanges():
    """A run exchanges facts in each step that samples. A failure that the caller survives leaves nothing behind either."""
    service = Service()

    def act():
        for _ in range(20):
            all_processes(True)
            with pytest.raises((OSError, PeerError)):
                main_only(fail(OSError("again")))
        all_processes(True)

    assert together(act, act, service=service) == [None, None]
    assert len(service.values) == 2


@pytest.mark.slow
def test_what_has_ended_is_freed():
    """Frozen objects that only refer to each other, and compiled programs: a run of many phases would keep all of them."""

    class Node:
        def __init__(self):
            self.itself = self

    program, node = jax.jit(lambda x: x + 1), Node()
    program(jnp.zeros(()))
    kept = weakref.ref(node)
    gc.collect()
    gc.freeze()
    del node
    gc.collect()
    assert (kept() is None, program._cache_size()) == (False, 1)  # pyright: ignore[reportFunctionMemberAccess]
    release_ended()
    assert (kept(), program._cache_size()) == (None, 0)  # pyright: ignore[reportFunctionMemberAccess]
