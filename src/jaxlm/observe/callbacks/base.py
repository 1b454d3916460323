"""The callback interface: a callback follows a run, and changes nothing."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import draccus

from jaxlm.core.values.logged import StepInfo
from jaxlm.observe.trackers import RunInfo


class Callback(Protocol):
    """Is told what happens in a run, on process 0, in the thread that trains. What it takes delays the run.

    Steps run ahead of the host, so the methods about a step are called when its numbers have arrived, after its update. They
    are called for every step, in order. A run that goes back calls them again for the steps that it repeats.
    """

    def on_train_begin(self, run: RunInfo) -> None:
        """Before the first phase starts or continues."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Before the first step of a pass over the phase's data, from 0; also where the run resumes in the middle of one.

        A phase that trains on several sources has no epochs.
        """

    def on_batch_begin(self, step: int) -> None:
        """Before `on_batch_end` of the same step."""

    def on_batch_end(self, info: StepInfo) -> None:
        """After a step, which may have several microbatches."""

    def on_optimizer_step(self, info: StepInfo) -> None:
        """After `on_batch_end`, if the step's update was not skipped."""

    def on_epoch_end(self, epoch: int) -> None:
        """After the last step of a pass over the phase's data, or of the phase."""

    def on_error(self, error: BaseException) -> None:
        """The run ends because of an error."""

    def on_train_end(self) -> None:
        """The run ends in this process: it is complete, interrupted, or has failed."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""Names of the methods of callbacks."""


@dataclass(frozen=True)
class CallbackContext:
    """What a callback is opened with.

    Attributes:
        run: facts about the run.
        log: prints a line on the console and into `train.log`.
    """

    run: RunInfo
    log: Callable[[str], None]


@dataclass(frozen=True)
class CallbackConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.observe.callbacks"):
    """A class that follows a run; `type:` selects it."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `ConfigError` for invalid settings. Does not touch disk or network."""

    @abc.abstractmethod
    def open(self, context: CallbackContext) -> Callback:
        """Creates the callback, on process 0. It may raise anything: the run then goes on without it."""
