"""Answers held-out prompts, and rewards the answers."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt, Seconds
from jaxlm.core.hashing import note
from jaxlm.core.rules import Rules, excludes, ordered
from jaxlm.core.runtime import broadcast_from_main, from_main, main_only
from jaxlm.core.safe_io import read_json_lines
from jaxlm.core.values.logged import TOTAL, ScoredRows
from jaxlm.evals.base import Eval, EvalConfig, EvalContext, EvalMetrics, EvalScope
from jaxlm.evals.batches import check_fits, prompt_ids
from jaxlm.evals.samples import SamplingKeys
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.generate import GenerationConfig
from jaxlm.reading.choices import choice
from jaxlm.systems.rl.rewards.base import RewardConfig, RewardContext, Rewards, reward_names

_KEY = "evals: type rollouts"


@choice(EvalConfig, "rollouts")
class RolloutsEvalConfig(SamplingKeys, EvalConfig):
    """Answers held-out prompts and rewards the answers. Logs `eval/<name>/reward`, the mean of each reward, and the lengths.

    Attributes:
        prompts_file: file of JSON lines, one prompt each. Rewards may read the other keys of its records.
        rewards: how answers are rewarded.
        prompt_key: key of the prompt's text.
        messages_key: key of a conversation, which the tokenizer's chat template renders, instead of a text; null reads
            `prompt_key`.
        max_prompts: number of prompts, from the first on; null takes all.
        num_samples: number of answers to each prompt.
        max_new_tokens: maximum number of tokens per answer.
        stop_tokens: special tokens that end an answer, besides the tokenizer's end-of-sequence tokens. For chats, the one
            that ends the assistant's turn.
        batch_size: number of answers that are generated at a time.
        reward_timeout_s: maximum seconds for a reward to score all answers.
        name: first part of the names of its metrics, and in those of its completions. Several evaluations of this type need
            different names.
    """

    scope: ClassVar[EvalScope] = EvalScope(next_tokens=True)

    prompts_file: str = ""
    rewards: list[RewardConfig] = field(default_factory=list)
    prompt_key: str = "prompt"
    messages_key: str | None = None
    max_prompts: PositiveInt | None = None
    num_samples: PositiveInt = 1
    max_new_tokens: PositiveInt = 256
    stop_tokens: list[str] = field(default_factory=list)
    batch_size: PositiveInt = 32
    reward_timeout_s: Seconds = 300.0
    name: str = "rollouts"

    key_rules: ClassVar[Rules] = (
        ordered("num_samples", "batch_size"),
        excludes("num_samples", when="temperature", is_=0.0, why="with which all answers are the same"),
    )

    @property
    def metrics(self) -> EvalMetrics:
        of_rewards = [f"rewards/{name}" for name in reward_names(self.rewards)]
        names = [TOTAL, *of_rewards, "completions/mean_length", "completions/clipped_ratio"]
        return EvalMetrics(tuple(f"{self.name}/{one}" for one in names), self.name)

    def check(self) -> None:
        if not self.prompts_file or not self.rewards:
            missing = "rewards" if self.prompts_file else "prompts_file"
            raise ConfigError(
                f"{_KEY}: {missing}: missing. Give a file of prompts, and at least one reward, such as"
                " {type: exact_match, column: answer}"
            )
        if not Path(self.prompts_file).is_file():
            raise ConfigError(f"{_KEY}: prompts_file: there is no file {self.prompts_file}. Correct the path")
        reward_names(self.rewards)
        for reward in self.rewards:
            reward.check()

    def check_opens(self, tokenizer: Callable[[], Any], seq_len: int, *, dry: bool) -> None:
        self.check()
        columns = {name for _, record in self._records() for name in record} - {self._prompt_key}
        with self.open_rewards(tokenizer(), dry=dry) as rewards:
            rewards.check_columns(columns)

    def open_rewards(self, tokenizer: Any, *, dry: bool = False) -> Rewards:
        """Starts the processes of the rewards. Args: dry: do not wait for a server that is not ready."""
        context = RewardContext(tokenizer.decode, self.max_new_tokens, self.stop_ids(tokenizer), dry)
        return Rewards(self.rewards, context, timeout_s=self.reward_timeout_s)

    def stop_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """The tokens that end an answer. Raises `ConfigError` if the tokenizer lacks one of `stop_tokens`."""
        vocabulary = tokenizer.vocabulary() if self.stop_tokens else {}
        if missing := [token for token in self.stop_tokens if token not in vocabulary]:
            raise ConfigError(
                f"{_KEY}: stop_tokens: '{missing[0]}' given, but the tokenizer has no such token. Correct it"
            )
        return (*(vocabulary[token] for token in self.stop_tokens), *tokenizer.stop_ids)

    def open(self, ctx: EvalContext) -> Eval:
        prompts = list(self._prompts(ctx))
        longest = max(prompts, key=lambda prompt: len(prompt.ids))
        check_fits(f"{_KEY}: the prompt of {longest.place}", len(longest.ids), self.max_new_tokens, ctx.seq_len)
        return RolloutsEval(self, ctx, prompts)

    @property
    def _prompt_key(self) -> str:
        return self.prompt_key if self.messages_key is None else self.messages_key

    def _records(self) -> list[tuple[str, dict[str, Any]]]:
        records = list(itertools.islice(read_json_lines(self.prompts_file, _KEY), self.max_prompts))
        if not records:
            raise ConfigError(f"{_KEY}: prompts_file: {self.prompts_file} has no prompt")
        key = self._prompt_key
        for place, record in records:
            if key not in record:
                raise ConfigError(
                    f"{_KEY}: {place}: there is no key '{key}'. Its keys: {', '.join(record) or 'none'}. Set prompt_key or"
                    " messages_key"
                )
            if self.messages_key is None and not isinstance(record[key], str):
                raise ConfigError(f"{_KEY}: {place}: {key}: a text expected, but it is {str(record[key])[:60]}")
        return records

    def _prompts(self, ctx: EvalContext) -> Iterator["_Prompt"]:
        key = self._prompt_key
        records = from_main(self._records)  # the file of another process may differ
        note(f"{_KEY}: {self.name}: prompts_file", json.dumps([record for _, record in records]), evaluates=True)
        for place, record in records:
            columns = {name: value for name, value in record.items() if name != key}
            if self.messages_key is not None:
                text, ids = ctx.chat_prompt(record, key, place)
            else:
                text = record[key]
                ids = prompt_ids(ctx.tokenizer, text, bos=ctx.enforce_bos)
            yield _Prompt(place, text, ids, columns)


class _Prompt(NamedTuple):
    place: str
    text: str
    ids: list[int]
    columns: Mapping[str, Any]


class RolloutsEval(Eval):
    """Generates on all processes. The rewards are those that process 0 gives."""

    def __init__(self, config: RolloutsEvalConfig, ctx: EvalContext, prompts: Sequence[_Prompt]):
        self._config = config
        self._ctx = ctx
        self._prompts = [prompt for prompt in prompts for _ in range(config.num_samples)]
        self._stop_ids = config.stop_ids(ctx.tokenizer)
        self._warned: set[str] = set()
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        self._columns = {name: [prompt.columns.get(name) for prompt in self._prompts] for name in names}

    def run(self, model: LanguageModel) -> dict[str, float]:
        config = self._config
        # All answers to a prompt are in one batch, which gives each of them a key of its own.
        size = min(config.batch_size // config.num_samples * config.num_samples, len(self._prompts))
        prompts = [prompt.ids for prompt in self._prompts]
        prompts += [prompts[-1]] * (-len(prompts) % size)  # the same shape for all batches: one program
        generation = GenerationConfig.of(config, stop_ids=self._stop_ids, with_stop=True)
        ids = self._ctx.batched(model, size).generate(prompts, generation)[: len(self._prompts)]
        finished = [bool(row) and row[-1] in self._stop_ids for row in ids]
        rows = ScoredRows(
            prompts=[prompt.text for prompt in self._prompts],
            completions=[
                self._ctx.tokenizer.decode(row[:-1] if end else row) for row, end in zip(ids, finished, strict=True)
            ],
            completion_ids=ids,
            is_finished=finished,
            columns=self._columns,
            places=[prompt.place for prompt in self._prompts],
        )
        scores = self._score(rows)
        means = {
            name: float(np.mean(known)) for name, values in scores.items() if len(known := values[~np.isnan(values)])
        }
        self._warn_of([name for name in scores if name not in means])
        lengths = {
            "completions/mean_length": float(np.mean([len(row) for row in rows.completion_ids])),
            "completions/clipped_ratio": 1 - float(np.mean(finished)),
        }
        named = {TOTAL if name == TOTAL else f"rewards/{name}": mean for name, mean in means.items()}
        return {f"{config.name}/{name}": value for name, value in (named | lengths).items()}

    def _warn_of(self, names: Sequence[str]) -> None:
        """Says once of each reward that it has no metric."""
        for name in (name for name in names if name not in self._warned):
            self._warned.add(name)
            self._ctx.log(
                f"warning: evaluation '{self._config.name}': the reward '{name}' applies to none of the"
                f" {len(self._prompts)} answers, so it has no metric"
            )

    def _score(self, rows: ScoredRows) -> dict[str, np.ndarray]:
        def score() -> dict[str, np.ndarray]:
            with self._config.open_rewards(self._ctx.tokenizer) as rewards:
                scores = rewards.score(rows)
            self._ctx.log_completions(self._config.name, rows, scores)
            return scores

        result = main_only(score)
        names = [*reward_names(self._config.rewards), TOTAL]
        table = np.zeros((len(names), len(rows))) if result is None else np.stack([result[name] for name in names])
        return dict(zip(names, broadcast_from_main(table), strict=True))
