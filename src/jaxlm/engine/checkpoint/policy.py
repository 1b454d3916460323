"""Checkpoint retention: saves at time intervals (temporary), at step intervals (permanent), and always at the end."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class KeepRule:
    """Keeps a permanent checkpoint every `every` steps, up to and including step `until`.

    Attributes:
        every: number of steps between permanent checkpoints.
        until: last step (inclusive) to which this rule applies; null applies it to the end of the run.
    """

    every: PositiveInt
    until: NonNegativeInt | None = None


@dataclass(frozen=True)
class CheckpointerConfig:
    """Sets where and when checkpoints are saved.

    Attributes:
        base_path: folder or URL under which runs save their checkpoints. With `gs://bucket/runs` every process writes its
            own shards to the bucket; other URLs that fsspec can write to (`s3://bucket/runs`) are staged in `staging_dir`.
        append_run_id_to_base_path: save to `<base_path>/<run id>`; false saves directly to `<base_path>`.
        save_interval: time between temporary checkpoints. Each new checkpoint replaces the temporary ones before it. A save
            that is due while another one is being written is postponed. 0 saves after every step, and waits for it.
        keep: retention rules for permanent checkpoints, sorted by `until`; an empty list keeps only the final checkpoint.
        retry_for: how long saves may go on failing before the run ends. Until then training goes on, and the next save is
            tried after 5 s, 10 s, 20 s and so on, at most `save_interval`. 0 ends the run at the first failure.
        delete_old_temp_checkpoints: delete older temporary checkpoints after each save; false keeps all of them.
        staging_dir: local folder in which checkpoints for URLs other than `gs://` are written before upload and cached
            after download. All processes of the run must share it.
    """

    base_path: str = "checkpoints/"
    append_run_id_to_base_path: bool = True
    save_interval: timedelta = timedelta(minutes=15)
    retry_for: timedelta = timedelta(hours=1)
    keep: list[KeepRule] = field(default_factory=lambda: [KeepRule(every=10_000)])
    delete_old_temp_checkpoints: bool = True
    staging_dir: str = "cache/checkpoints"

    def check(self) -> None:
        """Raises `ConfigError` if a time is negative or the retention rules are inconsistent."""
        for name, value in (("save_interval", self.save_interval), ("retry_for", self.retry_for)):
            if value < timedelta(0):
                raise ConfigError(f"trainer.checkpointer.{name}: {value} given, but it must not be negative")
        for number, (rule, following) in enumerate(itertools.pairwise(self.keep)):
            path = f"trainer.checkpointer.keep.{number}.until"
            if rule.until is None:
                raise ConfigError(f"{path}: missing. Only the last rule may omit it and apply to the end of the run")
            if following.until is not None and rule.until >= following.until:
                raise ConfigError(f"{path}: {rule.until} given, less than {following.until} of the next rule expected")


def is_permanent(rules: Sequence[KeepRule], step: int) -> bool:
    """Tells whether the retention rules keep this step's checkpoint permanently."""
    for rule in rules:
        if rule.until is None or step <= rule.until:
            return step % rule.every == 0
    return False


class SaveClock:
    """Tracks when the next temporary checkpoint is due. Every save, temporary or permanent, resets it."""

    def __init__(self, interval: timedelta, now: Callable[[], float] = time.monotonic):
        self._interval_s = interval.total_seconds()
        self._now = now
        self._last = now()

    def due(self) -> bool:
        return self._now() - self._last >= self._interval_s

    def reset(self) -> None:
        self._last = self._now()
