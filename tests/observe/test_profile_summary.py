import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxlm.core.values.logged import Activity
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.engine import loop
from jaxlm.engine.loop import pause
from jaxlm.hardware.hlo import ATTENTION, COLLECTIVE, COPY, FUSION, KINDS, MATRIX, Operation
from jaxlm.observe.profiler import ProfileEvent, ProfileHook, ProfilerConfig, describe_profile, summarize
from tests.engine.helpers import Ready, Saver, TinyRun, arrays, layout, open_phase, phase

OPERATIONS = {"dot.1": Operation(MATRIX, "a/dot"), "add.1": Operation(FUSION), "copy.1": Operation(COPY)}


def hook_of(config: ProfilerConfig, folder: Path, log: Callable[[str], None], **options: Any) -> ProfileHook:
    """A trace of a phase of 20 steps."""
    usual: dict[str, Any] = {"first_step": 0, "until": phase().end, "program": str}
    return ProfileHook(config, folder, phase(), log=log, **(usual | options))


def event(name: str, start: float, end: float, device: str = "d0", line: str = "t0") -> ProfileEvent:
    return ProfileEvent(device, line, name, start, end)


def test_times_of_nested_and_parallel_operations_in_closed_form():
    profile = summarize(
        [
            event("while.1", 0, 100),  # a loop: only its contents count
            event("dot.1", 0, 40),
            event("add.1", 10, 30),  # inside the matrix product
            event("copy.1", 60, 70),
            event("copy.1", 65, 85, line="t1"),  # at the same time on another thread
            event("dot.1", 0, 50, device="d1"),
        ],
        OPERATIONS,
        num_steps=2,
    )
    assert profile is not None
    seconds = {item.name: round(item.seconds * 1e9) for item in profile.spent}
    assert seconds == {"dot.1": 20 + 50, "copy.1": 10 + 20, "add.1": 20}
    assert {item.name: item.num_calls for item in profile.spent} == {"dot.1": 2, "copy.1": 2, "add.1": 1}
    assert profile.num_devices == 2
    # d0 spans 85 and is busy 40 + 25; d1 spans 50 and is busy all the time.
    assert profile.seconds == pytest.approx((85 + 50) / 2 / 1e9)
    assert profile.idle == pytest.approx(1 - (65 + 50) / (85 + 50))
    assert next(iter(profile.by_kind().items())) == (MATRIX, pytest.approx(70e-9))
    page = describe_profile(profile, "title")
    assert "| dot.1 | matrix products |" in page
    assert "58.3%" in page  # 70 of 120
    assert summarize([event("while.1", 0, 1)], {}, 1) is None


def test_an_evaluation_between_steps_does_not_count_as_idle():
    steps = [event("dot.1", 0, 40), event("dot.1", 50, 90), event("dot.1", 500, 540), event("dot.1", 550, 590)]
    other = [event("dot.1", 0, 100, "d1"), event("dot.1", 480, 590, "d1")]
    profile = summarize([*steps, *other], OPERATIONS, 4, pauses=[(120, 470)])
    assert profile is not None
    assert profile.paused == pytest.approx(((500 - 90) + (480 - 100)) / 2 / 1e9)
    assert profile.seconds == pytest.approx(((590 - 410) + (590 - 380)) / 2 / 1e9)
    assert profile.idle == pytest.approx(20 / (180 + 210))  # the two gaps of ten on the first device
    assert "Excluded: 0.000 s of evaluations and saves" in describe_profile(profile, "title")
    plain = summarize([*steps, *other], OPERATIONS, 4)
    assert plain is not None
    assert plain.paused == 0
    assert "Excluded" not in describe_profile(plain, "title")


