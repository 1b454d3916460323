"""The training loop: what it waits for, and transfers between host and devices."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.values.logged import Activity, StepInfo
from jaxlm.data.annotations import AskingBatches
from jaxlm.data.base import Batches
from jaxlm.data.loader import Prefetch
from jaxlm.engine.loop import TrainingLoop
from jaxlm.engine.metrics import MAX_IN_FLIGHT
from jaxlm.engine.step import StepReport
from jaxlm.engine.sync import Done
from tests.engine.helpers import Ready, Saver, TinyRun, arrays, batch, layout, open_phase, phase, report


def through_the_loop(run: TinyRun, train_step: Any, batches: list[Any], guard: str = "allow") -> list[StepInfo]:
    seen: list[StepInfo] = []
    opened = open_phase(run.where, run.phase, train_step, Ready(batches), seen.append)
    with run.where.use(), jax.transfer_guard(guard):
        _, outcome = TrainingLoop(run.state, opened).run()
    assert isinstance(outcome, Done)
    assert [info.step for info in seen] == list(range(1, run.phase.end + 1))
    return seen


@pytest.mark.slow
def test_all_transfers_between_host_and_devices_are_explicit():
    """`jax.transfer_guard`: every transfer in the loop is explicit, none is implicit."""
    run = TinyRun(layout())
    batches = [batch(arrays(seed), run.where) for seed in range(run.phase.end)]
    with jax.transfer_guard("disallow"), pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device"):
        jnp.sin(np.ones(3))  # the guard is active here
    seen = through_the_loop(run, run.loop_step, batches, guard="disallow")
    assert all(np.isfinite(info.metrics["train/loss"]) for info in seen)


class Pending:
    """A number on a busy device: reading it blocks."""

    def __init__(self, value: Any, step: int, waited: list[int]):
        self._value, self._step, self._waited = np.asarray(value), step, waited

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return False

    def block_until_ready(self) -> "Pending":
        self._waited.append(self._step)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._waited.append(self._step)
        return self._value.astype(dtype or self._value.dtype)


@pytest.mark.slow
def test_the_loop_waits_only_for_the_oldest_step_in_flight():
    run = TinyRun(layout())
    dispatched, waited, behind = 0, [], []

    def dispatch(state: Any, batch: Any, flags: jax.Array) -> tuple[Any, StepReport]:
        nonlocal dispatched
        behind.extend(dispatched - step for step in waited)
        waited.clear()
        dispatched += 1
        return state, report(lambda value: Pending(value, dispatched, waited))

    through_the_loop(run, dispatch, [None] * run.phase.end)
    assert behind
    assert set(behind) == {MAX_IN_FLIGHT - 1}


class Timed(Ready):
    """Batches that take time to build, as the loop sees them, and the seconds that it waited for each."""

    def __init__(self, making_s: float):
        super().__init__(())
        self.ahead = Prefetch(lambda number: time.sleep(making_s), depth=2)
        self.waited_s: list[float] = []

    def __next__(self) -> str:
        began = time.perf_counter()
        self.ahead.take()
        self.waited_s.append(time.perf_counter() - began)
        return "batch"

    def read_ahead(self) -> None:
        self.ahead.refill()


class Sampled(Ready):
    """Batches that are made from the weights before every third step, and what the loop asks of them, in order."""

    refreshes_as = Batches.refreshes_as

    def __init__(self, log: list[Any]):
        super().__init__([None] * 7)
        self.log, self.until = log, 0

    def due(self, step: int) -> bool:
        return step >= self.until

    def refresh(self, model: Any, step: int) -> None:
        self.log.append(("refresh", model, step))
        self.until = step + 3

    def __next__(self) -> Any:
        self.log.append("next")
        return super().__next__()

    def read_ahead(self) -> None:
        self.log.append("ahead")

    def metrics(self) -> dict[str, float]:
        return {"train/seen": float(self.until)}


class Annotated(Sampled):
    refreshes_as = AskingBatches.refreshes_as


def opened_for(log: list[Any], rewind_after: int | None = None, kind: type[Sampled] = Sampled, **hooks: Any) -> Any:
    """A phase of seven steps, which writes into the log what happens."""
    metrics = SimpleNamespace(
        push=lambda step, report, loading_s, of_batch: log.append(("push", step, of_batch)),
        skip_time=lambda: log.append("skip"),
        flags=None,
        rewind=None,
    )

    def drain() -> str | None:
        log.append("drain")
        if rewind_after is not None and ("push", rewind_after, {"train/seen": 3.0}) in log:
            metrics.rewind = "back"
        return metrics.rewind

    def step(*_: Any) -> tuple[Any, None]:
        log.append("step")
        return SimpleNamespace(model=f"weights after {log.count('step')}"), None

    metrics.drain = drain
    saver = Saver(on_save=lambda state, step: log.append("save"))
    return replace(open_phase(layout(), phase(end=7), step, kind(log), saver=saver, **hooks), metrics=metrics)


def through_sampled_batches(log: list[Any], *arguments: Any, **keys: Any) -> Any:
    opened = opened_for(log, *arguments, **keys)
    outcome = TrainingLoop(SimpleNamespace(step=0, model="weights after 0"), opened).run()[1]  # type: ignore[arg-type]
    return outcome, opened.clock


def test_batches_are_made_from_the_newest_weights_between_steps():
    log: list[Any] = []
    outcome, _ = through_sampled_batches(log)
    assert isinstance(outcome, Done)
    expected: list[Any] = []
    for step in range(7):
        if step % 3 == 0:  # all steps before are fetched, and their time does not count as the next step's
            expected += ["drain", ("refresh", f"weights after {step}", step), "skip"]
        ahead = [] if step % 3 == 2 else ["ahead"]
        expected += ["next", "step", *ahead, ("push", step + 1, {"train/seen": step // 3 * 3 + 3.0})]
    assert log == [*expected, "drain", "save", "skip"]


@pytest.mark.parametrize(("kind", "activity"), [(Sampled, Activity.ROLLOUT), (Annotated, Activity.ANNOTATION)])
def test_batches_say_what_the_time_of_making_them_counts_as(kind, activity):
    seconds = through_sampled_batches([], kind=kind)[1].seconds()
    assert {one for one in (Activity.ROLLOUT, Activity.ANNOTATION) if seconds[one]} == {activity}


def test_a_run_that_goes_back_samples_nothing_first():
    log: list[Any] = []
    assert through_sampled_batches(log, rewind_after=3)[0] == "back"
    assert [entry for entry in log if entry[0] == "refresh"] == [("refresh", "weights after 0", 0)]


@pytest.mark.parametrize("step_s", [0.0, 0.02])
def test_the_loading_time_is_the_time_for_which_a_step_waits_for_its_batch(step_s):
    """And not the step's own time, which hides a part of the loading."""
    making_s, logged, began = 0.03, list[float](), time.perf_counter()
    batches, measured = Timed(making_s), report()

    def step(*_: Any) -> tuple[Any, StepReport]:
        time.sleep(step_s)
        return None, measured

    listen = lambda info: logged.append(info.metrics["throughput/loading_time"])  # noqa: E731
    TrainingLoop(SimpleNamespace(step=0), open_phase(layout(), phase(end=20), step, batches, listen)).run()  # type: ignore[arg-type]
    elapsed_s, waited = time.perf_counter() - began, batches.waited_s
    batches.ahead.close()
    assert len(logged) == len(waited) == 20
    assert all(shown >= really for shown, really in zip(logged, waited, strict=True))
    assert sum(logged) + 20 * step_s <= elapsed_s
    assert elapsed_s >= 20 * making_s  # the source is slower, so that it is what all steps wait for
