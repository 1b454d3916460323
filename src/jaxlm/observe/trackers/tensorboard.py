"""TensorBoard event files."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveInt
from jaxlm.core.stores import is_url
from jaxlm.core.values.logged import Completion, Histogram, Sample
from jaxlm.observe import environment
from jaxlm.observe.trackers.base import RunInfo, Tracker, TrackerConfig
from jaxlm.reading.choices import choice


@choice(TrackerConfig, "tensorboard")
class TensorboardConfig(TrackerConfig):
    """TensorBoard event files, written by tensorboardX.

    Attributes:
        logdir: parent folder; the run's event files go to `<logdir>/<run id><comment>`.
        comment: suffix appended to the run ID in the folder name.
        purge_step: hide events from this step on in earlier event files; null means the step after the one that the run
            resumes from.
        max_queue: maximum number of events to queue before they are written.
        flush_secs: seconds between writes to disk.
        filename_suffix: suffix appended to the event file's name.
        write_to_disk: write event files; false writes nothing.
    """

    logdir: str = "tblogs"
    comment: str = ""
    purge_step: NonNegativeInt | None = None
    max_queue: PositiveInt = 10
    flush_secs: PositiveInt = 120
    filename_suffix: str = ""
    write_to_disk: bool = True

    def check(self) -> None:
        if is_url(self.logdir):
            raise ConfigError(
                f"trainer.tracker (tensorboard): logdir: '{self.logdir}' given, a local folder expected. Copy the"
                " events to a bucket with the bucket's own tools"
            )
        for name, text in (("comment", self.comment), ("filename_suffix", self.filename_suffix)):
            if "/" in text:  # else the events are written where nobody looks for them
                raise ConfigError(
                    f"trainer.tracker (tensorboard): {name}: '{text}' given, a part of a file name expected"
                )

    def how_to_open(self, run_id: str) -> str | None:
        return f"tensorboard --logdir {self.logdir}" if self.write_to_disk else None

    def open(self, run: RunInfo) -> Tracker:
        """Starts a new event file, and has TensorBoard hide later steps in earlier files."""
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
            writer.add_text(name, _verbatim(text), run.resume_step)
        return TensorboardTracker(writer)


class TensorboardTracker:
    """Writes scalars and histograms by step."""

    def __init__(self, writer):
        """Args: writer: a `tensorboardX.SummaryWriter`."""
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] - made by protobuf
        from tensorboardX.summary import scalar

        self._writer = writer
        self._summary = Summary
        self._tag = functools.cache(lambda name: scalar(name, 0.0).value[0].tag)  # the name as TensorBoard allows it

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # One event for all metrics: `add_scalar` would send each through two queues of its own.
        values = [self._summary.Value(tag=self._tag(name), simple_value=value) for name, value in metrics.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Adds one histogram per array. Its sums are approximated by the bin centers."""
        for name, histogram in histograms.items():
            if not histogram.is_empty:
                edges, counts = np.asarray(histogram.edges), np.asarray(histogram.counts)
                centers = (edges[:-1] + edges[1:]) / 2
                sums = counts.sum(), (counts * centers).sum(), (counts * centers**2).sum()
                self._writer.add_histogram_raw(name, histogram.low, histogram.high, *sums, edges[1:], counts, step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        numbers: dict[str, int] = {}
        for sample in samples:
            number = numbers[sample.name] = numbers.get(sample.name, -1) + 1
            text = f"**prompt**\n\n{_verbatim(sample.prompt)}\n\n**text**\n\n{_verbatim(sample.text)}"
            self._writer.add_text(f"{sample.name}/samples/{number}", text, step)

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        for number, one in enumerate(completions):
            facts = [f"{name} {value}" for name, value in one.rewards.items() if value is not None]
            title = ", ".join([f"reward {one.reward:g}", *facts, f"advantage {one.advantage}"])
            text = f"{title}\n\n**prompt**\n\n{_verbatim(one.prompt)}\n\n**completion**\n\n{_verbatim(one.completion)}"
            self._writer.add_text(f"{one.name}/completions/{number}", text, step)

    def begin_attempt(self, attempt: int, step: int, abandoned_steps: int) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        start = SessionLog(status=SessionLog.START)
        self._writer.file_writer.add_event(Event(session_log=start), step + 1)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _verbatim(text: str) -> str:
    """Markdown that shows a text as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
