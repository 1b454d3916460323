"""Responses that the model samples while it trains (`type: rollouts`): the data section and its batches."""

import contextlib
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Interval
from haliax import Axis

from jaxlm.core.axes import GROUP, POSITION, REWARD
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import (
    LARGEST_INT,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Seconds,
)
from jaxlm.core.rules import Rules, only
from jaxlm.core.runtime import main_only
from jaxlm.core.values.batch_types import GroupBatch
from jaxlm.data.base import Batches
from jaxlm.data.batch import BatchSpec, Column, Columns, SampledRows, random_tokens, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.completions import PromptsFormat
from jaxlm.data.loader import BatchContext, Batching, BatchMaker, BatchReader, leading_axes
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.models.inference.sampling import Sampling
from jaxlm.reading.choices import choice
from jaxlm.reading.effects import field
from jaxlm.systems.rl.curricula import CurriculumConfig, CurriculumContext
from jaxlm.systems.rl.environments import EnvironmentConfig, opened_environment
from jaxlm.systems.rl.maker import EARNED, Conversations, RolloutMaker, RolloutOptions, dialect_of
from jaxlm.systems.rl.prompts import PromptRecords, Prompts, check_first_records, prompt_values
from jaxlm.systems.rl.rewards.base import RewardConfig, RewardContext, Rewards, reward_names
from jaxlm.systems.rl.rollout import Rollout
from jaxlm.systems.rl.samplers import LocalSamplerConfig, SamplerConfig, SamplerContext


class RolloutBatches(Batches):
    """Batches of groups of responses. A rollout is sampled before the first of the steps that train on it."""

    def __init__(self, reader: BatchReader, context: BatchContext, maker: RolloutMaker):
        self._reader, self._maker, self._log = reader, maker, context.services.log
        self._step = context.first_step
        self._consumed = 0
        self._skipped = 0
        self._rollout: Rollout | None = None
        self._metrics: Mapping[str, float] = {}

    def due(self, step: int) -> bool:
        return self._rollout is None or not self._rollout.first_step <= step < self._rollout.end

    def refresh(self, model: Any, step: int) -> None:
        assert step == self._step, "the run and its batches are at the same step"
        end, num_minibatches = self._steps_from(step)
        num_groups = num_minibatches * self._reader.batches.at(step).size
        groups, consumed, metrics = self._maker.make(model, step, self._consumed, num_groups)
        sampled = (groups.examples, groups.samples, groups.scores)
        self._rollout = Rollout.of((step, end), num_minibatches, *sampled, metrics)
        self._consumed = consumed

    def __next__(self) -> Any:
        step, rollout, reader = self._step, self._rollout, self._reader
        assert rollout is not None, "refresh comes first"
        assert not self.due(step), "refresh comes first"
        stage, numbers, seq_len = (
            reader.batches.at(step),
            rollout.groups_of(step),
            reader.mixture.examples_of(0).seq_len,
        )

        def read(rows: np.ndarray) -> Columns:
            """The columns of some rows. Rows past the batch size are padding: zeros."""
            groups = numbers[np.minimum(rows, stage.size - 1)]
            columns = rollout.columns(groups, self._maker.prompts(rollout.examples[groups]), seq_len)
            for column in columns.values():
                column[rows >= stage.size] = 0
            return columns

        batch = reader.spec.assemble(read, leading_axes(stage), reader.layout)
        self._step += 1
        self._metrics = rollout.metrics
        return batch

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def read_ahead(self) -> None:
        return

    def state(self) -> dict[str, Any]:
        """{"examples": number of prompts consumed, "step": step of the next batch}, and what a curriculum has learned.

        Between two updates of one rollout, also the `rollout`: it cannot be sampled again, because the weights that have
        sampled it are gone. `skipped` is how many prompts were left out; absent if none were.
        """
        skipped = {"skipped": self._skipped} if self._skipped else {}
        held: dict[str, Any] = {}
        if self._rollout is not None and not self.due(self._step):
            held = {"rollout": self._rollout.state(), "prompts": self._checksum(self._rollout)}
        curriculum = self._maker.order.curriculum
        learned = {} if curriculum is None else {"curriculum": curriculum.state()}
        return {"examples": self._consumed, "step": self._step, **skipped, **learned, **held}

    def restore(self, state: dict[str, Any]) -> None:
        self._consumed, self._step = int(state["examples"]), int(state.get("step", self._step))
        self._skipped = int(state.get("skipped", 0))
        if self._maker.order.curriculum is not None:
            self._maker.order.curriculum.restore(state.get("curriculum", {}))
        if "rollout" not in state:
            self._rollout = None
            return
        self._rollout = Rollout.restored(state["rollout"]) if Rollout.is_whole(state["rollout"]) else None
        if self._rollout is None or not self._still_fits(self._rollout, state["prompts"]):
            self._log(
                "the rollout in the checkpoint has groups or batches of another size, or other prompts, so a new one is"
                " sampled"
            )
            self._rollout = None

    def skip(self, num_steps: int) -> None:
        prompts = self._reader.batches.examples_between(self._step, self._step + num_steps)
        self._consumed += prompts
        self._skipped += prompts
        self._rollout = None

    def records(self, step: int) -> str:
        rollout = self._rollout
        if rollout is None or not rollout.first_step <= step < rollout.end:
            return "prompts of an earlier rollout"
        return self._maker.describe(rollout.examples[rollout.groups_of(step)])

    def close(self) -> None:
        self._maker.close()

    def _steps_from(self, step: int) -> tuple[int, int]:
        """The end of the rollout that begins with a step, and its number of mini-batches, which have the same size."""
        batches, options = self._reader.batches, self._maker.options
        end = step + 1
        while end < step + options.updates_per_rollout and batches.at(end).size == batches.at(step).size:
            end += 1
        return end, min(options.minibatches_per_rollout, end - step)

    def _still_fits(self, rollout: Rollout, checksum: int) -> bool:
        """Tells whether the configuration still gives the steps of a rollout these groups and rewards, and its examples
        these prompts."""
        options = self._maker.options
        size = self._reader.batches.at(self._step).size * rollout.num_minibatches
        has_shape = rollout.reward_parts.shape == (size, options.group_size, len(options.reward_names))
        return has_shape and self._checksum(rollout) == checksum

    def _checksum(self, rollout: Rollout) -> int:
        return zlib.crc32(b"".join(prompt.tobytes() for prompt in self._maker.prompts(rollout.examples)))


