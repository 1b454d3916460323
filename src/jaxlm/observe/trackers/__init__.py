"""Where metrics go: always to `metrics.jsonl`, and to the trackers in `trainer.tracker`."""

from jaxlm.observe.records import read_jsonl
from jaxlm.observe.trackers.base import RunInfo, Tracker, TrackerConfig, check_trackers
from jaxlm.observe.trackers.jsonl import JsonlTracker

__all__ = ["JsonlTracker", "RunInfo", "Tracker", "TrackerConfig", "check_trackers", "read_jsonl"]
