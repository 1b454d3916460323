"""Numbers as comma-separated values."""

from dataclasses import dataclass
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.observe.trackers import RunInfo, Tracker, TrackerConfig


@TrackerConfig.register_subclass("acme_csv")
@dataclass(frozen=True)
class CsvConfig(TrackerConfig):
    """Writes a file with one line per number.

    Attributes:
        path: path of the file.
    """

    path: str = "numbers.csv"

    def check(self) -> None:
        if not self.path.endswith(".csv"):
            raise ConfigError(f"trainer.tracker.path: '{self.path}' given, a name that ends in .csv expected")

    def open(self, run: RunInfo) -> Tracker:
        return Csv(Path(self.path))


class Csv:
    """Writes `step,name,value`."""

    def __init__(self, path: Path):
        self._file = open(path, "a")  # noqa: SIM115 - closed by close()

    def log(self, step, metrics):
        self._file.writelines(f"{step},{name},{value}\n" for name, value in metrics.items())

    def begin_attempt(self, attempt, step, abandoned_steps):
        pass

    def log_histograms(self, step, histograms):
        self._file.writelines(f"{step},{name},{h.low}..{h.high}\n" for name, h in histograms.items())

    def log_samples(self, step, samples):
        self._file.writelines(f"{step},{sample.name},{sample.prompt!r}\n" for sample in samples)

    def flush(self):
        self._file.flush()

    def close(self):
        self._file.close()
