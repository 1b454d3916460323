"""TensorBoard event files."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.types import Histogram
from jaxlm.observe.trackers import environment
from jaxlm.observe.trackers.base import RunInfo, Tracker, TrackerConfig


@TrackerConfig.register_subclass("tensorboard")
@dataclass(frozen=True)
class TensorboardConfig(TrackerConfig):
    """TensorBoard event files, written by tensorboardX.

    Attributes:
        logdir: the run's files go to `<logdir>/<run id><comment>`.
        comment: behind the run's id in the folder's name.
        purge_step: hide what earlier event files say from this step on; null takes the step that the run goes on from.
        max_queue: events that are held back at the most before they are written.
        flush_secs: seconds between two writes.
        filename_suffix: behind the event file's name.
        write_to_disk: false writes nothing.
    """

    logdir: str = "tblogs"
    comment: str = ""
    purge_step: int | None = None
    max_queue: int = 10
    flush_secs: int = 120
    filename_suffix: str = ""
    write_to_disk: bool = True

    def check(self) -> None:
        """Raises `ConfigError` for sizes that cannot be and for a comment or suffix that is no part of a name."""
        for name, value in (("max_queue", self.max_queue), ("flush_secs", self.flush_secs)):
            if value < 1:
                raise ConfigError(f"trainer.tracker (tensorboard): {name}: {value} given, 1 or more expected")
        for name, text in (("comment", self.comment), ("filename_suffix", self.filename_suffix)):
            if "/" in text:
                raise ConfigError(f"trainer.tracker (tensorboard): {name}: '{text}' cannot be part of a file's name")

    def open(self, run: RunInfo) -> Tracker:
        """Starts a new event file; TensorBoard hides what an earlier one says about later steps."""
        from tensorboardX import SummaryWriter

        writer = SummaryWriter(
            str(Path(self.logdir) / f"{run.run_id}{self.comment}"),
            purge_step=run.resume_step + 1 if self.purge_step is None else self.purge_step,
            max_queue=self.max_queue,
            flush_secs=self.flush_secs,
            filename_suffix=self.filename_suffix,
            write_to_disk=self.write_to_disk,
        )
        texts = {
            "config": run.config_text,
            "git_commit": environment.commit() or "not in a git repository",
            "packages": "\n".join(environment.packages()),
            "summary": "\n".join(f"{name}: {value}" for name, value in run.summary.items()),
        }
        for name, text in texts.items():
            # Four spaces keep Markdown from reading the text.
            writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), run.resume_step)
        return TensorboardTracker(writer)


class TensorboardTracker:
    """Scalars and histograms by step."""

    def __init__(self, writer):
        """Args: writer: a `tensorboardX.SummaryWriter`."""
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] - made by protobuf
        from tensorboardX.summary import scalar

        self._writer = writer
        self._summary = Summary
        self._tag = functools.cache(lambda name: scalar(name, 0.0).value[0].tag)  # in letters that TensorBoard takes

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar for each metric, all of them in one event: `add_scalar` would send each through two queues alone."""
        values = [self._summary.Value(tag=self._tag(name), simple_value=value) for name, value in metrics.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """One histogram for each array; its sums are those of the bins' middles."""
        for name, found in histograms.items():
            if not found.is_empty:
                edges, counts = np.asarray(found.edges), np.asarray(found.counts)
                middles = (edges[:-1] + edges[1:]) / 2
                sums = counts.sum(), (counts * middles).sum(), (counts * middles**2).sum()
                self._writer.add_histogram_raw(name, found.low, found.high, *sums, edges[1:], counts, step)

    def flush(self) -> None:
        """Writes out what is queued."""
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        self._writer.close()
