"""Callbacks (`trainer.callbacks`): classes of your own that follow a run and change nothing, and what calls them."""

import abc
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import draccus

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.guards import SKIPPED
from jaxlm.core.tree import compile_pattern
from jaxlm.core.values.logged import StepInfo
from jaxlm.observe.trackers import RunInfo
from jaxlm.reading.choices import Registry, choice
from jaxlm.reading.decode import choice_name


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
    """Holds what a callback is opened with.

    Attributes:
        log: prints a line on the console and into `train.log`.
    """

    run: RunInfo
    log: Callable[[str], None]


@dataclass(frozen=True)
class CallbackConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A class that follows a run; `type:` selects it."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `ConfigError` for invalid settings. Does not touch disk or network."""

    @abc.abstractmethod
    def open(self, context: CallbackContext) -> Callback:
        """Creates the callback, on process 0. It may raise anything: the run then goes on without it."""


_FAILURES = (Exception, SystemExit)  # of third-party code


class Callbacks:
    """The callbacks of a run, in the order of the configuration.

    One that raises is named once on the console, and not called again. As a context, it tells them about the end of the run.
    """

    def __init__(self, callbacks: Mapping[str, Callback], log: Callable[[str], None]):
        """Args: callbacks: by the name that messages have for each."""
        self._callbacks = dict(callbacks)
        self._log = log
        self._epoch: int | None = None

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.call("on_error", "", error)
        self.call("on_train_end", "")

    def call(self, hook: str, when: str, *arguments: Any) -> None:
        """Calls a method of all callbacks. Args: when: for the message about one that raises, such as ` at step 3`."""
        for name, callback in list(self._callbacks.items()):
            try:
                getattr(callback, hook)(*arguments)
            except _FAILURES as failure:
                del self._callbacks[name]
                self._log(
                    f"callback {name} failed in {hook}{when} ({_described(failure)}); the run continues without it"
                )

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch, unless it has begun."""
        if epoch != self._epoch:
            self.end_epoch()
            self._epoch = epoch
            self.call("on_epoch_begin", f" of epoch {epoch}", epoch)

    def end_epoch(self) -> None:
        """Ends the epoch that has begun, if there is one."""
        if self._epoch is not None:
            epoch, self._epoch = self._epoch, None
            self.call("on_epoch_end", f" of epoch {epoch}", epoch)


@dataclass(eq=False)
class CallbackListener:
    """Passes the steps of a phase to the callbacks.

    Attributes:
        run_metrics: called at each step; each returns metrics of the whole run.
        epoch_of: returns the epoch of a step (counted from 0), if the phase has epochs.
        last_step: the step with which the phase ends.
        skipped: number of steps skipped so far; at first, before this process started or resumed the phase.
    """

    callbacks: Callbacks
    run_metrics: Sequence[Callable[[], dict[str, float]]]
    epoch_of: Callable[[int], int | None]
    last_step: int
    skipped: int

    def __call__(self, info: StepInfo) -> None:
        metrics = dict(info.metrics)
        for measure in self.run_metrics:
            metrics |= measure()
        shown = replace(info, metrics=MappingProxyType(metrics), histograms=MappingProxyType(dict(info.histograms)))
        callbacks, when = self.callbacks, f" at step {info.step}"
        if (epoch := self.epoch_of(info.step - 1)) is not None:
            callbacks.begin_epoch(epoch)
        callbacks.call("on_batch_begin", when, info.step)
        callbacks.call("on_batch_end", when, shown)
        skipped, self.skipped = self.skipped, int(info.metrics[SKIPPED])
        if self.skipped <= skipped:
            callbacks.call("on_optimizer_step", when, shown)
        if info.step == self.last_step or self.epoch_of(info.step) != epoch:
            callbacks.end_epoch()


def open_callbacks(configs: Sequence[CallbackConfig], context: CallbackContext) -> Callbacks:
    """Opens the callbacks of a run, and tells them that it begins.

    Raises:
        ConfigError: a callback defines a method that would never be called.
    """
    opened: dict[str, Callback] = {}
    for number, config in enumerate(configs):
        name = f"{number + 1} ({choice_name(type(config))})"
        try:
            opened[name] = config.open(context)
        except ConfigError:
            raise
        except _FAILURES as failure:
            context.log(f"callback {name} cannot be opened ({_described(failure)}); the run continues without it")
    for name, callback in opened.items():
        unknown = [one for one in dir(callback) if one.startswith("on_") and one not in HOOKS]
        if unknown:
            raise ConfigError(
                f"trainer.callbacks: {name}: {type(callback).__qualname__} defines {unknown[0]}, which is never called."
                f" The methods of callbacks are: {', '.join(HOOKS)}"
            )
    callbacks = Callbacks(opened, context.log)
    callbacks.call("on_train_begin", "", context.run)
    return callbacks


def _described(failure: BaseException) -> str:
    """The error in one line, with the line of code that raised it."""
    frames = traceback.extract_tb(failure.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown line"
    first_line = str(failure).strip().partition("\n")[0]
    return f"{type(failure).__name__}: {first_line}; {where}"


@choice(CallbackConfig, "print_metrics")
class PrintMetricsConfig(CallbackConfig):
    """Prints the metrics of a step as a line on the console.

    Attributes:
        every: steps between lines.
        metrics: regular expression searched for in the names of metrics; those that match are printed.
    """

    every: PositiveInt = 100
    metrics: str = "^train/|^grad/norm/total$"

    def check(self) -> None:
        compile_pattern(self.metrics, "trainer.callbacks (print_metrics): metrics")

    def open(self, context: CallbackContext) -> Callback:
        return PrintMetrics(self.every, re.compile(self.metrics), context.log)


class PrintMetrics(Callback):
    """Prints the metrics of every N-th step whose names match."""

    def __init__(self, every: int, names: re.Pattern[str], log: Callable[[str], None]):
        self._every, self._names, self._log = every, names, log

    def on_batch_end(self, info: StepInfo) -> None:
        if info.step % self._every == 0:
            shown = [f"{name} {value:.6g}" for name, value in sorted(info.metrics.items()) if self._names.search(name)]
            self._log(f"step {info.step}: {'  '.join(shown) or 'no metric matches'}")
