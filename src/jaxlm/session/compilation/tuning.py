"""Finds the XLA options and block sizes that make the training step fastest on this machine (`jaxlm bench --tune`).

A machine's speed drifts by more than most options are worth, so all programs take turns, step by step, and each is compared
with the step that ran just before or after it.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version

from jaxlm.core.devices import processor
from jaxlm.core.errors import ConfigError
from jaxlm.engine.state import RunState
from jaxlm.plan.plan import Plan
from jaxlm.session.compilation.options import (
    CANDIDATES,
    Options,
    StepOptions,
    TunedOptions,
    as_text,
    compiler_options,
    size_candidates,
    step_key,
)

MIN_ROUNDS = 6
"""Fewer pairs have no 95 % interval."""

# The low end of the interval must be above this, because a tuned step is a different program and rounds differently.
_GAIN = 1.01
# Relative difference of the losses of two steps: reordered sums stay far below, wrong products do not.
_TOLERANCE = 1e-3
_OBJECTIVE = "train/objective"

Step = Callable[[RunState, Any], tuple[RunState, Any]]
Compile = Callable[[StepOptions], Step]


class UnusableError(Exception):
    """A program that was compiled cannot be used."""


@dataclass(frozen=True)
class Trial:
    """Records what was found about one set of options.

    Attributes:
        ratio: times as fast as the step without them: low end, median and high end of a 95 % interval; None if the options
            cannot be used.
        why_not: why they cannot be used.
    """

    options: Options
    ratio: tuple[float, float, float] | None
    why_not: str = ""


def candidates_for(platform: str, program: Callable[[StepOptions], str]) -> list[Options]:
    """The XLA options to measure, and the block sizes of which each makes another program of the step.

    Args:
        program: the text of the program before XLA compiles it.

    Raises:
        ConfigError: the platform has no candidates.
    """
    if platform not in CANDIDATES:
        raise ConfigError(f"--tune: nothing to choose from on {platform}; only on {', '.join(CANDIDATES)}")
    fixed = compiler_options(platform)
    candidates = [options for options in CANDIDATES[platform] if not options.keys() & fixed.keys()]
    seen = {program(StepOptions.of(platform, {}))}
    for options in size_candidates(platform):
        text = program(StepOptions.of(platform, options))
        if text not in seen:  # short sequences and small batches are a single block either way
            candidates.append(options)
        seen.add(text)
    return candidates


def tune(
    plan: Plan,
    compile_with: Compile,
    candidates: Sequence[Options],
    state: RunState,
    batches: Sequence[Any],
    rounds: int,
    log: Callable[[str], None],
) -> TunedOptions:
    """Adds the candidate that helps most to the options, until none helps.

    Args:
        compile_with: compiles the step with given options, or raises `UnusableError`.
        candidates: see `candidates_for`.
        state: on the devices; its buffers are donated.
        rounds: steps of each program; at least `MIN_ROUNDS`.
    """
    platform = plan.layout.platform
    fixed = compiler_options(platform)
    compile_options = lambda options: compile_with(StepOptions.of(platform, fixed | options))  # noqa: E731
    best: Options = {}
    total = (1.0, 1.0, 1.0)
    left = [*candidates]
    while left:
        base = compile_options(best)
        with_extra = lambda extra, kept=best: compile_options(kept | extra)  # noqa: E731
        trials, state = _trials(base, left, with_extra, state, batches, rounds)
        for trial in trials:
            log(_line(trial, best))
        useful = [trial for trial in trials if trial.ratio is not None and trial.ratio[0] > _GAIN]
        if not useful:
            break
        winner = max(useful, key=lambda trial: trial.ratio[1] if trial.ratio else 0.0)
        assert winner.ratio is not None
        best = best | winner.options
        total = (total[0] * winner.ratio[0], total[1] * winner.ratio[1], total[2] * winner.ratio[2])
        left = [trial.options for trial in useful if trial is not winner]
    return TunedOptions(processor(), jaxlib.version.__version__, step_key(plan), best, total, time.time())


def compare(base: Step, step: Step, state: RunState, batches: Sequence[Any], rounds: int) -> tuple[float, float, float]:
    """Computes how many times as fast as the base a step is: low end, median and high end of a 95 % interval."""
    ratios = []
    for turn in range(-1, rounds):
        ratio, state = _ratio(base, step, state, batches, turn)
        ratios += [ratio] if turn >= 0 else []  # both warm up first
    return median_interval(ratios)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Low end, median and high end of a 95 % confidence interval of a median, without an assumption about the values.

    The ends are order statistics: the k-th smallest and largest value, with the largest k for which fewer than 2.5 % of
    samples have their k-th value on the wrong side (Conover, Practical Nonparametric Statistics, 3.2).
    """
    ordered, number = sorted(values), len(values)
    below, k = 0.0, 0
    while (below := below + math.comb(number, k) / 2**number) <= 0.025:
        k += 1
    if k == 0:
        return -math.inf, statistics.median(ordered), math.inf
    return ordered[k - 1], statistics.median(ordered), ordered[-k]


