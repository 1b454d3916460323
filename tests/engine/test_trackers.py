import json

import pytest

from jaxlm.engine.trackers import JsonlTracker, TensorboardConfig, read_jsonl


def test_floats_come_back_to_the_last_bit_and_what_is_not_finite_is_null(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl", resume_step=0)
    value = float.fromhex("0x1.921fb6p+1") / 3
    tracker.log(1, {"train/loss": value, "bad": float("nan"), "worse": float("inf")})
    tracker.close()
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "train/loss": value, "bad": None, "worse": None}]


def test_going_on_drops_later_records_and_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": s, "x": s}) + "\n" for s in range(1, 9)) + '{"step": 9, "x')
    tracker = JsonlTracker(path, resume_step=5)
    tracker.log(6, {"x": 60})
    tracker.close()
    assert [(r["step"], r["x"]) for r in read_jsonl(path)] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60)]


def test_what_was_flushed_is_there_without_closing(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl", resume_step=0)
    tracker.log(1, {"x": 1.0})
    tracker.flush()
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "x": 1.0}]


def test_tensorboard_files_hold_the_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = TensorboardConfig(logdir=str(tmp_path)).open("run", resume_step=0)
    tracker.log(3, {"train/loss": 1.5})
    tracker.close()
    (events,) = (tmp_path / "run").glob("events*")
    assert b"train/loss" in events.read_bytes()
