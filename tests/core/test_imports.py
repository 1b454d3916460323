"""Garbage collection is paused and then restored to its previous state."""

import gc
import weakref

from jaxlm.core.imports import gc_paused

import pytest


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.mark.slow
def test_garbage_collection_resumes_and_frees_earlier_garbage():
    enabled = gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        garbage = weakref.ref(Cycle())
        with gc_paused():
            pass
        assert not gc.isenabled()  # an inner pause does not end the outer one
    assert gc.isenabled() == enabled
    assert garbage() is not None
    gc.collect()
    assert garbage() is None


def test_garbage_collection_resumes_after_an_error_and_stays_off_if_it_was_off():
    enabled = gc.isenabled()
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled() == enabled
    gc.disable()
    try:
        gc_paused()(lambda: None)()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_objects_frozen_by_the_caller_stay_frozen():
    already = gc.get_freeze_count()
    mine: list[object] = [[]]

    def is_frozen() -> bool:
        return all(found is not mine for found in gc.get_objects())  # which leaves out frozen ones

    assert not is_frozen()
    gc.freeze()
    try:
        for _ in range(2):
            with gc_paused():
                pass
            assert is_frozen()
    finally:
        if not already:  # tests/conftest.py freezes what all tests share
            gc.unfreeze()
