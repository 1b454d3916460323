"""Computes the number of training steps from the data, for `epoch` and `data.stop_strategy`."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxlm.core.errors import ConfigError, counted
from jaxlm.core.runtime import differences_between_processes, main_first
from jaxlm.data.batch_schedule import BatchSchedule
from jaxlm.data.config import DataConfig, check_mixture
from jaxlm.data.data import Data
from jaxlm.data.shuffle import EraShuffle
from jaxlm.engine.phases import Phase
from jaxlm.plan.batches import BatchPlan
from jaxlm.plan.plan import plan_phases
from jaxlm.plan.run_config import RunConfig
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.reading.decode import choice_name


def check_num_steps(config: RunConfig) -> None:
    """Checks the mixtures, `trainer.num_train_steps` and `epoch`, as far as possible before the data is opened."""
    phases, sections = plan_phases(config)
    _check_is_used(config)
    for data in sections:
        check_mixture(data)
    if config.epoch < 0:
        raise ConfigError(f"epoch: {config.epoch} given, must be 0 (not used) or the number of passes over the data")
    if not config.epoch:
        return
    if steps_of_all_phases(config) is not None:
        raise ConfigError(
            "epoch: has no effect, because every phase sets num_train_steps. Remove epoch, or num_train_steps of a phase"
        )
    for phase, data in zip(phases, sections, strict=True):
        if len(data.corpus.train_sources) > 1:
            raise ConfigError(
                f"epoch: {config.epoch} given, but phase '{phase.name}' trains on several sources of different sizes. Remove"
                " epoch and set data.stop_strategy (first_exhausted or all_exhausted)"
            )


def steps_of_all_phases(config: RunConfig) -> int | None:
    """The sum of the phases' `num_train_steps`; None if one uses that of the trainer, or there are no phases."""
    steps = [phase.num_train_steps for phase in config.phases if phase.num_train_steps is not None]
    return sum(steps) if steps and len(steps) == len(config.phases) else None


def _check_is_used(config: RunConfig) -> None:
    """Raises `ConfigError` if `trainer.num_train_steps` is given, but every phase sets its own, and they do not add up to it.

    A saved configuration has the default too, so that counts as not given.
    """
    num_train_steps, total = config.trainer.num_train_steps, steps_of_all_phases(config)
    if total is None or num_train_steps in (TrainerConfig.num_train_steps, total):
        return
    numbers = "phases.0.num_train_steps" if len(config.phases) == 1 else "phases.N.num_train_steps"
    preset = "" if config.preset is None else f", or keys of preset.type: {choice_name(type(config.preset))}"
    raise ConfigError(
        f"trainer.num_train_steps: {num_train_steps} given, but it has no effect, because every phase sets its own number of"
        f" steps, {total} in all. Remove it, or set it to {total}. To train for another number of steps, change"
        f" {numbers}{preset}"
    )


def with_num_steps_of_data(
    config: RunConfig, batches: BatchPlan, tokenizer: Any, log: Callable[[str], None]
) -> RunConfig:
    """The configuration with `num_train_steps` computed from `epoch` or `data.stop_strategy`, if they are set."""
    check_num_steps(config)
    phases, sections = plan_phases(config)
    steps, start = {}, 0
    for phase, section in zip(phases, sections, strict=True):
        num_train_steps = config.phases[phase.index].num_train_steps if config.phases else None
        by_epoch = bool(config.epoch) and num_train_steps is None
        if by_epoch and not section.batching.has_examples_per_step:
            raise ConfigError(
                f"epoch: {config.epoch} given, but phase '{phase.name}' does not train on new examples in every step"
                f" (data.type: {choice_name(type(section))}). Remove epoch, and set trainer.num_train_steps"
            )
        if by_epoch or section.stop_strategy != "restart":
            seq_len = phase.model.seq_len
            data = main_first(functools.partial(section.open, tokenizer, seq_len, log, summarize=False))
            phase_batches = batches.of(phase).starting_at(start)
            num_steps = _of_epochs(config, data, phase_batches) if by_epoch else phase.num_steps
            steps[phase.index] = _until_exhausted(phase, num_steps, data, phase_batches, config.order_seed, log)
        start += steps.get(phase.index, phase.num_steps)
    if different := differences_between_processes({"trainer.num_train_steps": str(steps)}):
        raise ConfigError(
            f"computed from the data: {different[0]}. Delete data.cache_dir on all machines and start again"
        )
    return _with_steps(config, steps)


