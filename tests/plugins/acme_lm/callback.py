"""The slowest step of a run."""

from dataclasses import dataclass
from pathlib import Path

from jaxlm.observe.callbacks import Callback, CallbackConfig


class Slowest(Callback):
    """Writes the number of the slowest step, and the number of steps."""

    def __init__(self, path: Path):
        self._path, self._seconds = path, {}

    def on_batch_end(self, info):
        self._seconds[info.step] = info.metrics["throughput/duration"]

    def on_train_end(self):
        self._path.write_text(f"{max(self._seconds, key=self._seconds.get)} of {len(self._seconds)}")


@dataclass(frozen=True)
class SlowestConfig(CallbackConfig):
    """Writes a file at the end."""

    path: str = "slowest.txt"

    def check(self):
        pass

    def open(self, context):
        return Slowest(Path(self.path))
