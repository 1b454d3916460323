"""What happens in a run, in `events.jsonl`: written once, read back as it was."""

import json

import numpy as np
import pytest

from jaxlm.core.values.logged import LayerTable
from jaxlm.observe.events import layer_tables, skipped_steps
from jaxlm.observe.logged_run import read_run
from jaxlm.observe.records import EVENTS as EVENTS_FILE
from jaxlm.observe.records import parse_records
from jaxlm.observe.trackers import JsonlTracker

EVENTS = {
    "start": {"rows": [["run", "mine (seed 0)"], ["warning", "a"], ["warning", "b"]]},
    "phase": {"name": "warm", "start": 0, "end": 4, "num_phases": 2, "rows": [["layers", "2"]]},
    "stored": {"phase": "warm", "count": 24, "megabytes": 1.3, "folder": "cache/annotations/1"},
    "skip": {"reason": "loss is not finite", "batch": "wiki: sequence 8 of 9"},
    "layers": {"source": "decouple", "title": "errors", "columns": ["rank"], "rows": [[0.25], [0.5]]},
}


def write(folder, resume_step, events, attempt=0):
    tracker = JsonlTracker(folder / "metrics.jsonl", resume_step=resume_step, attempt=attempt)
    for step, kind, fields in events:
        tracker.log(step, {"train/skipped_steps": float(kind == "skip")})
        tracker.log_event(step, kind, fields)
    tracker.flush()
    tracker.close()


@pytest.mark.parametrize("kind", EVENTS)
def test_an_event_is_read_as_it_was_written_and_a_damaged_one_is_left_out(tmp_path, kind):
    write(tmp_path, None, [(3, kind, EVENTS[kind])])
    record = {"step": 3, "type": kind, **EVENTS[kind]}
    assert read_run(str(tmp_path)).events == [record]
    damaged = [{key: value for key, value in record.items() if key != name} for name in record]
    damaged += [record | {name: {"a": 1}} for name in record]
    damaged += [record | {"rows": [["x", "y", 1]]}] if "rows" in record else []
    assert parse_records(EVENTS_FILE, "".join(f"{json.dumps(one)}\n" for one in damaged).encode()) == ([], len(damaged))


def test_a_number_that_is_not_finite_is_read_as_such(tmp_path):
    table = LayerTable("decouple", "errors", ["rank"], [[float("nan")], [float("inf")]])
    write(tmp_path, None, [(0, "layers", vars(table))])
    (table,) = layer_tables(read_run(str(tmp_path)))
    np.testing.assert_array_equal(table.rows, [[np.nan], [np.nan]])


def test_what_happens_again_counts_once(tmp_path):
    """A start from the checkpoint of step 3 repeats step 4, one that went back repeats step 3, and a new run has none."""
    of = lambda step, reason: (step, "skip", {"reason": reason, "batch": ""})  # noqa: E731
    found = lambda: [(one["step"], one["reason"]) for one in read_run(str(tmp_path)).of("skip")]  # noqa: E731
    write(tmp_path, None, [of(3, "first"), of(4, "first")])
    write(tmp_path, 3, [of(4, "again")])
    assert found() == [(3, "first"), (4, "again")]
    write(tmp_path, 4, [of(3, "back")], attempt=1)
    assert found() == [(3, "back")]
    assert [one.reason for one in skipped_steps(read_run(str(tmp_path)))] == ["back"]
    write(tmp_path, None, [])
    assert found() == []
