"""Prints metrics that the progress line leaves out."""

import re
from collections.abc import Callable

from jaxlm.core.field_types import PositiveInt
from jaxlm.core.tree import compile_pattern
from jaxlm.core.values.logged import StepInfo
from jaxlm.observe.callbacks.base import Callback, CallbackConfig, CallbackContext
from jaxlm.reading.choices import choice


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
