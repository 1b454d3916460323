"""What is logged of a run: the names of its metrics and activities, its texts, and the numbers of its layers.

The metrics of a training step have these names in `metrics.jsonl`, for those who write and those who read them. The metric
`x` of an objective is `train/x`, that of an evaluation `eval/x`. `core/guards.py` names those that decide whether an update
is skipped. Those of `optimizer.telemetry`, which controllers read, are float32 scalars of every step; docs/design/0033 says
what they mean.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxlm.core.guards import EVAL_PREFIX as EVAL_PREFIX

TRAIN_LOSS = "train/loss"
"""Mean over the targets of the batch, in nats."""

SMOOTHED_LOSS = "train/smoothed_loss"
"""Moving average of `train/loss` over all steps so far (decay 0.9, without bias towards zero), also of earlier starts."""

EVAL_LOSS = "eval/loss"
"""Mean over the targets of the validation data, in nats per token."""
EVAL_BPB = "eval/bpb"
"""Bits per byte of the validation text."""
BEST_BPB = "eval/best_bpb"
"""The lowest `eval/bpb` of the run so far, also of earlier starts."""
EVAL_CORE = "eval/core"
"""The CORE metric. Each of its tasks has `eval/core/<task>`, centered, and `eval/core/<task>/accuracy`."""

LEARNING_RATE = "optim/learning_rate"
"""Of the update that the step made. That of a parameter group is `optim/learning_rate/<name>`."""

GLOBAL_STEP = "global_step"
"""Steps done, with this one."""
PROGRESS = "run_progress"
"""`global_step` as a fraction of the steps of the whole run."""

TOTAL_TOKENS = "throughput/total_tokens"
"""Tokens trained on since the start of the run, with padding."""
TOTAL_GFLOPS = "throughput/total_gflops"
"""Model FLOPs since the start of the run, in units of 1e9."""

DURATION = "throughput/duration"
"""Seconds of the step. Only records of training steps have it, not those of evaluations."""
TRAINING_TIME = "throughput/training_time"
"""Seconds of all steps so far, also of earlier starts, without evaluations, saves and compiling."""
LOADING_TIME = "throughput/loading_time"
"""Seconds that the host waited for the batch."""
HOOK_TIME = "throughput/hook_time"
"""Seconds of evaluations and saves before the step; they are not in its duration."""

EXAMPLES_PER_SECOND = "throughput/examples_per_second"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
GFLOPS_PER_SECOND = "throughput/gflops_per_second"
MFU = "throughput/mfu"
"""Model FLOP/s as a fraction of the peak of all devices. Missing if the peak is not known."""

GOODPUT = "throughput/goodput"
"""Share of the run's wall time, since its first start, in which training made progress that is kept."""
RESUMED_FROM = "throughput/resumed_from"
"""Steps of the checkpoint that the process resumed from. Only its first training record has it."""

TELEMETRY = "telemetry"
"""Name of the guard that measures the following, and of its slot."""
LOSS = "telemetry/loss"
LOSS_REFERENCE = "telemetry/loss_reference"
LOSS_SCORE = "telemetry/loss_score"
GRAD_NORM_SCORE = "telemetry/grad_norm_score"
GRAD_NORM_RATIO = "telemetry/grad_norm_ratio"
IS_SPIKE = "telemetry/is_spike"
NUM_SPIKES = "telemetry/num_spikes"
IS_PLATEAU = "telemetry/is_plateau"
SLOPE = "telemetry/slope"
LAYER_RATIO = "telemetry/layer_ratio"
UPDATE_RATIO = "telemetry/update_ratio"

TOTAL = "reward"
"""Name of the weighted sum of all rewards."""


@dataclass(frozen=True)
class Histogram:
    """Counts of an array's values in bins of equal width.

    Attributes:
        low, high: smallest and largest value: the outer edges of the first and last bin.
        counts: number of values per bin, from low to high.
    """

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def edges(self) -> tuple[float, ...]:
        """Bin edges, one more than there are bins. If all values are equal, the histogram is 1 wide."""
        width = (self.high - self.low if self.high > self.low else 1.0) / len(self.counts)
        return tuple(self.low + width * number for number in range(len(self.counts) + 1))

    @property
    def is_empty(self) -> bool:
        """Tells whether no value was finite. `low` and `high` have no meaning then."""
        return not any(self.counts)


@dataclass(frozen=True)
class StepInfo:
    """The numbers of a finished step, fetched to the host and passed to the listeners.

    Attributes:
        step: number of steps in the whole run, including this one (`step-N` = N).
        histograms: histograms of the watched arrays, by name.
    """

    step: int
    phase: str
    metrics: Mapping[str, float]
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """Holds what the policy wrote to a prompt, and its rewards: a record of `completions.jsonl`.

    Attributes:
        name: `train` for a rollout, `eval` for an evaluation, or `eval/<name>` for one of an average of the weights.
        place: where the prompt's record is.
        rewards: by name; None where a reward does not apply.
        reward: their weighted sum.
        advantage: None if nothing is trained on it.
        finished: whether the policy ended it, and not the limit of tokens.
    """

    name: str
    place: str
    prompt: str
    completion: str
    rewards: Mapping[str, float | None]
    reward: float
    advantage: float | None
    finished: bool


@dataclass(frozen=True)
class Sample:
    """Text that an evaluation has generated: a record of `samples.jsonl`.

    Attributes:
        name: `eval` for the weights, or `eval/<name>` for an average of them.
    """

    name: str
    prompt: str
    text: str


@dataclass(frozen=True)
class LayerTable:
    """Numbers of every layer.

    Attributes:
        source: what has measured them, such as the `type` of a surgery.
        title: what was decided or measured.
        columns: names of the numbers of a layer, without commas.
        rows: the numbers of each layer, from 0.
    """

    source: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[float]]

    @property
    def text(self) -> str:
        """As one line. Numbers have 4 decimals."""
        layers = (f"{layer}: {', '.join(f'{x:.4f}' for x in row)}" for layer, row in enumerate(self.rows))
        return f"{self.source}: {self.title}, by layer ({', '.join(self.columns)}): {'; '.join(layers)}"


class Activity(enum.StrEnum):
    """Names what the main thread of a process is doing."""

    START = "start"  # everything that is not named below: imports, reading the configuration, opening data, and the end
    COMPILE = "compile"
    RESTORE = "restore"
    DATA = "data wait"
    ANNOTATION = "annotation"
    ROLLOUT = "rollout"
    STEP = "step"
    EVAL = "eval"
    SAVE = "save"
    BRANCH = "branch"


@dataclass(frozen=True)
class ScoredRows:
    """Holds what rewards see: one entry per completion.

    Attributes:
        completions: the text of each completion, without special tokens.
        completion_ids: its tokens, with the end-of-sequence token if the policy wrote it.
        is_finished: whether it ends with an end-of-sequence token; False if it was cut off.
        columns: the other values of each prompt's record, by key.
        places: where each prompt's record is, for messages.
    """

    prompts: Sequence[str]
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    is_finished: Sequence[bool]
    columns: Mapping[str, Sequence[Any]]
    places: Sequence[str]

    def __len__(self) -> int:
        return len(self.completions)

    def row(self, number: int) -> "ScoredRows":
        """One completion."""
        part = slice(number, number + 1)
        return ScoredRows(
            self.prompts[part],
            self.completions[part],
            self.completion_ids[part],
            self.is_finished[part],
            {name: values[part] for name, values in self.columns.items()},
            self.places[part],
        )
