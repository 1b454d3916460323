"""The batch keys of the `trainer` section, resolved for the available devices."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxlm.core.errors import ConfigError, counted, divisors
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.rules import Rules, excludes
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize, BatchStage
from jaxlm.engine.phases import Phase
from jaxlm.reading.decode import choice_name
from jaxlm.reading.effects import field, follows

_KEY = "trainer.train_batch_size"
ANOTHER_SIZE = follows("a step reads a different number of sequences from here")


@dataclass(frozen=True)
class BatchConfig:
    """The keys of `trainer` for the batch size, and how devices share a batch.

    Attributes:
        train_batch_size: global batch size: sequences per step over all devices. -1 uses `per_device_parallelism` times
            the number of devices that the batch is sharded over. A list changes the size during the run, by global step:
            `[{start: 0, value: 32}, {start: 1000, value: 64}]`. A phase may have its own.
        per_device_parallelism: sequences per device in one microbatch. -1 processes the device's whole share of the
            batch at once; a smaller value accumulates gradients over several microbatches.
        per_device_train_parallelism: alias of `per_device_parallelism`.
        max_per_device_parallelism: divide the device's share of the batch into the fewest equal microbatches of at most this
            many sequences, whatever the number of devices. Null does not limit it.
        allow_nondivisible_batch_size: pad a batch that does not divide evenly with empty sequences. They do not count
            toward the loss. A batch with fewer sequences than there are devices is always padded, with a warning.
        per_device_eval_parallelism: sequences per device in evaluation; -1 uses the training value.
    """

    train_batch_size: PositiveInt | Literal[-1] | list[BatchSize] = field(32, on_resume=ANOTHER_SIZE)
    per_device_parallelism: PositiveInt | Literal[-1] = field(-1, on_resume="rounding")
    per_device_train_parallelism: PositiveInt | Literal[-1] = field(-1, on_resume="rounding")
    max_per_device_parallelism: PositiveInt | None = field(None, on_resume="rounding")
    allow_nondivisible_batch_size: bool = field(False, on_resume="rounding")
    per_device_eval_parallelism: PositiveInt | Literal[-1] = field(-1, on_resume="evaluations")
    key_rules: ClassVar[Rules] = (
        excludes("max_per_device_parallelism", when="per_device_parallelism", why="which sets the size"),
        excludes("max_per_device_parallelism", when="per_device_train_parallelism", why="which sets the size"),
    )

    @property
    def parallelism(self) -> int:
        """Sequences per device in one training microbatch, from either of the two keys; -1 for all."""
        values = {self.per_device_parallelism, self.per_device_train_parallelism} - {-1}
        if len(values) > 1:
            raise ConfigError(
                f"trainer.per_device_parallelism: {self.per_device_parallelism} given, and per_device_train_parallelism:"
                f" {self.per_device_train_parallelism}. They are aliases; remove one"
            )
        return values.pop() if values else -1


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes of a run.

    Attributes:
        train: training batch size and its division into microbatches, by step of the whole run.
        eval: sequences per evaluation batch.
        of_phases: both for the phases that have their own, by number.
    """

    train: BatchSchedule
    eval: int
    of_phases: Mapping[int, "BatchPlan"] = field(default_factory=dict)

    @staticmethod
    def without_devices(trainer: BatchConfig, of_phases: Mapping[int, BatchConfig]) -> "BatchPlan | None":
        """The plan with each batch as one microbatch; None if the sizes depend on the devices. Args: as `plan_batches`."""
        sizes = batch_sizes(trainer)
        own = {number: BatchPlan.without_devices(keys, {}) for number, keys in of_phases.items()}
        if sizes is None or None in own.values():
            return None
        plans = {number: plan for number, plan in own.items() if plan is not None}
        return BatchPlan(BatchSchedule.of(sizes), sizes[0].value, plans)

    def of(self, phase: Phase) -> BatchSchedule:
        """The training batch sizes of a phase, by step of the whole run."""
        return self.of_phases[phase.index].train if phase.index in self.of_phases else self.train

    def eval_of(self, phase: Phase) -> int:
        """Sequences per evaluation batch in a phase."""
        return self.of_phases[phase.index].eval if phase.index in self.of_phases else self.eval