@pytest.mark.slow
def test_the_loop_marks_pauses_for_evaluations_and_saves(monkeypatch):
    """Evaluations and saves run inside a pause; steps do not."""
    order: list[str] = []

    @contextlib.contextmanager
    def marked():
        order.append("(")
        yield
        order.append(")")

    monkeypatch.setattr(loop, "pause", marked)
    note = lambda text, value=None: lambda *_, **__: order.append(text) or value  # noqa: E731
    hook = SimpleNamespace(activity=Activity.EVAL, due=lambda step: step == 2, run=note("hook"))
    metrics: Any = SimpleNamespace(
        push=note("push"), drain=note("drain"), skip_time=note("skip"), flags=None, rewind=None
    )
    batches, saver = Ready([0, 0, 0]), Saver(on_save=note("save"))
    batches.read_ahead = note("ahead")
    step = lambda *_: order.append("step") or (None, None)  # noqa: E731
    opened = open_phase(layout(), phase(end=3), step, batches, saver=saver, first=[hook])
    loop.TrainingLoop(SimpleNamespace(step=0), replace(opened, metrics=metrics)).run()  # type: ignore[arg-type]
    assert " ".join(order) == (
        "step ahead push step ahead push drain ( hook ) skip step ahead push drain ( save ) skip"
    )


@pytest.mark.soak
def test_a_real_trace_is_summarized_and_the_state_is_unchanged(tmp_path):
    run, lines = TinyRun(layout()), []
    text = run.compiled_text(arrays(0))
    hook = hook_of(ProfilerConfig(1, 3), tmp_path, lines.append, program=lambda: text)
    for step in range(1, 8):
        run.step(arrays(step))
        if step == 3:
            with pause():
                time.sleep(1.5)  # like an evaluation
        if hook.due(step):
            before = jax.tree.map(np.asarray, run.state)
            hook.run(step, run.state)
            jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, run.state))
    hook.close()
    page = (tmp_path / "profile.md").read_text()
    assert f"3 steps on {layout().mesh.size} device(s)" in page
    (paused,) = re.findall(r"Excluded: ([\d.]+) s of evaluations", page)
    assert 1.5 < float(paused) < 1.5 + 1.0
    (step_ms,) = re.findall(r"([\d.]+) ms per step\.", page)
    assert float(step_ms) < 500
    (shown,) = lines
    assert "profile of 3 steps" in shown
    rows = [row.strip("| ").split(" | ") for row in page.splitlines()]
    shares = {row[0]: float(row[2].rstrip("%")) for row in rows if row[0] in KINDS}
    assert min(shares[kind] for kind in (MATRIX, ATTENTION, COLLECTIVE)) > 0
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)


def test_a_failing_profiler_is_reported_and_the_run_continues(tmp_path, monkeypatch):
    lines: list[str] = []
    (tmp_path / "file").write_text("")
    hook = hook_of(ProfilerConfig(2, 3), tmp_path / "file" / "x", lines.append)
    for step in range(1, 21):
        if hook.due(step):
            hook.run(step, None)  # type: ignore[arg-type]
    hook.close()
    (line,) = lines
    assert "the run continues without a profile" in line


@pytest.mark.slow
def test_a_run_that_stops_early_ends_the_recording(tmp_path):
    lines: list[str] = []
    for _ in range(2):  # an open recording would make the second one fail
        hook = hook_of(ProfilerConfig(1, 9), tmp_path, lines.append)
        hook.run(1, None)  # type: ignore[arg-type]
        hook.close()
    assert lines == []


def test_a_phase_too_short_to_profile_is_reported_and_a_short_remainder_is_recorded(tmp_path):
    lines: list[str] = []
    due = lambda first: [  # noqa: E731
        s for s in range(30) if hook_of(ProfilerConfig(5, 10), tmp_path, lines.append, first_step=first).due(s)
    ]
    assert due(12) == [17, 20]
    assert lines == []
    assert due(15) == []
    assert "ends at step 20" in lines[0]


def test_a_recording_ends_when_the_batch_size_changes(tmp_path):
    """The summary covers one program, and another batch size is another program."""
    sizes = BatchSchedule.of([BatchSize(0, 8), BatchSize(9, 16), BatchSize(14, 16)])
    lines: list[str] = []
    for first, recorded in ((0, [5, 9]), (4, [9, 19])):
        until = sizes.next_shape_change(first + 5, phase().end)
        hook = hook_of(ProfilerConfig(5, 10), tmp_path, lines.append, first_step=first, until=until)
        assert [s for s in range(30) if hook.due(s)] == recorded
    assert lines == ["profiler: recording only steps 6 to 9, because the batch size changes after them"]
