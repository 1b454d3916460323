"""Makes rollouts: prompts -> samples (all processes) -> rewards (process 0), with turns of an environment between them.

The samples depend on the weights, the seed, the step and the number of each row, not on devices, processes or microbatches.
"""

import bisect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import is_float32
from jaxlm.core.runtime import broadcast_from_main, from_main, main_only
from jaxlm.core.values.logged import TOTAL, ScoredRows
from jaxlm.data.examples import Examples
from jaxlm.data.loader import LogRollout
from jaxlm.data.mixture import Mixture
from jaxlm.data.sources.record_files import Record
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.models.inference.sampling import Sampling
from jaxlm.systems.rl.curricula import Curriculum, PromptOrder
from jaxlm.systems.rl.environments import ConversationLimits, Dialect, EnvironmentConfig, Prompt, converse
from jaxlm.systems.rl.prompts import PromptRecords, document_numbers, prompt_tokens
from jaxlm.systems.rl.rewards.base import Rewards
from jaxlm.systems.rl.samplers import Sample, Sampler, SamplingRequest

T = TypeVar("T")

EARNED = "environment"
"""The name of the environment's reward, which is added to the others."""


def dialect_of(config: EnvironmentConfig, tokenizer: Tokenizer) -> Dialect:
    """Determines how conversations become tokens. Raises `ConfigError` if the tokenizer lacks the environment's tokens."""
    decode = lambda ids: tokenizer.decode(ids, special=True)  # noqa: E731
    dialect = Dialect(tokenizer.encode, decode, tokenizer.vocabulary())
    dialect.special_ids((*config.turn_ends, *config.observation_start, *config.observation_end))
    return dialect


class Conversations:
    """Has the policy and an environment take turns. All processes lead the same conversations."""

    def __init__(self, config: EnvironmentConfig, max_turns: int, sampler: Sampler, tokenizer: Tokenizer):
        self._config, self._max_turns, self._sampler = config, max_turns, sampler
        self._dialect = dialect_of(config, tokenizer)
        # Of process 0, whose environment speaks: another process may have another version of its module.
        self._turn_ends = tuple(from_main(lambda: list(self._dialect.special_ids(config.turn_ends))))

    def of(self, model: Any, prompts: Sequence[Prompt], request: SamplingRequest) -> list[Sample]:
        """One conversation for each prompt. Args: request: of the first turn."""

        def turns(so_far: list[list[int]], rows: list[int], turn: int, most: int) -> Sequence[Sample]:
            stops = tuple(dict.fromkeys((*request.stop_ids, *self._turn_ends)))
            numbers = [request.rows[row] for row in rows]
            turn_request = replace(request, rows=numbers, turn=turn, stop_ids=stops, num_rows=len(prompts), room=most)
            return self._sampler.sample(model, so_far, turn_request)

        limits = ConversationLimits(self._max_turns, request.max_new_tokens)
        return converse(turns, self._config, prompts, self._dialect, limits)


@dataclass(frozen=True)
class RolloutOptions:
    """Sets how responses are sampled and trained on; see `RolloutsConfig`.

    Attributes:
        seed: of the run.
        stop_ids: tokens that end a response.
        reward_names: the names of the rewards, in the order of the configuration, and that of the environment's.
    """

    seed: int
    group_size: int
    max_new_tokens: int
    sampling: Sampling
    updates_per_rollout: int
    minibatches_per_rollout: int
    dynamic_sampling: int
    stop_ids: tuple[int, ...]
    reward_names: tuple[str, ...]


@dataclass(frozen=True)
class Groups:
    """Sampled groups.

    Attributes:
        examples: int64 [groups], number of each group's prompt among the training examples.
        samples: group after group.
        scores: float64 [rewards + 1, groups, group], each reward, NaN where it does not apply, and the weighted sum.
    """

    examples: np.ndarray
    samples: list[Sample]
    scores: np.ndarray

    @property
    def rewards(self) -> np.ndarray:
        """The weighted sums, float64 [groups, group]."""
        return self.scores[-1]

    @property
    def have_equal_rewards(self) -> np.ndarray:
        """bool [groups]: whether nothing can be learned from a group, because all its advantages are 0."""
        return self.rewards.max(axis=1) == self.rewards.min(axis=1)

    def pick(self, numbers: np.ndarray) -> "Groups":
        """Some of the groups."""
        size = self.rewards.shape[1]
        samples = [self.samples[number * size + i] for number in numbers.tolist() for i in range(size)]
        return Groups(self.examples[numbers], samples, self.scores[:, numbers])

    def joined(self, other: "Groups") -> "Groups":
        """These groups, and then others."""
        examples = np.concatenate([self.examples, other.examples])
        return Groups(examples, self.samples + other.samples, np.concatenate([self.scores, other.scores], axis=1))


