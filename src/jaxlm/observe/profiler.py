"""Recording a profile of a few steps while a phase trains."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import is_main_process
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.forecast.hlo import operations
from jaxlm.observe.profile_summary import describe_profile, newest_trace, read_profile

SUMMARY = "profile.md"


@dataclass(frozen=True)
class ProfilerConfig:
    """Which steps of each phase are recorded, counted from where this process takes the phase up.

    Attributes:
        start_step: steps before the first that is recorded; the very first ones say little.
        num_steps: that are recorded; fewer where batches get another size, and with it another program.
    """

    start_step: int = 5
    num_steps: int = 10

    def check(self) -> None:
        """Raises `ConfigError` for numbers below 1."""
        for name, value in (("start_step", self.start_step), ("num_steps", self.num_steps)):
            if value < 1:
                raise ConfigError(f"trainer.profiler.{name}: {value} given, 1 or more expected")


class ProfileHook:
    """Starts and stops jax's profiler between steps, on process 0, and writes what it found as one page.

    Whatever fails about it is said, and the run goes on.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        folder: Path,
        phase: Phase,
        *,
        first_step: int,
        until: int,
        program: Callable[[], str],
        log: Callable[[str], None],
    ):
        """Args:
        first_step: steps done when the phase goes on.
        until: steps done when another program takes over, or the phase ends.
        program: the text of the compiled step.
        """
        self._folder = folder
        self._phase = phase
        self._begin = first_step + config.start_step
        self._end = min(self._begin + config.num_steps, until)
        self._program = program
        self._show = log
        self._recording = False
        if self._begin >= phase.end:
            log(f"profiler: phase '{phase.name}' ends at step {phase.end}, before the first that would be recorded")
        elif self._end < min(self._begin + config.num_steps, phase.end):
            log(f"profiler: records steps {self._begin + 1} to {self._end} only; then batches have another size")

    def due(self, step: int) -> bool:
        """Before the first and after the last recorded step."""
        return step in (self._begin, self._end) and self._begin < self._end

    def run(self, step: int, state: RunState) -> None:
        """Starts recording, or stops and sums up."""
        if not is_main_process():
            return
        try:
            if step == self._begin:
                self._start()
            elif self._recording:
                self._stop()
        # Anything at all: a profile is never worth a run.
        except Exception as failure:
            self._show(f"profiler: failed ({type(failure).__name__}: {failure}); the run goes on without a profile")

    def close(self) -> None:
        """Ends a recording that a stop of the run has cut short."""
        if self._recording:
            self._recording = False
            try:
                jax.profiler.stop_trace()
            except (RuntimeError, OSError) as failure:
                self._show(f"profiler: failed ({type(failure).__name__}: {failure})")

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls would be most of the file
        self._folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._recording = True

    def _stop(self) -> None:
        self._recording = False
        jax.profiler.stop_trace()
        trace = newest_trace(self._folder)
        text = self._program()
        name = text.partition(",")[0].removeprefix("HloModule ").strip()
        num_steps = self._end - self._begin
        profile = trace and read_profile(trace, name, operations(text), num_steps)
        if not profile:
            self._show(f"profiler: {self._folder} holds no operation of the step; nothing to sum up")
            return
        title = f"Profile of phase '{self._phase.name}', steps {self._begin + 1} to {self._end}"
        (self._folder / SUMMARY).write_text(describe_profile(profile, title))
        most = next(iter(profile.by_kind()))
        self._show(
            f"profile of {num_steps} steps: {self._folder / SUMMARY} (most time in {most}, idle {profile.idle:.1%})"
        )
