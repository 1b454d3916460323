"""Gives each stack of layers its time step (time as depth): it trains on as many hidden tokens as its time says.

The stack beside the head has the least noise, time step 0 of `num_time_steps`, and the one beside the embeddings the most,
unless time follows the order of training. Prepended, a stack removes what those behind it have not learned to.

Source: StackWise (time-as-depth, `stack_time_mapping`, `time_per_stack`), with times that are all different.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, NumTimeSteps
from jaxlm.core.values.mask_schedule import SteppedSchedule
from jaxlm.data.masking import MaskingConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.progressive.patterns import TimeMapping, time_steps

_KEY = "preset.depth_times"
_TIME_PER_STACK = 100
_SINGLE, _RANGES = "mlm", "diffusion"
"""Objectives that train at one time, and over a range of times."""
_BLOCKS = "diffusion_blocks"  # has times of its own


@dataclass(frozen=True)
class StackTime:
    """The noise that a stack trains on.

    Attributes:
        step, num_steps: its time step, from 0, and their number.
        times: first and last time of its sequences, in [0, 1].
        fractions: of the tokens that are hidden at these times.
    """

    step: int
    num_steps: int
    times: tuple[float, float]
    fractions: tuple[float, float]

    @property
    def data(self) -> dict[str, Any]:
        """The keys of the phase's data."""
        return {"masking": {"times": list(self.times)}}

    def __str__(self) -> str:
        shown = " to ".join(dict.fromkeys(f"{fraction:.4g}" for fraction in self.fractions))
        return f"time step {self.step:,} of {self.num_steps:,}, mask fraction {shown}"


