import statistics
import time
from types import SimpleNamespace

from jaxlm.data.prefetch import Prefetch
from jaxlm.engine.loop import run_phase
from tests.engine.helpers import phase

STEPS = 20


class Timed:
    """Batches that take a while to make, and the loop's view of them."""

    def __init__(self, making_s: float):
        self.ahead = Prefetch(lambda number: time.sleep(making_s), depth=2)
        self.read_ahead = self.ahead.refill

    def __next__(self):
        return self.ahead.take()

    def state(self):
        return {}


def waits(making_s: float, step_s: float) -> list[float]:
    """Seconds that each of the steps waited for its batch, as they are logged."""
    logged: list[float] = []
    batches = Timed(making_s)
    run_phase(
        SimpleNamespace(step=0),
        phase(end=STEPS),
        lambda *_: (None, None),
        batches,
        reports=SimpleNamespace(
            push=lambda step, report, loading_s: logged.append(loading_s) or time.sleep(step_s),
            drain=lambda: None,
            skip_time=lambda: None,
            tally=None,
        ),
        hooks=[],
        saver=SimpleNamespace(due_by_clock=lambda: False, due_by_step=lambda _: False, save=lambda *_, **__: None),
        ballot=SimpleNamespace(cast=lambda _: None, result=lambda *_: SimpleNamespace(save=False, stop=0)),
        stop=SimpleNamespace(signal=0),
    )
    batches.ahead.close()
    return logged


def test_a_source_that_is_slower_than_the_step_shows_in_the_loading_time():
    assert statistics.median(waits(making_s=0.02, step_s=0.0)) >= 0.018
    assert statistics.median(waits(making_s=0.04, step_s=0.02)) >= 0.01  # the step covers the rest


def test_a_batch_that_is_ready_is_there_at_once():
    assert statistics.median(waits(making_s=0.002, step_s=0.02)) < 1e-3