def _trials(
    base: Step,
    candidates: Sequence[Options],
    compile_with: Callable[[Options], Step],
    state: RunState,
    batches: Sequence[Any],
    rounds: int,
) -> tuple[list[Trial], RunState]:
    expected = _losses(base, state, batches)
    failed, steps = [], {}
    for number, options in enumerate(candidates):
        try:
            step = compile_with(options)
            losses = _losses(step, state, batches)
        except (UnusableError, jax.errors.JaxRuntimeError) as error:  # another jaxlib has other options
            failed.append(Trial(options, None, str(error).partition("\n")[0][:120]))
            continue
        if all(abs(ours - theirs) <= _TOLERANCE * abs(theirs) for ours, theirs in zip(losses, expected, strict=True)):
            steps[number] = step
        else:
            failed.append(Trial(options, None, f"its losses are {losses} instead of {expected}"))
    ratios: Mapping[int, list[float]] = {number: [] for number in steps}
    for turn in range(rounds):
        order = [*steps][:: 1 if turn % 2 else -1]
        for number in order:
            ratio, state = _ratio(base, steps[number], state, batches, turn)
            ratios[number].append(ratio)
    measured = [Trial(candidates[number], median_interval(values)) for number, values in ratios.items()]
    return [*measured, *failed], state


def _ratio(base: Step, step: Step, state: RunState, batches: Sequence[Any], turn: int) -> tuple[float, RunState]:
    """Measures how many times as fast as the base a step is, both run once. Which of them is first changes from turn to
    turn: the second finds warmer caches."""
    seconds, batch = {}, batches[turn % len(batches)]
    for is_base in (False, True)[:: 1 if turn % 2 else -1]:
        started = time.perf_counter()
        state, report = (base if is_base else step)(state, batch)
        jax.block_until_ready(report)
        seconds[is_base] = time.perf_counter() - started
    return seconds[True] / seconds[False], state


def _losses(step: Step, state: RunState, batches: Sequence[Any]) -> list[float]:
    """The losses of two steps from a copy of the state. The second shows whether the first gradient was right."""
    copy = jax.tree.map(jnp.copy, state)
    losses = []
    for batch in batches[:2]:
        copy, report = step(copy, batch)
        losses.append(float(report.metrics[_OBJECTIVE]))
    return losses


def _line(trial: Trial, kept: Options) -> str:
    named = as_text(trial.options)
    beside = f" (beside {', '.join(kept)})" if kept else ""
    if trial.ratio is None:
        return f"  {named}{beside}: cannot be used: {trial.why_not}"
    low, median, high = trial.ratio
    return f"  {named}{beside}: {median:.3f} times as fast ({low:.3f} to {high:.3f})"
