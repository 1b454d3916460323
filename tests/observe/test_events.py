"""What happens in a run, in `events.jsonl`: written once, read back as it was."""

import json

import numpy as np
import pytest

from jaxlm.core.values.logged import LayerTable
from jaxlm.observe.events import PhaseStart, RunStart, SkippedStep, StoredSequences, parse_event
from jaxlm.observe.history import skipped_steps
from jaxlm.observe.logged_run import read_run
from jaxlm.observe.trackers import JsonlTracker

EVENTS = [
    RunStart([("run", "mine (seed 0)"), ("warning", "a"), ("warning", "b")]),
    PhaseStart("warm", 0, 4, 2, [("layers", "2")]),
    StoredSequences("warm", 24, 1.3, "cache/annotations/1"),
    SkippedStep(3, "loss is not finite", "wiki: sequence 8 of 9", 1),
    LayerTable("decouple", "errors", ["rank"], [[0.25], [0.5]]),
]


def write(folder, resume_step, events, attempt=0):
    tracker = JsonlTracker(folder / "metrics.jsonl", resume_step=resume_step, attempt=attempt)
    for step, event in events:
        tracker.log(step, {"train/skipped_steps": float(isinstance(event, SkippedStep))})
        tracker.log_event(step, event)
    tracker.flush()
    tracker.close()


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.type)
def test_an_event_is_read_as_it_was_written(tmp_path, event):
    write(tmp_path, None, [(3, event)])
    assert read_run(str(tmp_path)).events == [event]
    record = json.loads((tmp_path / "events.jsonl").read_text())
    assert (record["step"], record["type"]) == (3, event.type)
    for name in record.keys() - {"step"}:
        assert parse_event({key: value for key, value in record.items() if key != name}) is None
        assert parse_event(record | {name: {"a": 1}}) is None


def test_a_number_that_is_not_finite_is_read_as_such(tmp_path):
    write(tmp_path, None, [(0, LayerTable("decouple", "errors", ["rank"], [[float("nan")], [float("inf")]]))])
    (table,) = read_run(str(tmp_path)).events
    np.testing.assert_array_equal(table.rows, [[np.nan], [np.nan]])


def test_what_happens_again_counts_once(tmp_path):
    """A start from the checkpoint of step 3 repeats step 4, one that went back repeats step 3, and a new run has none."""
    of = lambda step, reason: (step, SkippedStep(step, reason, "", 1))  # noqa: E731
    found = lambda: [(one.step, one.reason) for one in read_run(str(tmp_path)).of(SkippedStep)]  # noqa: E731
    write(tmp_path, None, [of(3, "first"), of(4, "first")])
    write(tmp_path, 3, [of(4, "again")])
    assert found() == [(3, "first"), (4, "again")]
    write(tmp_path, 4, [of(3, "back")], attempt=1)
    assert found() == [(3, "back")]
    assert [one.reason for one in skipped_steps(read_run(str(tmp_path)))] == ["back"]
    write(tmp_path, None, [])
    assert found() == []
