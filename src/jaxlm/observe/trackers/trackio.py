"""Trackio: metrics in a local database, with a dashboard (`trackio show`)."""

from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.install import install_command
from jaxlm.observe import environment
from jaxlm.observe.trackers.base import ForwardTracker, MissingLibraryError, RunInfo, Tracker, TrackerConfig
from jaxlm.reading.choices import choice


@choice(TrackerConfig, "trackio")
class TrackioConfig(TrackerConfig):
    """Trackio: a local database under TRACKIO_DIR, or a Hugging Face Space.

    Attributes:
        project: project that the run belongs to.
        name: display name of the run; null uses the run ID.
        group: group within the project that the run is shown in; null means no group.
        space_id: Hugging Face Space (`user/name`) to send metrics to; null keeps them in the local database.
    """

    project: str = "jaxlm"
    name: str | None = None
    group: str | None = None
    space_id: str | None = None

    def check(self) -> None:
        if not self.project.strip():  # the tracker would fail while the run goes on without it
            raise ConfigError(f"trainer.tracker (trackio): project: '{self.project}' given, a name expected")

    def how_to_open(self, run_id: str) -> str | None:
        return f"trackio show --project {self.project}" if self.space_id is None else f"hf.co/spaces/{self.space_id}"

    def open(self, run: RunInfo) -> Tracker:
        """Starts a new run, or resumes the newest run of this name if there is a checkpoint."""
        try:
            import trackio  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingLibraryError(f"trackio is not installed. Run: {install_command('trackio')}") from error
        facts = {"packages": list(environment.packages()), "summary": dict(run.summary)}
        handle = trackio.init(
            project=self.project,
            name=self.name or run.run_id,
            group=self.group,
            space_id=self.space_id,
            config={**run.config, "git_commit": environment.commit(), **facts},
            resume="never" if run.is_new else "allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return TrackioTracker(handle, run.abandoned_steps)


class TrackioTracker(ForwardTracker):
    """Passes metrics to Trackio, which writes them in a thread of its own, and flushes by itself twice a second.

    It has no histograms, and its tables need pandas: histograms, samples and completions are in jaxlm's own files alone.
    """

    def __init__(self, handle: Any, abandoned_steps: int = 0):
        """Args: handle: an open run. abandoned_steps: steps lost by going back, which Trackio cannot remove."""
        super().__init__(handle, handle._next_step, abandoned_steps)  # Trackio has no public name for it

    def close(self) -> None:
        self._handle.finish()
