"""What a tracker is: something that is told about a run once, and then receives numbers by step."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import draccus

from jaxlm.config.decode import choice_name
from jaxlm.core.errors import ConfigError
from jaxlm.core.types import Histogram

DEFAULT_TYPE = "wandb"


class Tracker(Protocol):
    """Receives numbers by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record. A step may have several, of different metrics."""
        ...

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """What `trainer.watch.include_histograms` looks at, by name; called only where that is asked for."""
        ...

    def flush(self) -> None:
        """Returns when everything logged so far would survive the end of this process."""
        ...

    def close(self) -> None:
        """No more records come."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may say about the run as a whole.

    Attributes:
        run_id: the run's name.
        resume_step: records of later steps come again.
        is_new: no checkpoint is there: what a tracker already has under this name is of another run.
        config: the resolved configuration, as plain values.
        config_text: the same as YAML.
        summary: facts that do not change while it trains (parameter_count, num_devices, backend, ...).
    """

    run_id: str
    resume_step: int
    is_new: bool
    config: Mapping[str, Any]
    config_text: str
    summary: Mapping[str, float | str]


@dataclass(frozen=True)
class TrackerConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.observe.trackers"):
    """One more place for the numbers, beside `metrics.jsonl`. `type:` picks it."""

    @classmethod
    def default_choice_name(cls) -> str:
        """A tracker without a `type` is Weights & Biases."""
        return DEFAULT_TYPE

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `ConfigError` for what cannot be. Touches neither disk nor network."""

    @abc.abstractmethod
    def open(self, run: RunInfo) -> Tracker:
        """The tracker of a run, which has been told the configuration, the code's commit and the packages.

        It may take its time and raise anything: `GuardedTracker` stands between it and the run.
        """


def check_trackers(configs: Sequence[TrackerConfig]) -> None:
    """Raises `ConfigError` for what cannot be, of one or of several together."""
    for number, config in enumerate(configs):
        config.check()
        if config in configs[:number]:
            kind = choice_name(type(config))
            raise ConfigError(
                f"trainer.tracker: two of type {kind} that write to the same place. Leave one out, or let them differ"
            )
