"""When to save: by the clock (temporary), by steps (permanent), and always at the end."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from jaxlm.core.errors import ConfigError


@dataclass(frozen=True)
class KeepRule:
    """Permanent checkpoints every so many steps, up to a step.

    Attributes:
        every: steps between two permanent checkpoints.
        until: the last step for which this rule holds, itself included; None means to the end.
    """

    every: int
    until: int | None = None


@dataclass(frozen=True)
class CheckpointerConfig:
    """Where and when checkpoints are saved.

    Attributes:
        base_path: the folder of all runs' checkpoints, or a URL: `gs://bucket/runs`, to which every process writes its part,
            or another that fsspec can write to (`s3://bucket/runs`).
        append_run_id_to_base_path: save to `<base_path>/<run id>` instead of `<base_path>` itself.
        save_interval: time between temporary checkpoints. Each replaces the one before.
        keep: rules for permanent checkpoints, in order of `until`; an empty list keeps only the last step's.
        delete_old_temp_checkpoints: let each checkpoint replace the temporary ones before it; false keeps them all.
        staging_dir: where checkpoints behind URLs other than `gs://` are written before they are uploaded, and kept once
            downloaded; all processes of a run must see it.
    """

    base_path: str = "checkpoints/"
    append_run_id_to_base_path: bool = True
    save_interval: timedelta = timedelta(minutes=15)
    keep: list[KeepRule] = field(default_factory=lambda: [KeepRule(every=10_000)])
    delete_old_temp_checkpoints: bool = True
    staging_dir: str = "cache/checkpoints"

    def check(self) -> None:
        """Raises `ConfigError` where the rules contradict each other."""
        if self.save_interval < timedelta(0):
            raise ConfigError(f"trainer.checkpointer.save_interval: {self.save_interval} is negative")
        untils = [rule.until for rule in self.keep]
        for number, rule in enumerate(self.keep):
            path = f"trainer.checkpointer.keep.{number}"
            if rule.every < 1:
                raise ConfigError(f"{path}.every: {rule.every} given, 1 or more steps expected")
            if rule.until is None and number < len(self.keep) - 1:
                raise ConfigError(f"{path}.until: missing; only the last rule may go on to the end of the run")
        if any(a is not None and b is not None and a >= b for a, b in itertools.pairwise(untils)):
            raise ConfigError(f"trainer.checkpointer.keep: `until` must rise from rule to rule, given {untils}")


def is_permanent(rules: Sequence[KeepRule], step: int) -> bool:
    """Whether the rules keep the checkpoint of this step for good."""
    for rule in rules:
        if rule.until is None or step <= rule.until:
            return step % rule.every == 0
    return False


class SaveClock:
    """Tells when the next temporary checkpoint is due. Any save resets it."""

    def __init__(self, interval: timedelta, now: Callable[[], float] = time.monotonic):
        self._interval_s = interval.total_seconds()
        self._now = now
        self._last = now()

    def due(self) -> bool:
        """Whether the interval has passed since the last save."""
        return self._now() - self._last >= self._interval_s

    def reset(self) -> None:
        """A checkpoint was just saved."""
        self._last = self._now()
