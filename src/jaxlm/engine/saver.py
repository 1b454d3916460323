"""Saving during a phase: the policy applied to the checkpoint folder."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlm.core.runtime import is_main_process
from jaxlm.engine.checkpoint import CheckpointWriter
from jaxlm.engine.cursor import Cursor
from jaxlm.engine.phases import Phase
from jaxlm.engine.save_policy import CheckpointerConfig, SaveClock, is_permanent
from jaxlm.engine.state import RunState


class Saver:
    """Decides which checkpoints are saved in a phase, and has them written."""

    def __init__(
        self,
        writer: CheckpointWriter,
        policy: CheckpointerConfig,
        phase: Phase,
        before_save: Sequence[Callable[[], None]],
    ):
        """Args: before_save: called before each save; what they flush is on disk before the checkpoint is visible."""
        self._writer = writer
        self._policy = policy
        self._phase = phase
        self._before_save = before_save
        self._clock = SaveClock(policy.save_interval)
        self._last_saved: int | None = None

    def due_by_clock(self) -> bool:
        """Whether process 0's clock asks for a temporary checkpoint; False on every other process."""
        self._writer.check()
        return is_main_process() and self._clock.due()

    def due_by_step(self, step: int) -> bool:
        """Whether the rules keep this step's checkpoint."""
        return is_permanent(self._policy.keep, step)

    def save(self, state: RunState, step: int, position: Mapping[str, Any], *, forced: bool) -> None:
        """Starts saving the state after `step`, unless that was just done.

        Args:
            forced: the phase or the run ends here: kept for good where the phase is complete.
        """
        if step == self._last_saved:
            return
        kept = self.due_by_step(step) or (forced and step == self._phase.end)
        self._write(state, step, position, entering=False, temporary=not kept)

    def save_entry(self, state: RunState, position: Mapping[str, Any]) -> None:
        """Saves the state at the start of the phase, and waits until that is done."""
        self._write(state, self._phase.start, position, entering=True, temporary=True)
        self._writer.wait()

    def _write(
        self, state: RunState, step: int, position: Mapping[str, Any], *, entering: bool, temporary: bool
    ) -> None:
        for flush in self._before_save:
            flush()
        cursor = Cursor(step, self._phase.index, self._phase.name, entering, temporary)
        self._writer.save(state, cursor, position)
        self._last_saved = step
        self._clock.reset()
