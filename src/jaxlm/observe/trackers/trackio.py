"""Trackio: numbers in a local database, with a dashboard (`trackio show`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.types import Histogram
from jaxlm.observe.trackers import environment
from jaxlm.observe.trackers.base import RunInfo, Tracker, TrackerConfig


class MissingLibraryError(Exception):
    """The library of a tracker is not installed."""


@TrackerConfig.register_subclass("trackio")
@dataclass(frozen=True)
class TrackioConfig(TrackerConfig):
    """Trackio: a database below TRACKIO_DIR on this machine, or a Space of Hugging Face.

    Attributes:
        project: whose runs are shown together.
        name: shown for the run; null takes the run's id.
        group: runs that are shown together within a project.
        space_id: `user/name` of a Space that the numbers are sent to; null keeps them here.
    """

    project: str = "jaxlm"
    name: str | None = None
    group: str | None = None
    space_id: str | None = None

    def check(self) -> None:
        """Raises `ConfigError` for a project without a name."""
        if not self.project.strip():
            raise ConfigError("trainer.tracker (trackio): project: empty; a name expected")

    def open(self, run: RunInfo) -> Tracker:
        """Begins the run, or goes on with the newest of its name where it has a checkpoint.

        Raises:
            MissingLibraryError: trackio is not installed.
        """
        try:
            import trackio  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingLibraryError("it is not installed: pip install 'jaxlm[trackio]' (or trackio)") from error
        handle = trackio.init(
            project=self.project,
            name=self.name or run.run_id,
            group=self.group,
            space_id=self.space_id,
            config={
                **run.config,
                "git_commit": environment.commit(),
                "packages": list(environment.packages()),
                "summary": dict(run.summary),
            },
            resume="never" if run.is_new else "allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return TrackioTracker(handle)


class TrackioTracker:
    """Hands the numbers to Trackio's own thread."""

    def __init__(self, handle: Any):
        """Args: handle: an open trackio run."""
        self._handle = handle
        self._first = handle._next_step  # there is no public name for it

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records of steps that the database has already are left out: a run that goes on repeats them to the last bit."""
        if step >= self._first:
            self._handle.log(dict(metrics), step=step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Nothing: Trackio shows none. They are in `histograms.jsonl`."""

    def flush(self) -> None:
        """Nothing: Trackio writes on its own, twice a second."""

    def close(self) -> None:
        """Waits until everything has been written or sent."""
        self._handle.finish()
