import gc
import threading
import time
import traceback

import pytest

from jaxlm.data import loader
from jaxlm.data.loader import Prefetch
from tests.forks import ends_of


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_yields_everything_in_order_and_reads_at_most_its_depth_ahead():
    made = []

    def make(number):
        made.append(number)
        return number * number

    ahead = Prefetch(make, depth=2)
    assert [ahead.take() for _ in range(5)] == [0, 1, 4, 9, 16]
    wait_until(lambda: len(made) >= 7)
    time.sleep(0.2)
    ahead.close()
    assert made == list(range(7))  # five taken, two waiting


def test_taking_a_ready_item_wakes_no_thread_but_refill_does(monkeypatch):
    monkeypatch.setattr(loader, "_POLL_S", 60.0)
    made = []
    ahead = Prefetch(made.append, depth=2)
    wait_until(lambda: len(made) == 2)
    wait_until(lambda: ahead._wake._cond._waiters)  # the thread sleeps
    ahead.take()
    time.sleep(0.2)
    assert len(made) == 2
    ahead.refill()
    wait_until(lambda: len(made) == 3)
    for _ in range(50):  # more than there are, without a refill
        ahead.take()
    ahead.close()


def test_an_error_is_raised_in_order_with_its_traceback_and_persists():
    def read_record(number):
        if number == 2:
            raise ValueError(f"record {number} is broken")
        return number

    ahead = Prefetch(read_record, depth=4)
    assert [ahead.take(), ahead.take()] == [0, 1]
    for _ in range(3):
        with pytest.raises(ValueError, match="record 2 is broken") as caught:
            ahead.take()
        assert "read_record" in "".join(traceback.format_tb(caught.value.__traceback__))
    ahead.close()
    assert not own_threads()


def test_close_is_prompt_when_the_queue_is_full():
    ahead = Prefetch(lambda number: number, depth=2)
    ahead.take()
    began = time.monotonic()
    ahead.close()
    ahead.close()
    assert time.monotonic() - began < 30
    assert not own_threads()


@pytest.mark.slow
def test_garbage_collection_ends_the_thread():
    ahead = Prefetch(lambda number: number, depth=2)
    ahead.take()
    del ahead
    gc.collect()
    wait_until(lambda: not own_threads())


@pytest.mark.slow
def test_the_interpreter_exits_with_an_open_prefetcher(tmp_path):
    endings = ("", "raise SystemExit(0)", "cycle = [ahead]; cycle.append(cycle); del ahead")
    begun = "ahead = Prefetch(lambda number: number, depth=2)\nahead.take()\n"
    ends = ends_of("from jaxlm.data.loader import Prefetch", [begun + ending for ending in endings], tmp_path)
    assert dict(zip(endings, ends, strict=True)) == dict.fromkeys(endings, (0, ""))
