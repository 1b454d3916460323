"""The tracker interface: a tracker is opened with facts about the run, then receives metrics by step."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import draccus

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.logged import Completion, Histogram, Sample
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import choice_name


class MissingLibraryError(Exception):
    """Says that a library which a tracker needs is not installed."""


class Tracker(Protocol):
    """Receives metrics by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one record. A step may have several records with different metrics."""

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Logs histograms by name. Called only if `trainer.watch.include_histograms` is set."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Logs generated text. Called only if an evaluation generates some (`evals: [{type: samples}]`)."""

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Logs completions with their rewards, for `completions.jsonl` all of a step that `trainer.completions` keeps, for
        other trackers the few that the console shows. Called only if the policy's completions are rewarded."""

    def begin_attempt(self, attempt: int, step: int, abandoned_steps: int) -> None:
        """The run went back to `step`: the records of later steps are superseded by those that follow.

        Args:
            attempt: how often the run went back.
            abandoned_steps: number of steps lost in this way so far.
        """

    def flush(self) -> None:
        """Blocks until everything logged so far would survive a crash of this process."""

    def close(self) -> None:
        """Writes what is left and ends the tracker."""


class FilesError(Exception):
    """All records were sent, but not all files."""


class ForwardTracker(Tracker):
    """Logs to a service that cannot remove steps: skips those that it already has, which a resumed run repeats bit for bit.

    Steps are counted on after the run went back to an earlier one. The metric `global_step` has their number.
    """

    def __init__(self, handle: Any, first_new_step: int, abandoned_steps: int):
        """Args: handle: an open run with the method `log`. abandoned_steps: steps lost by going back."""
        self._handle, self._first_new_step, self._abandoned_steps = handle, first_new_step, abandoned_steps

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        number = step + self._abandoned_steps
        if number >= self._first_new_step:
            self._handle.log(dict(metrics), step=number)

    def begin_attempt(self, attempt: int, step: int, abandoned_steps: int) -> None:
        self._abandoned_steps = abandoned_steps


@dataclass(frozen=True)
class RunInfo:
    """Facts about the run, passed to trackers when they open.

    Attributes:
        resume_step: step from which the run resumes; records of later steps are logged again.
        is_new: whether the run has no checkpoint. Records that a tracker already has under this ID belong to another run.
        config: resolved configuration as plain values.
        config_text: resolved configuration as YAML.
        summary: constant facts (parameter_count, num_devices, backend, ...).
        abandoned_steps: number of steps whose work was lost because the run went back to an earlier checkpoint.
    """

    run_id: str
    resume_step: int
    is_new: bool
    config: Mapping[str, Any]
    config_text: str
    summary: Mapping[str, float | str]
    abandoned_steps: int = 0


@dataclass(frozen=True)
class TrackerConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """Describes where to send metrics in addition to `metrics.jsonl`; `type:` selects the tracker."""

    @classmethod
    def default_choice_name(cls) -> str:
        return "wandb"

    def check(self) -> None:
        """Raises `ConfigError` for invalid settings. Does not touch disk or network."""

    def how_to_open(self, run_id: str) -> str | None:
        """A command or URL that shows what a run has sent, for the report at its end; None if there is nothing to say."""
        return None

    @abc.abstractmethod
    def open(self, run: RunInfo) -> Tracker:
        """Opens the tracker and logs the configuration, the git commit and the installed packages.

        May be slow and may raise anything: `BackgroundTracker` isolates the run from it.
        """


def check_trackers(configs: Sequence[TrackerConfig]) -> None:
    """Raises `ConfigError` if a tracker's settings are invalid or two trackers are the same."""
    for number, config in enumerate(configs):
        config.check()
        if config in configs[:number]:
            kind = choice_name(type(config))
            raise ConfigError(
                f"trainer.tracker: two trackers of type {kind} write to the same place. Remove one, or change its settings"
            )
