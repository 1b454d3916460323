"""Retries of failed saves: their pauses, log lines and metrics."""

from datetime import timedelta

import pytest

from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.store import SaveError
from jaxlm.engine.checkpoint.writer import SaveHealth

ERROR = SaveError.because("runs/x", "[Errno 28] No space left on device")


class Clock:
    def __init__(self, save_interval_s: float, retry_for_s: float):
        self.now = 100.0
        self.said: list[str] = []
        config = CheckpointerConfig(
            save_interval=timedelta(seconds=save_interval_s), retry_for=timedelta(seconds=retry_for_s)
        )
        self.health = SaveHealth(config, "step-7", self.said.append, lambda: self.now)

    def pause(self) -> float:
        """Seconds until the next try is due."""
        start = self.now
        while not self.health.retry_due():
            self.now += 0.5
        return self.now - start


def test_pauses_double_up_to_the_interval():
    clock = Clock(60, 3600)
    pauses = []
    for step in range(6):
        clock.health.failed(f"step-{step}", ERROR, permanent=False)
        pauses.append(clock.pause())
    assert pauses == [5, 10, 20, 40, 60, 60]
    clock.health.saved("step-9")
    clock.health.failed("step-10", ERROR, permanent=False)
    assert clock.pause() == 5


def test_the_run_ends_after_retry_for_and_a_success_restarts_the_count():
    clock = Clock(60, 30)
    clock.health.failed("step-1", ERROR, permanent=False)
    clock.now += 29
    clock.health.saved("step-2")
    clock.health.failed("step-3", ERROR, permanent=False)
    clock.now += 29
    clock.health.failed("step-4", ERROR, permanent=False)
    clock.now += 1
    with pytest.raises(SaveError, match="Free up disk space and run the same command again"):
        clock.health.failed("step-5", ERROR, permanent=False)


def test_without_retries_the_first_failure_ends_the_run():
    with pytest.raises(SaveError):
        Clock(60, 0).health.failed("step-1", ERROR, permanent=False)


def test_a_failure_says_what_is_safe_and_what_follows():
    clock = Clock(60, 3600)
    clock.health.failed("step-10", ERROR, permanent=True)
    (line,) = clock.said
    assert line.startswith(
        "WARNING: step-10 was not saved: cannot save a checkpoint to runs/x: [Errno 28] No space left"
    )
    assert "the newest finished checkpoint is step-7" in line
    assert "The next try is in 5 s; that checkpoint is kept for good, because a permanent one is missing" in line
    assert "the run ends if saves still fail in 3600 s (trainer.checkpointer.retry_for)" in line
    assert "run the same command again" not in line
    clock.now += 12
    clock.health.saved("step-11")
    assert clock.said[1] == "checkpoints are saved again: step-11 (1 save failed in the last 12 s)"
    assert not clock.health.is_owed


def test_metrics():
    clock = Clock(60, 3600)
    clock.now += 3
    assert clock.health.metrics() == {"throughput/failed_saves": 0, "throughput/time_since_save": 3}
    clock.health.failed("step-1", ERROR, permanent=False)
    assert clock.health.metrics() == {"throughput/failed_saves": 1, "throughput/time_since_save": 3}
    clock.health.saved("step-2")
    assert clock.health.metrics() == {"throughput/failed_saves": 1, "throughput/time_since_save": 0}
