"""Records a profile of a few training steps of each phase."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxlm.core.field_types import PositiveInt
from jaxlm.core.redaction import write_text
from jaxlm.core.runtime import is_main_process
from jaxlm.core.values.logged import Activity
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.hardware.hlo import operations
from jaxlm.observe.profile_summary import describe_profile, read_profile

SUMMARY = "profile.md"


@dataclass(frozen=True)
class ProfilerConfig:
    """Records a profile of some steps of each phase. Steps are counted from where this process starts or resumes the phase.

    Attributes:
        start_step: number of steps to skip before recording starts; the first steps are not representative.
        num_steps: number of steps to record. Recording stops early if the batch size, and thus the program, changes.
    """

    start_step: PositiveInt = 5
    num_steps: PositiveInt = 10


@dataclass(eq=False)
class ProfileHook:
    """Starts and stops the JAX profiler between steps, on process 0, and writes a one-page summary.

    If profiling fails, the failure is logged and the run continues.

    Attributes:
        first_step: steps done when this process starts or resumes the phase.
        until: steps done when the compiled program changes or the phase ends.
        program: returns the HLO text of the compiled step.
    """

    activity = Activity.SAVE

    config: ProfilerConfig
    folder: Path
    phase: Phase
    first_step: int
    until: int
    program: Callable[[], str]
    log: Callable[[str], None]

    def __post_init__(self):
        self._begin = self.first_step + self.config.start_step
        self._end = min(self._begin + self.config.num_steps, self.until)
        self._recording = False
        if self._begin >= self.phase.end:
            self.log(
                f"profiler: nothing to record: phase '{self.phase.name}' ends at step {self.phase.end}, before recording"
                " starts (trainer.profiler.start_step)"
            )
        elif self._end < min(self._begin + self.config.num_steps, self.phase.end):
            self.log(
                f"profiler: recording only steps {self._begin + 1} to {self._end}, because the batch size changes after them"
            )

    def due(self, step: int) -> bool:
        """Whether recording starts or stops after this step."""
        return step in (self._begin, self._end) and self._begin < self._end

    def run(self, step: int, state: RunState) -> None:
        """Starts recording, or stops it and writes the summary."""
        if not is_main_process():
            return
        try:
            if step == self._begin:
                self._start()
            elif self._recording:
                self._stop()
        # A profiler failure of any kind must not stop the run.
        except Exception as failure:
            self.log(f"profiler: failed ({type(failure).__name__}: {failure}); the run continues without a profile")

    def close(self) -> None:
        """Stops a recording that is still active when the run ends."""
        if self._recording:
            self._recording = False
            try:
                jax.profiler.stop_trace()
            except (RuntimeError, OSError) as failure:
                self.log(f"profiler: failed ({type(failure).__name__}: {failure})")

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # otherwise Python calls make up most of the file
        self.folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self._recording = True

    def _stop(self) -> None:
        self._recording = False
        jax.profiler.stop_trace()
        traces = sorted(self.folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
        text = self.program()
        name = text.partition(",")[0].removeprefix("HloModule ").strip()
        num_steps = self._end - self._begin
        profile = read_profile(traces[-1], name, operations(text), num_steps) if traces else None
        if profile is None:
            self.log(f"profiler: the trace in {self.folder} has no operation of the training step; no summary written")
            return
        title = f"Profile of phase '{self.phase.name}', steps {self._begin + 1} to {self._end}"
        write_text(self.folder / SUMMARY, describe_profile(profile, title))
        most = next(iter(profile.by_kind()))
        self.log(
            f"profile of {num_steps} steps: {self.folder / SUMMARY} (most time in: {most}, idle: {profile.idle:.1%})"
        )
