"""Listeners and hooks that log, show progress and evaluate during training."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxlm.core.guards import OBJECTIVE, SKIPPED, StepGuard, skip_reason
from jaxlm.core.values.logged import (
    DURATION,
    HOOK_TIME,
    LEARNING_RATE,
    MFU,
    TOKENS_PER_SECOND,
    TRAIN_LOSS,
    Activity,
    Sample,
    ScoredRows,
    StepInfo,
)
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.evals.base import Eval, Limits, failed
from jaxlm.models.base import LanguageModel
from jaxlm.observe.completions import CompletionLog
from jaxlm.observe.console import Console, duration
from jaxlm.observe.records import METRICS
from jaxlm.observe.trackers import Tracker

_RECENT_STEPS = 50  # steps over which the progress line averages speed
_MAX_SHOWN = 24  # metrics of an evaluation on the console
_ACCURACY, _TRAINED_SHARE = "train/mean_token_accuracy", "train/trained_share"
_PART = 0.9  # the progress line shows the share of trained tokens if it is less, as in chats
# Metrics that say more about a run than its loss, which hardly moves.
_OF_PREFERENCES = {"train/rewards/accuracies": "accuracy", "train/rewards/margins": "margin"}

_CLIPPED = "train/completions/clipped_ratio"  # only of responses that are sampled in training


class TrackerListener:
    """Passes every step's metrics, and those of the whole run, to the trackers."""

    def __init__(self, trackers: Sequence[Tracker], run_metrics: Sequence[Callable[[], dict[str, float]]] = ()):
        """Args: run_metrics: called at each step; each returns metrics of the whole run."""
        self._trackers = trackers
        self._run_metrics = run_metrics

    def __call__(self, info: StepInfo) -> None:
        metrics = dict(info.metrics)
        for measure in self._run_metrics:
            metrics |= measure()
        for tracker in self._trackers:
            tracker.log(info.step, metrics)
            if info.histograms:
                tracker.log_histograms(info.step, info.histograms)


class _StepTime(NamedTuple):
    tokens: float
    seconds: float
    hook_seconds: float  # duration of evaluations and saves before the step
    peak_seconds: float  # at the devices' peak FLOP/s; nan if that is unknown


