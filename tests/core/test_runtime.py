"""Code that runs on process 0 first: its failure ends the other processes with the same message."""

import jax
import numpy as np
import pytest

from jaxlm.core import runtime
from jaxlm.core.errors import ConfigError, PeerError
from jaxlm.core.runtime import from_main, main_first, main_only


def fail(error):
    def act():
        raise error

    return act


@pytest.fixture
def two(monkeypatch):
    """Makes this process the one with the given number in a run of two, with a fixed message from the other process."""
    sent = []

    def become(number, heard=None, all_well=True):
        def broadcast(values):
            sent.append(values)
            return values if heard is None else heard

        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: number)
        monkeypatch.setattr(runtime, "broadcast_from_main", broadcast)
        monkeypatch.setattr(runtime, "all_processes", lambda holds: sent.append(holds) or (holds and all_well))
        return sent

    return become


def heard_of(two, error):
    """The message that process 0 broadcasts when it fails with an error."""
    with pytest.raises(type(error)):
        main_only(fail(error))
    return two(0)[-1]


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (ConfigError("data.x: größe is wrong"), ConfigError, "process 0: data.x: größe is wrong"),
        (OSError(5, "Input/output error"), PeerError, r"process 0: OSError: \[Errno 5\] Input/output error"),
        (KeyboardInterrupt(), PeerError, "process 0: KeyboardInterrupt"),
        (ConfigError("ö" * 9999), ConfigError, r"process 0: ö{1000,} \.\.\. .* left out\) \.\.\. ö+$"),
        (RuntimeError("ö" * 9999), PeerError, "process 0: RuntimeError: ö{1000,2047}$"),
    ],
)
def test_other_processes_fail_like_process_0(two, error, expected, message):
    two(0)
    news = heard_of(two, error)
    two(1, heard=news)
    with pytest.raises(expected, match=message):
        main_first(fail(AssertionError("must not be called")))


def test_what_process_0_makes_is_on_every_process(two, monkeypatch):
    for value in (0, ["größe", None, 0.1, True], {"long": "x" * 5000}):
        sent = two(0)
        sent.clear()
        assert from_main(lambda value=value: value) == value
        two(1)
        heard = iter(list(sent))

        def receive(values, heard=heard):
            news = next(heard)
            assert (values.shape, values.dtype) == (news.shape, news.dtype), "all processes run the same program"
            return news

        monkeypatch.setattr(runtime, "broadcast_from_main", receive)
        assert from_main(fail(AssertionError("must not be called"))) == value
        assert next(heard, None) is None


def test_process_0_learns_that_another_has_failed(two):
    sent = two(1, heard=np.zeros(4096, np.uint8))
    with pytest.raises(OSError, match="no such disk"):
        main_first(fail(OSError("no such disk")))
    assert sent[-1] is False
    two(0, all_well=False)
    with pytest.raises(PeerError, match="another process failed; see its output"):
        main_first(lambda: 3)


def test_without_errors_results_are_returned(two):
    assert main_first(lambda: 3) == main_only(lambda: 3) == 3  # one process
    two(0)
    assert main_first(lambda: 3) == main_only(lambda: 3) == 3
    two(1)
    assert main_first(lambda: 3) == 3
    assert main_only(fail(AssertionError("must not be called"))) is None
