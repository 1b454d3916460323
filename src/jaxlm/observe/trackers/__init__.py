"""Where numbers go: `metrics.jsonl` always, and what `trainer.tracker` lists beside it."""

from jaxlm.observe.trackers.base import RunInfo, Tracker, TrackerConfig, check_trackers
from jaxlm.observe.trackers.jsonl import JsonlTracker, read_jsonl

__all__ = ["JsonlTracker", "RunInfo", "Tracker", "TrackerConfig", "check_trackers", "read_jsonl"]