@dataclass(eq=False)
class ProgressListener:
    """Shows a progress line on the console, and reports skipped steps.

    Attributes:
        records: describes the contents of a batch, given its step counted from 0; called for skipped steps.
        report: receives skipped steps, as `RunRecords.report`.
        skipped: number of steps skipped so far; at first, before this process started or resumed the phase.
        guards: the guards of the phase, which say why they skip updates.
        can_show_batches: whether the batch of each step follows from the configuration.
        tells_end: log how the loss changed when the phase ends.
    """

    console: Console
    phase: Phase
    records: Callable[[int], str]
    report: Callable[..., None]
    skipped: int = field(kw_only=True)
    guards: Sequence[StepGuard] = ()
    can_show_batches: bool = True
    tells_end: bool = False

    def __post_init__(self):
        self._first: tuple[int, float] | None = None
        self._recent: deque[_StepTime] = deque(maxlen=_RECENT_STEPS)
        self._warming_up = True

    def __call__(self, info: StepInfo) -> None:
        self._warn_of_skip(info)
        if self._warming_up and self._recent:
            self._recent.clear()  # the first step includes warm-up and is not representative
            self._warming_up = False
        seconds = info.metrics[DURATION]
        tokens = info.metrics[TOKENS_PER_SECOND] * seconds
        at_peak = info.metrics.get(MFU, math.nan) * seconds
        self._recent.append(_StepTime(tokens, seconds, info.metrics[HOOK_TIME], at_peak))
        self.console.progress("  ".join(self._parts(info)), last=info.step == self.phase.end)
        loss = info.metrics.get(TRAIN_LOSS, info.metrics[OBJECTIVE])
        self._first = self._first or (info.step, loss)
        if self.tells_end and info.step == self.phase.end:
            step, first = self._first
            self.console.log(
                f"phase '{self.phase.name}' ends: loss {first:.4f} at step {step}, {loss:.4f} at step {info.step}"
            )

    def _parts(self, info: StepInfo) -> list[str]:
        metrics = info.metrics
        # Average over several steps, because reports may arrive in groups, well after their steps.
        seconds = sum(step.seconds for step in self._recent)
        parts = [f"step {info.step}/{self.phase.end}"]
        if _CLIPPED in metrics:  # the step samples its responses: the loss hardly moves, and need not fall
            length, clipped = metrics["train/completions/mean_length"], metrics[_CLIPPED]
            parts += [f"reward {metrics['train/reward']:.3f}", f"length {length:.0f} ({clipped:.0%} cut off)"]
        parts += [
            f"loss {metrics.get(TRAIN_LOSS, metrics[OBJECTIVE]):.4f}",
            f"lr {metrics[LEARNING_RATE]:.2e}",
            f"{sum(step.tokens for step in self._recent) / seconds:,.0f} tokens/s",
        ]
        parts += [f"{short} {metrics[name]:.3f}" for name, short in _OF_PREFERENCES.items() if name in metrics]
        if metrics.get(_TRAINED_SHARE, 1.0) < _PART:
            parts += [f"accuracy {metrics[_ACCURACY]:.3f}", f"trained {metrics[_TRAINED_SHARE]:.0%}"]
        if MFU in metrics:
            parts.append(f"MFU {sum(step.peak_seconds for step in self._recent) / seconds:.1%}")
        pace = (seconds + sum(step.hook_seconds for step in self._recent)) / len(self._recent)
        parts.append(f"ETA {duration(pace * (self.phase.end - info.step))}")
        return parts

    def _warn_of_skip(self, info: StepInfo) -> None:
        skipped = int(info.metrics[SKIPPED])
        if skipped > self.skipped:
            self.skipped = skipped
            reason = skip_reason(self.guards, info.metrics)
            command = (
                f" (to print it, run jaxlm prepare with this configuration and --show_batch {info.step - 1})"
                if self.can_show_batches
                else ""
            )
            batch = f"{self.records(info.step - 1)}{command}"
            text = f"step {info.step}: {reason}; update skipped ({skipped} skipped so far). Batch: {batch}"
            self.report(info.step, text, "skip", reason=reason, batch=batch)


class Generated:
    """Collects what the model has written for the evaluations: prompts and texts, and completions with their rewards."""

    def __init__(self):
        self.samples: list[tuple[str, str]] = []
        self.completions: list[tuple[str, ScoredRows, Mapping[str, np.ndarray]]] = []

    def add_sample(self, prompt: str, text: str) -> None:
        """As `EvalContext.log_sample`."""
        self.samples.append((prompt, text))

    def add_completions(self, name: str, rows: ScoredRows, scores: Mapping[str, np.ndarray]) -> None:
        """As `EvalContext.log_completions`."""
        self.completions.append((name, rows, scores))

    def clear(self) -> None:
        """Forgets everything."""
        self.samples.clear()
        self.completions.clear()


class ScheduledEval(NamedTuple):
    """An open evaluation.

    Attributes:
        every: runs only at every N-th time, and after the last scheduled step of the phase; None runs only at the end of the
            phase. One with limits also runs at the end if that is early.
    """

    evaluation: Eval
    every: int | None = 1
    limits: Limits = Limits()