def batch_sizes(trainer: BatchConfig) -> tuple[BatchSize, ...] | None:
    """The stages of `train_batch_size`; None if it depends on the number of devices (-1)."""
    batch_size = trainer.train_batch_size
    if batch_size == -1:
        return None
    sizes = (BatchSize(0, batch_size),) if isinstance(batch_size, int) else tuple(batch_size)
    for number, size in enumerate(sizes):
        if size.value < 1:
            where, allowed = (_KEY, "-1 or 1") if isinstance(batch_size, int) else (f"{_KEY}.{number}.value", "1")
            raise ConfigError(f"{where}: {size.value} given, must be {allowed} or more")
    starts = [size.start for size in sizes]
    if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ConfigError(
            f"{_KEY}: stages starting at steps {starts} given, but the first must start at 0 and each must start later than"
            " the previous one"
        )
    return sizes


def plan_batches(
    trainer: BatchConfig, num_shards: int, of_phases: Mapping[int, BatchConfig] | None = None
) -> BatchPlan:
    """Divides batches over the `num_shards` devices that share a batch, and into microbatches (`per_device_parallelism`, or
    `max_per_device_parallelism`). Args: of_phases: the keys of the phases that have their own, by number.
    """
    own = {number: plan_batches(keys, num_shards) for number, keys in (of_phases or {}).items()}
    per_device = trainer.parallelism
    if per_device != -1 and per_device < 1:
        raise ConfigError(f"trainer.per_device_parallelism: {per_device} given, must be -1 or at least 1")
    sizes = batch_sizes(trainer)
    if sizes is None:
        if per_device == -1:
            raise ConfigError(
                f"{_KEY}: -1 given, which requires trainer.per_device_parallelism. Set it, or a batch size"
            )
        sizes = (BatchSize(0, per_device * num_shards),)
    for_eval = trainer.per_device_eval_parallelism
    if for_eval != -1 and for_eval < 1:
        raise ConfigError(f"trainer.per_device_eval_parallelism: {for_eval} given, must be -1 or at least 1")
    train = BatchSchedule(tuple(_stage(trainer, size, num_shards, per_device) for size in sizes))
    # From the first stage, because the evaluation batch must not change during the run.
    return BatchPlan(train, eval=train.first.microbatch if for_eval == -1 else for_eval * num_shards, of_phases=own)


def unreached_stages(trainer: BatchConfig, num_steps: int) -> list[str]:
    """A warning for each batch size stage that starts after the end of the run."""
    return [
        f"{_KEY}: the stage of {size.value} from step {size.start} is never reached: the run ends after {num_steps} steps"
        for size in batch_sizes(trainer) or ()
        if size.start >= num_steps
    ]


def small_batches(plan: BatchPlan, phases: Sequence[Phase], num_shards: int) -> list[str]:
    """A warning for each batch size that is smaller than the number of devices that share a batch."""
    return [
        f"{_KEY}: {stage.size} sequences are fewer than the {num_shards} devices that share the batch (replica x data), so"
        f" {num_shards - stage.size} of them get empty sequences and waste their time"
        for stage in dict.fromkeys(stage for phase in phases for stage in plan.of(phase).stages)
        if stage.size < num_shards
    ]


def describe_batches(plan: BatchPlan, phases: Sequence[Phase]) -> str:
    """Describes the batch sizes by step, and the total if they change."""
    reached = [
        (max(stage.start, phase.start), stage, phase.model.seq_len)
        for phase in phases
        for stage in plan.of(phase).between(phase.start, phase.end)
    ]
    same = lambda one, other: one[1:] == other[1:]  # noqa: E731
    reached = [one for number, one in enumerate(reached) if not number or not same(reached[number - 1], one)]
    start = "from step {}: " if len(reached) > 1 else ""
    parts = [
        f"{start.format(step)}{stage.size} x {seq_len} = {stage.size * seq_len:,} tokens per step,"
        f" {counted(stage.num_microbatches, 'microbatch')} of {stage.microbatch}"
        for step, stage, seq_len in reached
    ]
    if len(reached) > 1:
        examples = [plan.of(phase).examples_between(phase.start, phase.end) for phase in phases]
        tokens = sum(number * phase.model.seq_len for number, phase in zip(examples, phases, strict=True))
        parts.append(f"{sum(examples):,} sequences, {tokens:,} tokens in total over {phases[-1].end} steps")
    return "; ".join(parts)