@dataclass(frozen=True)
class DepthTimes:
    """Gives each stack a time step, the first one with the fewest hidden tokens. With the objective `mlm`, a stack trains at
    its own time alone; with `diffusion`, at all times that are closer to its own than to any other stack's.

    Attributes:
        order: which stack has the first time step: `output` counts from the output, so that it is the stack beside the head;
            `training` counts as stacks are added, so that it is the first to train. Prepended stacks have the same order in
            both.
        mapping: `linear`, from step 0 to the last one at equal distances; `exponential`, at growing distances; or a list with
            the step of each stack.
        time_per_stack: number of time steps for each stack; null for 100. Only where nothing else says how many there are.
        num_time_steps: number of time steps; null for that of `data.masking`, if it has steps, or else `time_per_stack` for
            each stack. Step k of T is time k / (T - 1).
    """

    order: Literal["output", "training"] = "output"
    mapping: TimeMapping | list[NonNegativeInt] = "linear"
    time_per_stack: NumTimeSteps | None = None
    num_time_steps: NumTimeSteps | None = None

    def of(self, num_stacks: int, tree: Mapping[str, Any], objective: Any, seq_len: int) -> tuple[StackTime, ...]:
        """Returns the time of each stack, in `order`.

        Args:
            tree: the configuration.
            objective: its objective section.

        Raises:
            ConfigError: the objective does not predict hidden tokens, or stacks have no noise of their own.
        """
        kind = objective.get("type") if isinstance(objective, Mapping) else None
        if kind not in (_SINGLE, _RANGES):
            why = (
                "trains each block of layers at times of its own already"
                if kind == _BLOCKS
                else "hides no tokens and has no time"
            )
            raise ConfigError(
                f"{_KEY}: given with objective.type: {kind or 'next_token'}, which {why}."
                f" Set objective.type: {_SINGLE} or {_RANGES}, with data.masking, or remove it"
            )
        masking = _masking(tree)
        schedule, num_steps = masking.schedule, self._num_steps(num_stacks, masking)
        steps = time_steps(self.mapping, num_stacks, num_steps, f"{_KEY}.mapping")
        times = [step / (num_steps - 1) for step in steps] if num_steps > 1 else [1.0]
        if kind == _SINGLE:
            ranges = [(time, time) for time in times]
        else:
            if masking.is_stepped:
                raise ConfigError(
                    f"{_KEY}: given with objective.type: {_RANGES}, which needs all times, and with time steps in"
                    " data.masking. Remove num_time_steps and time_step_mask_fractions there, or set objective.type:"
                    f" {_SINGLE}"
                )
            ends = [0.0, *(sum(pair) / 2 for pair in itertools.pairwise(times)), 1.0]
            ranges = list(itertools.pairwise(ends))
        fractions = [tuple(schedule.fractions(np.array(span)).tolist()) for span in ranges]
        if (least := fractions[0][1]) * seq_len < 1:
            raise ConfigError(
                f"{_KEY}: the first stack has time step {steps[0]} of {num_steps}, at which data.masking hides a"
                f" fraction of {least:.4g}: less than one token of a sequence of {seq_len}. Set"
                " data.masking.min_mask_fraction, such as 0.15"
            )
        largest = [span[1] for span in fractions]
        if any(later <= earlier for earlier, later in itertools.pairwise(largest)):
            raise ConfigError(
                f"{_KEY}: the stacks have the mask fractions {[round(one, 6) for one in largest]}, but"
                f" these must rise. {_to_rise(masking)}"
            )
        return tuple(
            StackTime(step, num_steps, span, hidden)
            for step, span, hidden in zip(steps, ranges, fractions, strict=True)
        )

    def places(self, num_stacks: int, *, prepended: bool) -> Sequence[int]:
        """For each stack in the order of training, its place in `order`."""
        return range(num_stacks) if prepended or self.order == "training" else range(num_stacks)[::-1]

    def _num_steps(self, num_stacks: int, masking: MaskingConfig) -> int:
        """Raises `ConfigError` if two keys give different numbers, or one of them has no effect."""
        schedule, has_steps = masking.schedule, masking.is_stepped
        if self.time_per_stack is not None and (has_steps or self.num_time_steps is not None):
            other = "time steps in data.masking" if has_steps else f"num_time_steps: {self.num_time_steps}"
            raise ConfigError(
                f"{_KEY}.time_per_stack: {self.time_per_stack} given with {other}, which says how many steps there are."
                " Remove one of the two"
            )
        if not isinstance(schedule, SteppedSchedule):
            per_stack = self.time_per_stack or _TIME_PER_STACK
            return per_stack * num_stacks if self.num_time_steps is None else self.num_time_steps
        num_steps = len(schedule.by_step)
        if self.num_time_steps not in (None, num_steps):
            raise ConfigError(
                f"{_KEY}.num_time_steps: {self.num_time_steps} given, but data.masking has {num_steps} time steps. Remove one"
                " of the two"
            )
        return num_steps


def _to_rise(masking: MaskingConfig) -> str:
    """Says what to change, so that later times have larger mask fractions."""
    if masking.time_step_mask_fractions is not None:
        return "Write rising data.masking.time_step_mask_fractions"
    ends = f"{masking.min_mask_fraction:g} and max_mask_fraction: {masking.max_mask_fraction:g}"
    return f"Move data.masking.min_mask_fraction: {ends} apart"


@dataclass(frozen=True)
class _DataSection:
    masking: MaskingConfig | None = None


@dataclass(frozen=True)
class _Tree:
    data: _DataSection = field(default_factory=_DataSection)


def _masking(tree: Mapping[str, Any]) -> MaskingConfig:
    section = tree.get("data")
    masking = section.get("masking") if isinstance(section, Mapping) else None
    if masking is None:
        raise ConfigError(
            f"{_KEY}: given without data.masking, which hides tokens. Set data.masking: {{}}, or remove it"
        )
    config = decode(_Tree, ConfigSource({"data": {"masking": masking}})).data.masking
    assert config is not None
    if config.times is not None:
        raise ConfigError(
            f"data.masking.times: {config.times} given, but {_KEY} sets the times of each stack. Remove it"
        )
    return config