class Made(NamedTuple):
    """The groups to train on, the number of the next prompt in the order of training, and what is logged of it."""

    groups: Groups
    next_prompt: int
    metrics: dict[str, float]


class RolloutMaker:
    """Samples groups of responses to the training prompts, and has them rewarded."""

    def __init__(
        self,
        mixture: Mixture,
        options: RolloutOptions,
        sampler: Sampler,
        rewards: Rewards | None,
        records: Mapping[str, PromptRecords],
        decode: Callable[[Sequence[int]], str],
        log_rollout: LogRollout,
        conversations: Conversations | None = None,
        curriculum: Curriculum | None = None,
    ):
        """Args:
        mixture: the prompts, in the order of training.
        rewards: on process 0; None on the others.
        records: source name -> the records of its prompts. Only process 0 reads them, or all for a curriculum.
        decode: token ids to text, without special tokens.
        conversations: with an environment; None lets the policy write once.
        curriculum: which of the prompts are sampled for; None samples for all.
        """
        self.options = options
        self._mixture, self._sampler, self._rewards = mixture, sampler, rewards
        self._records, self._decode = records, decode
        self._log_rollout, self._conversations = log_rollout, conversations
        self.order = PromptOrder(mixture, curriculum)
        self._columns: list[str] = []
        if rewards is not None:
            self._columns = sorted({key for source in records.values() for key in source.columns})
            rewards.check_columns(self._columns)

    def make(self, model: Any, step: int, first: int, num_groups: int) -> Made:
        """The groups that a step begins to train on. All processes must call this.

        With `dynamic_sampling`, groups of further prompts replace those of equal rewards. Each round samples for as many
        prompts, so that all run the same program; what is left over is dropped. If the rounds do not suffice, the first
        groups of equal rewards fill the rest.

        Source: dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2).

        Args:
            first: number of the next prompt among the training examples.
        """
        seconds = {"sample": 0.0, "score": 0.0}
        examples, after = self.order.take(first, num_groups, step)
        groups = self._round(model, step, examples, 0, seconds)
        for number in range(1, self.options.dynamic_sampling + 1):
            if (~groups.have_equal_rewards).sum() >= num_groups:
                break
            examples, after = self.order.take(after, num_groups, step)
            groups = groups.joined(self._round(model, step, examples, number, seconds))
        are_equal = groups.have_equal_rewards
        chosen = groups.pick(np.sort(np.argsort(are_equal, kind="stable")[:num_groups]))
        metrics = self._metrics(chosen) | {f"rollout/{name}_seconds": spent for name, spent in seconds.items()}
        if self.options.dynamic_sampling:
            metrics["dynamic_sampling/num_prompts"] = float(len(are_equal))
            metrics["dynamic_sampling/frac_equal"] = float(are_equal.mean())
        main_only(lambda: self._log(step, chosen))
        self.order.learn(groups.examples, groups.rewards)  # last: if something fails before, no state has changed
        metrics |= self.order.metrics(step, after - first - len(are_equal))
        return Made(chosen, after, {f"train/{name}": value for name, value in metrics.items()})

    def prompts(self, examples: np.ndarray) -> list[np.ndarray]:
        """The tokens of the prompts of some training examples."""
        return self._of_sources(examples, lambda name, prompts, indices: prompt_tokens(prompts, indices))

    def describe(self, examples: np.ndarray) -> str:
        """Says where the prompts of some training examples are, for messages."""
        return self._mixture.describe(examples)

    def close(self) -> None:
        """Releases what the sampler and the rewards hold."""
        self._sampler.close()
        if self._rewards is not None:
            self._rewards.close()

    def _round(self, model: Any, step: int, examples: np.ndarray, number: int, seconds: dict[str, float]) -> Groups:
        """Samples for some prompts. Args: number: of the round; rows go on from the round before."""
        options, prompts, started = self.options, self.prompts(examples), time.perf_counter()
        repeated = [prompt.tolist() for prompt in prompts for _ in range(options.group_size)]
        request = SamplingRequest(
            step=step,
            seed=options.seed,
            rows=range(number * len(repeated), (number + 1) * len(repeated)),
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            stop_ids=options.stop_ids,
        )
        samples = self._answers(model, examples, repeated, request)
        sampled = time.perf_counter()
        scores = self._scores(examples, prompts, samples)
        seconds["sample"] += sampled - started
        seconds["score"] += time.perf_counter() - sampled
        return Groups(examples, samples, scores.reshape(-1, len(examples), options.group_size))

    def _answers(
        self, model: Any, examples: np.ndarray, repeated: list[list[int]], request: SamplingRequest
    ) -> list[Sample]:
        if self._conversations is None:
            return self._sampler.sample(model, repeated, request)
        size = self.options.group_size
        records = main_only(lambda: self._records_of(examples)) or [Record("", {}, 0)] * len(examples)
        prompts = [
            Prompt(ids, self._decode(ids), records[number // size].values, records[number // size].where)
            for number, ids in enumerate(repeated)
        ]
        return self._conversations.of(model, prompts, request)

    def _scores(self, examples: np.ndarray, prompts: Sequence[np.ndarray], samples: Sequence[Sample]) -> np.ndarray:
        """float64 [rewards + 1, samples]. Process 0 computes them: rewards may be slow, random, or need its machine."""
        names = (*self.options.reward_names, TOTAL)

        def score() -> np.ndarray:
            assert self._rewards is not None, "this is process 0"
            scores = self._rewards.score(self._rows(examples, prompts, samples))
            if self._conversations is not None:
                earned = np.array([sample.reward for sample in samples])
                scores = {**scores, EARNED: earned, TOTAL: scores[TOTAL] + earned}
            if not is_float32(largest := float(np.abs(scores[TOTAL]).max())):
                raise ConfigError(
                    f"data.rewards: a weighted sum of {largest:g}, at most 3.4e+38 expected. Use smaller weights"
                )
            return np.stack([scores[name] for name in names])

        values = main_only(score)
        if values is None:
            values = np.zeros((len(names), len(samples)))
        return broadcast_from_main(values)

    def _rows(self, examples: np.ndarray, prompts: Sequence[np.ndarray], samples: Sequence[Sample]) -> ScoredRows:
        size = self.options.group_size
        records = [record for record in self._records_of(examples) for _ in range(size)]
        # Rewards score what the policy has written. What an environment has said is not its own.
        written = [tuple(itertools.compress(sample.tokens, sample.mask)) for sample in samples]
        return ScoredRows(
            prompts=[text for prompt in prompts for text in [self._decode(prompt.tolist())] * size],
            completions=[self._written(sample) for sample in samples],
            completion_ids=written,
            is_finished=[sample.is_finished for sample in samples],
            columns={key: [record.values.get(key) for record in records] for key in self._columns},
            places=[record.where for record in records],
        )

    def _written(self, sample: Sample) -> str:
        """Returns what the policy has written, its turns on lines of their own: digits of two turns are not one number."""
        # An environment may say nothing between two turns, so the mask alone does not tell them apart.
        key = lambda at: (bisect.bisect(sample.turn_ends, at), sample.mask[at])  # noqa: E731
        turns = itertools.groupby(range(len(sample.tokens)), key)
        return "\n".join(self._decode([sample.tokens[at] for at in turn]) for (_, is_own), turn in turns if is_own)

    def _log(self, step: int, groups: Groups) -> None:
        names, rewards = (*self.options.reward_names, TOTAL), groups.rewards
        scores = {name: values.ravel() for name, values in zip(names, groups.scores, strict=True)}
        rows = self._rows(groups.examples, self.prompts(groups.examples), groups.samples)
        self._log_rollout(step + 1, rows, scores, (rewards - rewards.mean(axis=1, keepdims=True)).ravel())

    def _records_of(self, examples: np.ndarray) -> list[Record]:
        def of_source(name: str, prompts: Examples, indices: np.ndarray) -> list[Record]:
            documents = document_numbers(prompts, indices).tolist()
            return self._records[name].of(documents, len(prompts.cache.offsets) - 1)

        return self._of_sources(examples, of_source)

    def _of_sources(self, examples: np.ndarray, read: Callable[[str, Examples, np.ndarray], Sequence[T]]) -> list[T]:
        """Returns what `read` returns for the examples of each source, in the order of the examples."""
        sources, indices = self._mixture.find(examples)
        results: dict[int, T] = {}
        for source in np.unique(sources).tolist():
            (rows,) = np.nonzero(sources == source)
            parts = read(self._mixture.names[source], self._mixture.examples_of(source), indices[rows])
            results |= zip(rows.tolist(), parts, strict=True)
        return [results[row] for row in range(len(examples))]

    def _metrics(self, groups: Groups) -> dict[str, float]:
        """Returns what is logged of the groups, with TRL's names where it has them."""
        lengths = np.array([sum(sample.mask) for sample in groups.samples])
        is_finished = np.array([sample.is_finished for sample in groups.samples])
        metrics = {
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": float(1 - is_finished.mean()),
        }
        if is_finished.any():
            metrics["completions/mean_terminated_length"] = float(lengths[is_finished].mean())
        for name, scores in zip(self.options.reward_names, groups.scores[:-1], strict=True):
            if (applies := ~np.isnan(scores)).any():
                metrics[f"rewards/{name}"] = float(scores[applies].mean())
        return metrics
