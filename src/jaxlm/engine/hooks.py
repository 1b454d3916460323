"""What looks on while a phase trains."""

import math
import time
from collections.abc import Sequence

from jaxlm.core.types import StepInfo
from jaxlm.engine.console import Console, duration
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.engine.trackers import Tracker
from jaxlm.evals.base import Eval
from jaxlm.models.base import LanguageModel


class TrackerListener:
    """Hands every step's numbers to the trackers."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = trackers

    def __call__(self, info: StepInfo) -> None:
        for tracker in self._trackers:
            tracker.log(info.step, info.metrics)
            if info.histograms:
                tracker.log_histograms(info.step, info.histograms)


class ProgressListener:
    """Keeps one line of progress on the console, and says aloud when a step was skipped."""

    def __init__(self, console: Console, phase: Phase, *, skipped: int):
        """Args: skipped: steps that had been skipped before this phase went on."""
        self._console = console
        self._phase = phase
        self._skipped = skipped
        self._began: float | None = None
        self._steps_seen = 0

    def __call__(self, info: StepInfo) -> None:
        self._warn_of_skip(info)
        if self._began is None:
            self._began = time.monotonic()  # the first step took the compile with it: it says nothing about the rest
        else:
            self._steps_seen += 1
        text = "  ".join(self._parts(info))
        self._console.progress(text, last=info.step == self._phase.end)

    def _parts(self, info: StepInfo) -> list[str]:
        metrics = info.metrics
        parts = [
            f"step {info.step}/{self._phase.end}",
            f"loss {metrics.get('train/loss', metrics['train/objective']):.4f}",
            f"lr {metrics['optim/learning_rate']:.2e}",
            f"{metrics['throughput/tokens_per_second']:,.0f} tokens/s",
        ]
        if "throughput/mfu" in metrics:
            parts.append(f"MFU {metrics['throughput/mfu']:.1%}")
        if self._steps_seen and self._began is not None:
            pace = (time.monotonic() - self._began) / self._steps_seen
            parts.append(f"ETA {duration(pace * (self._phase.end - info.step))}")
        return parts

    def _warn_of_skip(self, info: StepInfo) -> None:
        skipped = int(info.metrics["train/skipped_steps"])
        if skipped > self._skipped:
            self._skipped = skipped
            self._console.show(f"step {info.step}: {_why_skipped(info)}; its update was left out ({skipped} so far)")


def _why_skipped(info: StepInfo) -> str:
    loss, norm = info.metrics["train/objective"], info.metrics["grad/norm/total"]
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "loss or gradient is not finite"
    most_loss, most_norm = info.metrics["bad_steps/loss_limit"], info.metrics["bad_steps/grad_norm_limit"]
    return f"loss {loss:.4g} (at most {most_loss:.4g}) or gradient norm {norm:.4g} (at most {most_norm:.4g}) stands out"


class NonFiniteError(Exception):
    """A step's loss or gradient is not finite, and the configuration says to stop there."""


class CrashListener:
    """Stops the run at the first number that it must not go on from. It hears of a step when its report has arrived."""

    def __init__(self, *, on_nan: bool, on_inf: bool):
        self._on_nan = on_nan
        self._on_inf = on_inf

    def __call__(self, info: StepInfo) -> None:
        for name in ("train/objective", "grad/norm/total"):
            value = info.metrics[name]
            if (self._on_nan and math.isnan(value)) or (self._on_inf and math.isinf(value)):
                raise NonFiniteError(
                    f"step {info.step}: {name} is {value} (trainer.crash_on_{'nan' if math.isnan(value) else 'inf'})."
                    " The update was left out; the newest checkpoint is from before"
                )


class EvalHook:
    """Runs the evaluations every so many steps and after the last step of the phase."""

    def __init__(
        self, evals: Sequence[Eval], every_steps: int, phase: Phase, trackers: Sequence[Tracker], console: Console
    ):
        self._evals = evals
        self._every_steps = every_steps
        self._phase = phase
        self._trackers = trackers
        self._console = console
        self.latest: dict[str, float] = {}

    def due(self, step: int) -> bool:
        """Every so many steps, and at the end."""
        return step % self._every_steps == 0 or step == self._phase.end

    def run(self, step: int, state: RunState) -> None:
        """Evaluates, logs and shows."""
        self.latest = self.measure(state)
        if self.latest:
            for tracker in self._trackers:
                tracker.log(step, self.latest)
            shown = "  ".join(f"{name} {value:.4f}" for name, value in self.latest.items())
            self._console.show(f"step {step}: {shown}")

    def measure(self, state: RunState) -> dict[str, float]:
        """The numbers of all evaluations, of the weights and of their averages, without logging them."""
        found = self._of("eval", state.model)
        for name, model in self._phase.averaged(state).items():
            found |= self._of(f"eval/{name}", model)
        return found

    def _of(self, prefix: str, model: LanguageModel) -> dict[str, float]:
        return {f"{prefix}/{name}": value for run in self._evals for name, value in run.run(model).items()}
