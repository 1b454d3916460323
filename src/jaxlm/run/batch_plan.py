"""The `trainer` section's batch keys, worked out for the devices that are there."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxlm.config.trainer import TrainerConfig
from jaxlm.core.batch_schedule import BatchSchedule, BatchSize, BatchStage
from jaxlm.core.errors import ConfigError

_KEY = "trainer.train_batch_size"


@dataclass(frozen=True)
class BatchPlan:
    """How large batches are, and how they are divided.

    Attributes:
        train: of training, by step.
        eval: sequences of an evaluation batch.
    """

    train: BatchSchedule
    eval: int


def batch_sizes(trainer: TrainerConfig) -> tuple[BatchSize, ...] | None:
    """What `train_batch_size` says, however it is written; None where devices decide it (-1).

    Raises:
        ConfigError: no sizes, or steps that do not begin at 0 and rise.
    """
    given = trainer.train_batch_size
    if given == -1:
        return None
    sizes = (BatchSize(0, given),) if isinstance(given, int) else tuple(given)
    for number, size in enumerate(sizes):
        if size.value < 1:
            where, allowed = (_KEY, "-1 or 1") if isinstance(given, int) else (f"{_KEY}.{number}.value", "1")
            raise ConfigError(f"{where}: {size.value} given, {allowed} and more expected")
    starts = [size.start for size in sizes]
    if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ConfigError(
            f"{_KEY}: stages at the steps {starts} given; the first at 0 and each later than the one before"
        )
    return sizes


def plan_batches(trainer: TrainerConfig, num_shards: int) -> BatchPlan:
    """Divides batches over `ways` devices and, where `per_device_parallelism` asks for it, over micro-batches.

    Raises:
        ConfigError: a size does not divide; says which would.
    """
    per_device = trainer.parallelism
    if per_device != -1 and per_device < 1:
        raise ConfigError(f"trainer.per_device_parallelism: {per_device} given, -1 or 1 and more expected")
    sizes = batch_sizes(trainer)
    if sizes is None:
        if per_device == -1:
            raise ConfigError(f"{_KEY}: -1 needs trainer.per_device_parallelism to be given")
        sizes = (BatchSize(0, per_device * num_shards),)
    for_eval = trainer.per_device_eval_parallelism
    if for_eval != -1 and for_eval < 1:
        raise ConfigError(f"trainer.per_device_eval_parallelism: {for_eval} given, -1 or 1 and more expected")
    train = BatchSchedule(tuple(_stage(trainer, size, num_shards, per_device) for size in sizes))
    # Of the first stage: what it is evaluated with must not change on the way.
    return BatchPlan(train, eval=train.first.microbatch if for_eval == -1 else for_eval * num_shards)


def unreached_stages(trainer: TrainerConfig, num_steps: int) -> list[str]:
    """A warning for each batch size that the run ends before."""
    return [
        f"{_KEY}: {size.value} from step {size.start} on is never reached: the run ends after {num_steps} steps"
        for size in batch_sizes(trainer) or ()
        if size.start >= num_steps
    ]


def describe_batches(batches: BatchSchedule, seq_len: int, num_steps: int) -> str:
    """The sizes, where they change, and what they come to, for people."""
    reached = batches.between(0, num_steps)
    parts = [
        f"{_from(stage, reached)}{stage.size} x {seq_len} = {stage.size * seq_len:,} tokens a step,"
        f" {stage.num_microbatches} micro-batches of {stage.microbatch}"
        for stage in reached
    ]
    if len(reached) > 1:
        examples = batches.examples_before(num_steps)
        parts.append(f"{examples:,} sequences, {examples * seq_len:,} tokens in all {num_steps} steps")
    return "; ".join(parts)


def _from(stage: BatchStage, reached: Sequence[BatchStage]) -> str:
    return f"from step {stage.start}: " if len(reached) > 1 else ""


def _stage(trainer: TrainerConfig, size: BatchSize, num_shards: int, per_device: int) -> BatchStage:
    if not trainer.allow_nondivisible_batch_size:
        _check_divides(trainer, size, num_shards, per_device)
    share = -(-size.value // num_shards) if per_device == -1 else per_device
    return BatchStage(size.start, size.value, -(-size.value // (share * num_shards)), share * num_shards)


def _check_divides(trainer: TrainerConfig, size: BatchSize, num_shards: int, per_device: int) -> None:
    of_stage = "" if isinstance(trainer.train_batch_size, int) else f" from step {size.start} on"
    if size.value % num_shards:
        raise ConfigError(
            f"{_KEY}: {size.value} sequences{of_stage} do not divide over the {num_shards} devices that share the batch"
            f" (replica x data). Nearest that do: {_multiples_near(size.value, num_shards)}. Or pad each batch with empty"
            " sequences: trainer.allow_nondivisible_batch_size true"
        )
    share = size.value // num_shards
    if per_device != -1 and share % per_device:
        divisors = [d for d in range(1, share + 1) if share % d == 0]
        raise ConfigError(
            f"trainer.per_device_parallelism: {per_device} does not divide the {share} sequences that each of the"
            f" {num_shards} devices gets of train_batch_size {size.value}{of_stage}. Allowed: {', '.join(map(str, divisors))}"
        )


def _multiples_near(size: int, num_shards: int) -> str:
    below = size // num_shards * num_shards
    return ", ".join(str(n) for n in (below, below + num_shards) if n > 0)
