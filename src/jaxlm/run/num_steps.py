"""How many steps a run's data lasts, where that decides how long it trains."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxlm.config.run import RunConfig
from jaxlm.config.trainer import TrainerConfig
from jaxlm.core.batch_schedule import BatchSchedule
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first, same_on_all_processes
from jaxlm.data.config import DataConfig
from jaxlm.data.shuffle import EraShuffle
from jaxlm.data.tokens import TokenData
from jaxlm.engine.phases import Phase
from jaxlm.run.plan import plan_phases


def check_num_steps(config: RunConfig) -> None:
    """Looks for what can be said without the data.

    Raises:
        ConfigError: mixtures that cannot be, `epoch` below 0, or where it cannot have an effect.
    """
    for data in plan_phases(config)[1]:
        data.check_mixture()
    if config.epoch < 0:
        raise ConfigError(f"epoch: {config.epoch} given; 0, or a number of passes over the data, expected")
    if not config.epoch:
        return
    if config.phases and all(phase.num_train_steps is not None for phase in config.phases):
        raise ConfigError(
            "epoch: has no effect, because every phase has num_train_steps of its own. Leave one of them out"
        )
    for phase, data in zip(*plan_phases(config), strict=True):
        if len(data.train_source_names()) > 1:
            raise ConfigError(
                f"epoch: {config.epoch} given, but phase '{phase.name}' trains on several sources, each as long as it is."
                " Leave epoch out and choose data.stop_strategy (first_exhausted or all_exhausted)"
            )


def with_num_steps_of_data(
    config: RunConfig, batches: BatchSchedule, tokenizer: Any, log: Callable[[str], None]
) -> RunConfig:
    """The configuration with the `num_train_steps` that `epoch` or `data.stop_strategy` come to, where they are set.

    Raises:
        ConfigError: `num_train_steps` says something else than `epoch`, the data does not fill one batch, or is not as long
            for all processes.
    """
    check_num_steps(config)
    phases, sections = plan_phases(config)
    steps, start = {}, 0
    for phase, section in zip(phases, sections, strict=True):
        own = config.phases[phase.index].num_train_steps if config.phases else None
        by_epoch = bool(config.epoch) and own is None
        if by_epoch or section.stop_strategy != "restart":
            data = main_first(lambda section=section: section.open(tokenizer, config.model.seq_len, log))
            own_batches = batches.counted_from(start)
            num_steps = _of_epochs(config, data, own_batches) if by_epoch else phase.num_steps
            steps[phase.index] = _until_exhausted(phase, num_steps, data, own_batches, config.trainer.seed, log)
        start += steps.get(phase.index, phase.num_steps)
    if not same_on_all_processes(str(steps)):
        raise ConfigError(
            f"trainer.num_train_steps: by the data it is {', '.join(map(str, steps.values()))} here, and something else on"
            " another process. Remove data.cache_dir on all machines, and start again"
        )
    return _with_steps(config, steps)


def _of_epochs(config: RunConfig, data: TokenData, batches: BatchSchedule) -> int:
    """The steps in which every window is seen `epoch` times; what the last batch lacks is taken from one epoch more."""
    (windows,) = data.train.values()
    num_steps = batches.steps_for(config.epoch * len(windows))
    given = config.trainer.num_train_steps
    if given not in (TrainerConfig.num_train_steps, num_steps):
        raise ConfigError(
            f"epoch: {config.epoch} means {num_steps} steps ({len(windows)} windows of {windows.seq_len} tokens,"
            f" {_sizes(batches)} a batch), but trainer.num_train_steps: {given} is given. Leave one of them out"
        )
    return num_steps


def _until_exhausted(
    phase: Phase, num_steps: int, data: TokenData, batches: BatchSchedule, seed: int, log: Callable[[str], None]
) -> int:
    most = data.num_examples(batches, seed=seed)
    if most is None or batches.whole_steps(most) >= num_steps:
        return num_steps
    enough_for = batches.whole_steps(most)
    if not enough_for:
        raise ConfigError(
            f"data.stop_strategy: {data.stop_strategy} ends after {most} examples, less than one batch of"
            f" {batches.first.size}"
        )
    log(
        f"phase '{phase.name}': {enough_for} steps instead of {num_steps}: then the data is read"
        f" (data.stop_strategy: {data.stop_strategy})"
    )
    return enough_for


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
    """What a phase reads, in which order, and when it ends; for the start-up table."""
    order = "a new order of the windows in each epoch" if section.shuffle else "the windows as they stand"
    if isinstance(section.shuffle, EraShuffle):
        order = f"a new order in each epoch, within stretches of {section.shuffle.era_length} windows"
    parts = [order]
    if section.configs:
        weights = "as large as they are" if section.train_weights is None else str(section.train_weights)
        parts.insert(0, f"{', '.join(section.configs)} ({weights}, exact in blocks of {section.mixture_block_size})")
    if config.epoch:
        parts.append(f"{config.epoch} epoch(s): as many steps as that takes")
    if section.stop_strategy != "restart":
        parts.append(f"until {section.stop_strategy.replace('_', ' ')}, or num_train_steps")
    return "; ".join(parts)