def _stage(trainer: BatchConfig, size: BatchSize, num_shards: int, per_device: int) -> BatchStage:
    largest_share = -(-size.value // num_shards)
    if size.value < num_shards:
        per_device = 1  # the batch is padded, and more empty sequences would only cost time
    elif not trainer.allow_nondivisible_batch_size:
        _check_divides(trainer, size, num_shards, per_device)
    if per_device == -1:
        is_padded, may_pad = bool(size.value % num_shards), trainer.allow_nondivisible_batch_size
        per_device = _microbatch(largest_share, trainer.max_per_device_parallelism, padded=is_padded, may_pad=may_pad)
    return BatchStage(size.start, size.value, -(-size.value // (per_device * num_shards)), per_device * num_shards)


def _microbatch(share: int, limit: int | None, *, padded: bool, may_pad: bool) -> int:
    """Sequences per device in a microbatch: at most `limit`, in as few microbatches as possible.

    They divide a device's share evenly, unless the batch is `padded` with empty sequences anyway, or may be and would take
    more than twice as many microbatches otherwise.
    """
    fewest = 1 if limit is None else -(-share // limit)
    even = next(number for number in range(fewest, share + 1) if share % number == 0)
    if padded or (may_pad and even > 2 * fewest):
        return -(-share // fewest)
    return share // even


def _check_divides(trainer: BatchConfig, size: BatchSize, num_shards: int, per_device: int) -> None:
    stage = "" if isinstance(trainer.train_batch_size, int) else f" from step {size.start}"
    if size.value % num_shards:
        below = size.value // num_shards * num_shards
        raise ConfigError(
            f"{_KEY}: {size.value} sequences{stage} do not divide evenly over the {num_shards} devices that share the batch"
            f" (replica x data). Nearest valid sizes: {below}, {below + num_shards}. Or set"
            " trainer.allow_nondivisible_batch_size: true to pad each batch with empty sequences"
        )
    share = size.value // num_shards
    if per_device != -1 and share % per_device:
        raise ConfigError(
            f"trainer.per_device_parallelism: {per_device} does not divide the {share} sequences per device"
            f" (train_batch_size {size.value}{stage} over {num_shards} devices). Allowed: {', '.join(divisors(share))}"
        )


def check_microbatches(phase: Phase, earliest_start: int, batches: BatchSchedule, num_shards: int) -> None:
    """Raises `ConfigError` if the phase's objective compares examples that are in different microbatches, or microbatches do
    not divide into equal shares for its blocks. Args: earliest_start: see `earliest_starts`."""
    facts, stages = phase.objective.facts, batches.between(earliest_start, phase.end)
    num_blocks = facts.num_shares
    planned = batches.between(phase.start, phase.end)
    early = lambda stage: "" if stage in planned else ", which it reads if an earlier phase ends early,"  # noqa: E731
    split = [stage for stage in stages if stage.num_microbatches > 1]
    if split and facts.compares_examples:
        raise ConfigError(
            f"phase '{phase.name}': objective: with these keys, the loss compares all examples of a batch with each other,"
            f" but a batch of {split[0].size}{early(split[0])} is split into {split[0].num_microbatches} microbatches of"
            f" {split[0].microbatch}. Set trainer.per_device_parallelism: -1 and remove max_per_device_parallelism, or lower"
            " trainer.train_batch_size"
        )
    uneven = [one for one in stages if one.microbatch % (num_blocks * num_shards) or one.size % one.microbatch]
    if num_blocks > 1 and uneven:
        raise ConfigError(
            f"phase '{phase.name}': objective.type: {choice_name(type(phase.objective))} trains {num_blocks} blocks of layers"
            f" on equal shares of each device's sequences, but a batch of {uneven[0].size} sequences{early(uneven[0])} comes"
            f" in microbatches of {uneven[0].microbatch} on {num_shards} devices. Set trainer.train_batch_size to a multiple"
            f" of {num_blocks * num_shards}, and trainer.per_device_parallelism to one of {num_blocks} (-1: no microbatches)"
        )