@choice(DataConfig, "rollouts")
class RolloutsConfig(DataConfig):
    """Prompts that the model answers while it trains, several times each, and rewards for the answers.
    `trainer.train_batch_size` counts prompts. A prompt and `max_new_tokens` must fit into `model.seq_len`.

    Attributes:
        group_size: responses to each prompt.
        max_new_tokens: the most tokens of a response. It ends earlier at the tokenizer's EOS token.
        temperature: the logits are divided by it, when responses are sampled and in the objective.
        top_k, top_p, min_p: sample only from the `top_k` most likely tokens; then from the most likely ones whose
            probabilities add up to `top_p`; then from those with at least `min_p` times the probability of the most likely
            one. Null samples from all. The probabilities of the distribution that was sampled are recorded. The objective
            compares those of the whole distribution with them, so it must have `old_policy: rollout`, or `old_policy: model`
            with `importance_sampling`.
        repetition_penalty: divides the logits of tokens that prompt and response have so far, and multiplies negative ones,
            before the temperature; 1 changes none. Recorded and corrected like `top_p`.
        updates_per_rollout: number of steps that train on a rollout before the next one is sampled.
        minibatches_per_rollout: number of batches that a rollout consists of. With as many as `updates_per_rollout`, each
            response is trained on once; with 1, as often as there are updates.
        rewards: what the responses are worth: the weighted sum of these. May be empty if the environment gives rewards.
        reward_timeout_s: seconds that each reward may take for a rollout. After that, the run ends with an error.
        dynamic_sampling: maximum number of times per rollout to sample further prompts in place of groups whose rewards are
            all equal, which have no gradient (DAPO). 0 trains on the groups as they are.
        curriculum: for which prompts, when it is their turn, responses are sampled; null samples for all.
        environment: what answers the response, after which the policy writes on: several turns are one response, whose tokens
            count only where the policy wrote them. Null lets it write once. The environment's reward is added to the others.
        max_turns: the most turns of the policy in an environment.
        long_prompts: `refuse` to train if a prompt is too long, or `leave_out` such prompts.
        sampler: what samples the responses.
    """

    key_rules: ClassVar[Rules] = (only("max_turns", when="environment"),)
    expects: ClassVar[str] = "prompts"

    format: FormatConfig = field(default_factory=PromptsFormat)
    group_size: Annotated[int, Interval(ge=2, le=LARGEST_INT)] = field(8, on_resume="updates")
    max_new_tokens: PositiveInt = field(256, on_resume="updates")
    temperature: Annotated[float, Interval(ge=0.001, le=LARGEST_INT)] = field(1.0, on_resume="updates")
    top_k: PositiveInt | None = field(None, on_resume="updates")
    top_p: PositiveFraction | None = field(None, on_resume="updates")
    min_p: Fraction | None = field(None, on_resume="updates")
    repetition_penalty: PositiveFloat = field(1.0, on_resume="updates")
    updates_per_rollout: PositiveInt = field(1, on_resume="updates")
    minibatches_per_rollout: PositiveInt = field(1, on_resume="updates")
    rewards: list[RewardConfig] = field(default_factory=list, on_resume="updates")
    reward_timeout_s: Seconds = field(600.0, on_resume="harmless")
    dynamic_sampling: NonNegativeInt = field(0, on_resume="updates")
    curriculum: CurriculumConfig | None = field(None, on_resume="updates")
    environment: EnvironmentConfig | None = field(None, on_resume="updates")
    max_turns: PositiveInt = field(4, on_resume="updates")
    long_prompts: Literal["refuse", "leave_out"] = field("refuse", on_resume="order")
    sampler: SamplerConfig = field(default_factory=LocalSamplerConfig, on_resume="rounding")

    def batch_spec(self, seq_len: int) -> BatchSpec[GroupBatch]:
        Group, Position = Axis(GROUP, self.group_size), Axis(POSITION, seq_len)
        columns = {
            "rewards": Column(np.float32, (Group,)),
            "reward_parts": Column(np.float32, (Group, Axis(REWARD, len(self._reward_names)))),
            "finished": Column(np.float32, (Group,)),
            "sampler_logps": Column(np.float32, (Group, Position)),
            **token_columns(Group, Position),
        }
        of_sampler: Any = {"temperature": float(self.temperature), "samples_all": not self._sampling.changed}
        of_sampler["reward_weights"] = (
            *(one.weight for one in self.rewards),
            *([1.0] * (self.environment is not None)),
        )
        make = functools.partial(GroupBatch.of, **of_sampler)
        return BatchSpec(make, columns, self._sampled(seq_len))

    @property
    def _sampling(self) -> Sampling:
        return Sampling(float(self.temperature), self.top_k, self.top_p, self.min_p, float(self.repetition_penalty))

    def _sampled(self, seq_len: int) -> SampledRows | None:
        """Describes what the devices that train sample; None if a server does."""
        if not self.sampler.rows_at_once(self.group_size):
            return None
        return SampledRows(
            group_size=self.group_size,
            num_batches=self.minibatches_per_rollout,
            num_steps=self.updates_per_rollout,
            prompt_tokens=seq_len - self.max_new_tokens,
            new_tokens=self.max_new_tokens,
            rows_at_once=self.sampler.rows_at_once,
            sampling=self._sampling,
        )

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> Prompts:
        del record_format
        return Prompts(cache, seq_len, self.max_new_tokens, leave_out_long=self.long_prompts == "leave_out")

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        shape, generator = (num_examples, self.group_size), np.random.default_rng(seed)
        rewards = generator.integers(0, 2, shape).astype(np.float32)
        logps = -generator.exponential(np.log(vocab_size), (*shape, seq_len)).astype(np.float32)
        parts = np.repeat(rewards[..., None], len(self._reward_names), axis=-1)
        of_responses = {"rewards": rewards, "reward_parts": parts, "finished": np.ones_like(rewards)}
        return {**of_responses, "sampler_logps": logps, **random_tokens((*shape, seq_len), vocab_size, seed)}

    @property
    def batching(self) -> Batching:
        return Batching(self._maker, self._has_examples_per_step)

    @property
    def _has_examples_per_step(self) -> bool:
        is_once = self.updates_per_rollout == self.minibatches_per_rollout
        return is_once and not self.dynamic_sampling and self.curriculum is None

    def check_keys(self) -> None:
        if self.updates_per_rollout % self.minibatches_per_rollout:
            raise ConfigError(
                f"data.updates_per_rollout: {self.updates_per_rollout} given, a multiple of minibatches_per_rollout"
                f" ({self.minibatches_per_rollout}) expected, so that all mini-batches are trained on equally often"
            )
        if not self.rewards and (self.environment is None or not self.environment.gives_rewards):
            without = "" if self.environment is None else ", and the environment gives no rewards either"
            raise ConfigError(
                f"data.rewards: empty{without}. Give at least one, such as {{type: function, function: my_rewards:score}}"
            )
        if self.environment is not None and EARNED in reward_names(self.rewards):
            raise ConfigError(
                f"data.rewards: the name '{EARNED}' is that of the environment's reward. Set another `name`"
            )
        reward_names(self.rewards)
        if self.has_validation:
            where = "".join(dict.fromkeys(source.config.by_default for source in self.corpus.sources))
            raise ConfigError(
                f"data: validation data given{where}, but data.type: rollouts has none: there are no responses to evaluate."
                " Remove validation_urls, num_validation_files and num_validation_sequences, and set validation_split to null"
            )
        if isinstance(self.train_weights, list) and len(self.train_weights) > 1 and not self._has_examples_per_step:
            raise ConfigError(
                "data.train_weights: several stages given, but not every step trains on as many new prompts"
                " (updates_per_rollout, dynamic_sampling, curriculum), so no stage begins at a step. Give the weights of one"
                " stage"
            )
        if self.stop_strategy != "restart" and not self._has_examples_per_step:
            raise ConfigError(
                f"data.stop_strategy: {self.stop_strategy} given, but not every step trains on as many new prompts"
                " (updates_per_rollout, dynamic_sampling, curriculum). Remove it, and set trainer.num_train_steps"
            )

    def check(self) -> None:
        super().check()
        self._check_parts()

    def _check_parts(self) -> None:
        for part in (self.sampler, *self.rewards, self.environment, self.curriculum):
            if part is not None:
                part.check()

    def check_opens(self, tokenizer: Callable[[], Tokenizer], *, dry: bool) -> None:
        self._check_parts()
        self.sampler.check_opens(self._sampling, dry=dry)
        self.sampler.check_tokens(tokenizer(), dry=dry)
        if self.environment is not None:
            dialect_of(self.environment, tokenizer())
            opened_environment(self.environment)
        # Prompts that are left out need no number, and which they are is known once they are tokenized.
        numbers = () if self.curriculum is None or self.long_prompts == "leave_out" else self.curriculum.columns
        with self._open_rewards(tokenizer(), tokenizer().stop_ids, dry=dry) as rewards:
            check_first_records(self.corpus.train_sources, rewards, numbers)

    def _open_rewards(self, tokenizer: Tokenizer, stop_ids: tuple[int, ...], *, dry: bool = False) -> Rewards:
        context = RewardContext(tokenizer.decode, self.max_new_tokens, stop_ids, dry)
        return Rewards(self.rewards, context, timeout_s=self.reward_timeout_s)

    def _maker(self, tokenizer: Tokenizer) -> BatchMaker:
        def make(reader: BatchReader, context: BatchContext) -> Batches:
            run, environment = context.services, self.environment
            stop_ids = run.stop_ids or tokenizer.stop_ids
            functions, compiled = (run.log, run.progress, run.export), (run.xla_options, run.block_sizes)
            services = SamplerContext(reader.layout, run.precision, *functions, tokenizer.vocab_size, *compiled)
            records = {source.name: PromptRecords(source, run.log) for source in self.corpus.train_sources}

            def values(column: str) -> list[np.ndarray]:
                sources = enumerate(reader.mixture.names)
                return [prompt_values(reader.mixture.examples_of(n), records[name], column) for n, name in sources]

            # Before the processes of the rewards start, because it may refuse the records.
            curriculum = self.curriculum and self.curriculum.open(
                CurriculumContext(context.seed, context.start, reader.mixture.names, values)
            )
            with contextlib.ExitStack() as on_error:
                sampler = on_error.enter_context(contextlib.closing(self.sampler.open(services)))
                rewards = main_only(
                    lambda: on_error.enter_context(contextlib.closing(self._open_rewards(tokenizer, stop_ids)))
                )
                maker = RolloutMaker(
                    reader.mixture,
                    self._options(context.seed, stop_ids),
                    sampler,
                    rewards,
                    records,
                    tokenizer.decode,
                    run.log_rollout,
                    environment and Conversations(environment, self.max_turns, sampler, tokenizer),
                    curriculum,
                )
                on_error.pop_all()  # from here on, the batches close them
            return RolloutBatches(reader, context, maker)

        return make

    @property
    def _reward_names(self) -> tuple[str, ...]:
        return (*reward_names(self.rewards), *([] if self.environment is None else [EARNED]))

    def _options(self, seed: int, stop_ids: tuple[int, ...]) -> RolloutOptions:
        return RolloutOptions(
            seed=seed,
            group_size=self.group_size,
            max_new_tokens=self.max_new_tokens,
            sampling=self._sampling,
            updates_per_rollout=self.updates_per_rollout,
            minibatches_per_rollout=self.minibatches_per_rollout,
            dynamic_sampling=self.dynamic_sampling,
            stop_ids=stop_ids,
            reward_names=self._reward_names,
        )