@dataclass(eq=False)
class EvalHook:
    """Runs the evaluations every `every_steps` steps and after the last step of the phase.

    Attributes:
        generated: where the evaluations put what the model has written.
        run_metrics: returns metrics of the whole run, given a step and the metrics of its evaluations.
        before: called with the state that is evaluated next.
        completions: logs completions with their rewards; None logs none.
    """

    activity = Activity.EVAL

    evals: Sequence[ScheduledEval]
    every_steps: int
    phase: Phase
    trackers: Sequence[Tracker]
    console: Console
    generated: Generated
    run_metrics: Callable[[int, Mapping[str, float]], dict[str, float]] = lambda step, metrics: {}
    before: Callable[[RunState], None] = lambda state: None
    completions: CompletionLog | None = None

    def __post_init__(self):
        self._violations: list[str] = []
        self._ran_at: int | None = None
        self.latest: dict[str, float] = {}

    def due(self, step: int) -> bool:
        return bool(self._due(step)) or step == self.phase.end

    def all_due(self, step: int) -> bool:
        return len(self._due(step)) == len(self.evals)

    def _due(self, step: int) -> list[ScheduledEval]:
        number, between = divmod(step, self.every_steps)
        is_last = step == self.phase.end
        is_due = lambda every: every is not None and not between and number % every == 0  # noqa: E731
        return [one for one in self.evals if is_last or is_due(one.every)]

    def run(self, step: int, state: RunState) -> None:
        """Raises: GateError: a limit with `fail_fast` is violated in the middle of the phase."""
        self._ran_at, self._violations = step, []
        self._run(self._due(step), step, state, is_end=step == self.phase.end)

    def run_at_early_end(self, step: int, state: RunState) -> None:
        self._ran_at, self._violations = step, []
        self._run(self._due(step), step, state, is_end=True)

    def run_rest(self, step: int, state: RunState) -> None:
        """Runs what belongs to the end of the phase, which ends early: what runs only there, and what has limits and has not
        run at this step."""
        done = self._due(step) if step == self._ran_at else []
        at_end = [one for one in self.evals if one.every is None or (one.limits.by_metric and one not in done)]
        if at_end and step != self.phase.end:
            before = self.latest
            self._run(at_end, step, state, is_end=True)
            self.latest = before | self.latest

    def check_passed(self) -> None:
        """Called when the end of the phase is saved. Raises `GateError` if a limit with `fail_fast` was violated there."""
        if self._violations:
            raise failed(self._violations, f"the end of phase '{self.phase.name}'")

    def _run(self, evals: Sequence[ScheduledEval], step: int, state: RunState, *, is_end: bool) -> None:
        self.before(state)
        metrics, samples = self._measure(evals, step, state)
        self.latest = metrics | self.run_metrics(step, metrics)
        if samples:
            for tracker in self.trackers:
                tracker.log_samples(step, samples)
        if self.latest:
            for tracker in self.trackers:
                tracker.log(step, self.latest)
            shown = [f"{name} {value:.4f}" for name, value in self.latest.items()]
            more = [f"and {len(shown) - _MAX_SHOWN} more in {METRICS}"] if len(shown) > _MAX_SHOWN else []
            self.console.log(f"step {step}: {'  '.join([*shown[:_MAX_SHOWN], *more])}")
        self._judge(evals, step, state, is_end=is_end)

    def _judge(self, evals: Sequence[ScheduledEval], step: int, state: RunState, *, is_end: bool) -> None:
        """Warns of metrics beyond their limits. Those that end the run are kept for `check_passed` at the end of a phase."""
        fatal: list[str] = []
        for prefix in ("eval", *self._averages(state)):
            measured = {name.removeprefix(f"{prefix}/"): value for name, value in self.latest.items()}
            for one in evals:
                lines = one.limits.violations(prefix, measured)
                fatal += lines if one.limits.fail_fast else ()
                for line in lines:
                    self.console.log(f"warning: step {step}: {line}")
        if is_end:
            self._violations += fatal
        elif fatal:
            raise failed(fatal, f"step {step}")

    def _measure(
        self, evals: Sequence[ScheduledEval], step: int, state: RunState
    ) -> tuple[dict[str, float], list[Sample]]:
        metrics: dict[str, float] = {}
        samples: list[Sample] = []
        for prefix, model in {"eval": state.model, **self._averages(state)}.items():
            self.generated.clear()
            for one in evals:
                metrics |= {f"{prefix}/{name}": value for name, value in one.evaluation.run(model).items()}
            samples += [Sample(prefix, prompt, text) for prompt, text in self.generated.samples]
            if self.completions is not None:
                for name, rows, scores in self.generated.completions:
                    self.completions.log(step, rows, scores, name=f"{prefix}/{name}")
        return metrics, samples

    def _averages(self, state: RunState) -> dict[str, LanguageModel]:
        return {f"eval/{name}": model for name, model in self.phase.averaged(state).items()}


class AtEarlyEnd:
    """Runs evaluations that belong to the end of a phase when it ends before its last step. An export in `Hooks`: those also
    run on the weights with which a phase ends early."""

    activity = Activity.EVAL

    def __init__(self, evaluations: EvalHook):
        self._evaluations = evaluations

    def due(self, step: int) -> bool:
        return False

    def run(self, step: int, state: RunState) -> None:
        self._evaluations.run_rest(step, state)
