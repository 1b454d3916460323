"""How the saves of a run are going: which checkpoint is safe, and how long saves have been failing."""

import itertools
import time
from collections.abc import Callable, Sequence

from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.store import SaveError

_FIRST_PAUSE_S = 5.0


class SaveHealth:
    """Counts saves that fail, says so, and decides when to try again.

    Attributes:
        is_owed: whether a permanent checkpoint could not be saved, and none has been since.
    """

    def __init__(
        self,
        policy: CheckpointerConfig,
        newest: str | None,
        log: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        """Args: newest: name of the checkpoint from which the run starts; None if it is new."""
        self.is_owed = False
        self._retry_for_s = policy.retry_for.total_seconds()
        self._most_s = policy.save_interval.total_seconds()
        self._newest = newest
        self._log = log
        self._now = now
        self._saved_at = now()
        self._failing_since: float | None = None
        self._next_at = 0.0
        self._streak = self._total = 0

    @property
    def is_failing(self) -> bool:
        return self._streak > 0

    def allowed(self, pauses_s: Sequence[float]) -> list[float]:
        """The first of the pauses between the tries of a save that blocks: those that are over within `retry_for`.

        The same on all processes, which must try equally often.
        """
        ends = itertools.accumulate(pauses_s)
        return [pause for pause, end in zip(pauses_s, ends, strict=True) if end <= self._retry_for_s]

    def retry_due(self) -> bool:
        """Whether the pause after the last failure is over."""
        return self._now() >= self._next_at

    def saved(self, name: str) -> None:
        if self._streak:
            since = self._now() - (self._failing_since or 0.0)
            self._log(f"checkpoints are saved again: {name} ({_times(self._streak)} failed in the last {since:.0f} s)")
        self.is_owed = False
        self._newest, self._saved_at = name, self._now()
        self._streak, self._failing_since, self._next_at = 0, None, 0.0

    def failed(self, name: str, error: SaveError, *, permanent: bool, pause_s: float | None = None) -> None:
        """A save has failed: says what, and what follows.

        Args:
            pause_s: the pause before the same state is saved again, because nothing else can be; None if training goes on.

        Raises:
            SaveError: saves have been failing for longer than `retry_for`.
        """
        now = self._now()
        self._streak, self._total = self._streak + 1, self._total + 1
        self.is_owed |= permanent
        if self._failing_since is None:
            self._failing_since = now
        if pause_s is None and now - self._failing_since >= self._retry_for_s:
            raise error
        wait_s = min(_FIRST_PAUSE_S * 2 ** (self._streak - 1), self._most_s) if pause_s is None else pause_s
        self._next_at = now + wait_s
        newest = f"the newest finished checkpoint is {self._newest}" if self._newest else "there is no checkpoint yet"
        self._log(
            f"WARNING: {name} was not saved: {error.reason}; {newest}. {self._plan(wait_s, now, pause_s is None)}"
        )

    def metrics(self) -> dict[str, float]:
        """Number of saves that have failed since this start, and seconds since the last one that was finished."""
        return {
            "throughput/failed_saves": float(self._total),
            "throughput/time_since_save": self._now() - self._saved_at,
        }

    def _plan(self, wait_s: float, now: float, goes_on: bool) -> str:
        if not goes_on:
            return f"The next try is in {wait_s:g} s"
        left_s = max(0.0, self._retry_for_s - (now - (self._failing_since or now)))
        made_up = "; that checkpoint is kept for good, because a permanent one is missing" if self.is_owed else ""
        return (
            f"Training goes on. The next try is in {wait_s:g} s{made_up}. Failed so far: {self._streak}; the run ends if"
            f" saves still fail in {left_s:.0f} s (trainer.checkpointer.retry_for)"
        )


def _times(number: int) -> str:
    return f"{number} save" if number == 1 else f"{number} saves"
