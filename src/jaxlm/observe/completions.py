"""Completions with their rewards: all of them in `completions.jsonl`, a few on the console and in the trackers."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxlm.core.field_types import NonNegativeInt, PositiveFloat, PositiveInt
from jaxlm.core.values.logged import TOTAL, Completion, ScoredRows
from jaxlm.observe.console import Console
from jaxlm.observe.records import finite
from jaxlm.observe.trackers import Tracker

ROLLOUT = "train"
"""The name of completions that the policy trains on."""
_MEGABYTE = 1_000_000
_MAX_CHARACTERS = 400  # of a text on the console


@dataclass(frozen=True)
class CompletionsConfig:
    """Sets which completions are logged, if an objective or an evaluation rewards some.

    Attributes:
        max_per_step: how many completions of a rollout or an evaluation go to `completions.jsonl`, from the first on; null
            writes all.
        max_megabytes: when `completions.jsonl` has this size, it replaces `completions.1.jsonl`, and a new file begins.
        show_every: show completions of the first rollout in each N steps of the training on the console and in trackers with
            tables; 0 shows none. Those of evaluations are always shown.
        num_shown: how many are shown; 0 shows none.
    """

    max_per_step: PositiveInt | None = None
    max_megabytes: PositiveFloat = 100.0
    show_every: NonNegativeInt = 10
    num_shown: NonNegativeInt = 2

    @property
    def max_bytes(self) -> float:
        return self.max_megabytes * _MEGABYTE


class CompletionLog:
    """Logs completions. On processes other than 0, which have no trackers, it does nothing."""

    def __init__(self, config: CompletionsConfig, trackers: Sequence[Tracker], console: Console):
        """Args: trackers: the first one writes the run's files, as in `Run.trackers`."""
        self._config = config
        self._trackers = trackers
        self._console = console
        self._shown = -1

    def log(
        self,
        step: int,
        rows: ScoredRows,
        scores: Mapping[str, np.ndarray],
        advantages: np.ndarray | None = None,
        *,
        name: str = ROLLOUT,
    ) -> None:
        """Logs completions.

        Args:
            scores: as `Rewards.score` returns them.
            advantages: [rows]; None if nothing is trained on them.
            name: `train`, or `eval/` and the name of an evaluation.
        """
        if not self._trackers:
            return
        num_logged = min(len(rows), self._config.max_per_step or len(rows))
        completions = [_completion(name, rows, scores, advantages, number) for number in range(num_logged)]
        files, *others = self._trackers
        files.log_completions(step, completions)
        if name == ROLLOUT:
            every, before = self._config.show_every, self._shown
            self._shown = step // every if every else before
            if self._shown == before:  # it is not the first rollout of `show_every` steps: not every step has one
                return
        if shown := completions[: self._config.num_shown]:
            for tracker in others:
                tracker.log_completions(step, shown)
            self._console.log("\n".join([f"step {step}: completions ({name})", *map(_described, shown)]))


def _completion(
    name: str, rows: ScoredRows, scores: Mapping[str, np.ndarray], advantages: np.ndarray | None, number: int
) -> Completion:
    rewards = {one: finite(float(values[number])) for one, values in scores.items() if one != TOTAL}
    return Completion(
        name,
        rows.places[number],
        rows.prompts[number],
        rows.completions[number],
        rewards,
        float(scores[TOTAL][number]),
        None if advantages is None else finite(float(advantages[number])),
        bool(rows.is_finished[number]),
    )


def _described(one: Completion) -> str:
    """The facts of a completion in one line, and its end under that of its prompt."""
    facts = [
        f"reward {one.reward:.3f}",
        *(f"{name} {value:.3f}" for name, value in one.rewards.items() if value is not None),
    ]
    facts += [] if one.advantage is None else [f"advantage {one.advantage:+.3f}"]
    facts += [] if one.finished else ["cut off"]
    text = f"{_shortened(one.prompt)}>>>{_shortened(one.completion)}"
    return f"  {'  '.join(facts)}\n{textwrap.indent(text, '  | ', lambda _line: True)}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"…{text[-_MAX_CHARACTERS:]}"