def _of_epochs(config: RunConfig, data: Data, batches: BatchSchedule) -> int:
    """The number of steps for `epoch` passes over the data. The next epoch fills up the last batch."""
    (sequences,) = data.trained_on(batches).values()
    num_steps = batches.steps_for(config.epoch * len(sequences))
    num_train_steps = config.trainer.num_train_steps
    if num_train_steps not in (TrainerConfig.num_train_steps, num_steps):
        raise ConfigError(
            f"epoch: {config.epoch} means {num_steps} steps ({len(sequences)} sequences of {sequences.seq_len} tokens,"
            f" {_sizes(batches)} per batch), but trainer.num_train_steps: {num_train_steps} is given. Remove"
            " one of them"
        )
    return num_steps


def epoch_of(phase: Phase, data: Data, batches: BatchSchedule) -> Callable[[int], int | None]:
    """A function from a step (counted from 0) to its pass over the phase's data; None if that has several sources, or if not
    every step reads new examples.

    Args:
        batches: of the phase, by step of the whole run.
    """
    phase_batches = batches.starting_at(phase.start)
    sequences = list(data.trained_on(phase_batches).values())
    if len(sequences) > 1 or not data.has_examples_per_step:
        return lambda step: None
    return lambda step: phase_batches.examples_before(step - phase.start) // len(sequences[0])


def _until_exhausted(
    phase: Phase, num_steps: int, data: Data, batches: BatchSchedule, seed: int, log: Callable[[str], None]
) -> int:
    num_examples = data.num_examples(batches, seed=seed)
    if num_examples is None or batches.whole_steps(num_examples) >= num_steps:
        return num_steps
    max_steps = batches.whole_steps(num_examples)
    if not max_steps:
        raise ConfigError(
            f"data.stop_strategy: {data.stop_strategy} ends after {num_examples} examples, which is less than one batch of"
            f" {batches.first.size}"
        )
    log(
        f"phase '{phase.name}': {max_steps} steps instead of {num_steps}, because the data is exhausted after them"
        f" (data.stop_strategy: {data.stop_strategy})"
    )
    return max_steps


def small_sources(data: Data, batch_size: int) -> list[str]:
    """A line for each training source that has fewer sequences than a batch."""
    return [
        f"the training data{f' of {name}' if name else ''} is {counted(len(examples), 'packed sequence')} of"
        f" {examples.seq_len} tokens, fewer than a batch of {batch_size}, so every step repeats them. Check data.train_urls"
        for name, examples in data.train.items()
        if len(examples) < batch_size
    ]


def _sizes(batches: BatchSchedule) -> str:
    return ", then ".join(str(stage.size) for stage in batches.stages)


def _with_steps(config: RunConfig, steps: dict[int, int]) -> RunConfig:
    if not config.phases:
        return replace(config, trainer=replace(config.trainer, num_train_steps=steps[0])) if steps else config
    phases = [
        replace(phase, num_train_steps=steps.get(index, phase.num_train_steps))
        for index, phase in enumerate(config.phases)
    ]
    return replace(config, phases=phases)


def describe_data(config: RunConfig, section: DataConfig) -> str:
    """Describes a phase's sources, their order and when the data ends, for the start-up table."""
    order = "reshuffled every epoch" if section.shuffle else "not shuffled"
    if isinstance(section.shuffle, EraShuffle):
        order = f"reshuffled every epoch within eras of {section.shuffle.era_length} packed sequences"
    parts = [order]
    if section.configs:
        weights = "proportional to size" if section.train_weights is None else str(section.train_weights)
        parts.insert(0, f"{', '.join(section.configs)} ({weights}, exact in blocks of {section.mixture_block_size})")
    if config.epoch:
        parts.append(counted(config.epoch, "epoch"))
    if section.stop_strategy != "restart":
        parts.append(f"until {section.stop_strategy.replace('_', ' ')}, or num_train_steps")
    return "; ".join(filter(None, [*parts, section.corpus.describe_begin()]))
