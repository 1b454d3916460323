"""The reward interface: a reward gives each completion a number. Every reward of a run works in a process of its own."""

import abc
import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

import draccus
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.logged import TOTAL, ScoredRows
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import choice_name
from jaxlm.systems.rl.rewards.worker import RewardWorker

_T = TypeVar("_T")


@dataclass(frozen=True)
class RewardContext:
    """Holds what rewards may use besides the completions.

    Attributes:
        decode: token ids to text, without special tokens.
        max_new_tokens: the number of tokens after which a completion is cut off.
        eos_ids: the tokens that end a completion.
        dry: whether the reward is only opened to see whether it opens: do not wait for a server that is not ready.
    """

    decode: Callable[[Sequence[int]], str]
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    dry: bool = False


class Reward(abc.ABC):
    """An open reward."""

    scores_alone: bool = True
    """Whether a completion's score does not depend on the others. Then `score` gets them one at a time, and an error names
    the record."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that every prompt's record must have."""
        return ()

    @abc.abstractmethod
    def score(self, rows: ScoredRows) -> list[float | None]:
        """One number per completion. None: this reward does not apply to it."""


@dataclass(frozen=True)
class RewardConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A reward. A completion's total reward is the weighted sum of the rewards that apply to it.

    Attributes:
        name: its name in metrics and messages; null takes the type's name.
        weight: its factor in the total reward. 0 only logs it.
    """

    name: str | None = field(default=None, kw_only=True)
    weight: float = field(default=1.0, kw_only=True)

    @property
    def default_name(self) -> str:
        return choice_name(type(self)).rpartition(":")[2]

    def check(self) -> None:
        """Raises `ConfigError` if a key cannot work. Called before anything is compiled, and without a device."""
        return

    @abc.abstractmethod
    def open(self, context: RewardContext) -> Reward:
        """Opens the reward. Runs in the reward's own process, which has no accelerator."""


def compiled_pattern(pattern: str, key: str) -> re.Pattern[str]:
    """A regular expression. Raises `ConfigError` if it is invalid. Args: key: for messages."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{key}: '{pattern}' is not a valid regular expression: {error}") from error


def reward_names(configs: Sequence[RewardConfig]) -> list[str]:
    """The name of each reward. Raises `ConfigError` if two are equal or one is reserved."""
    names = [config.name or config.default_name for config in configs]
    for name in names:
        if name == TOTAL:
            raise ConfigError(
                f"rewards: the name '{TOTAL}' given, which is that of the weighted sum. Set another `name`"
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"rewards: {names.count(name)} rewards have the name '{name}'. Set `name` in each of them"
            )
    return names


def _answers(workers: Mapping[str, RewardWorker], ask: Callable[[RewardWorker], _T]) -> dict[str, _T]:
    """Collects what processes answer. A thread listens to each: one without a listener would stop working. The first error
    is raised at once, and the processes that have not answered are ended: no answer must be left for the next call.
    """
    with ThreadPoolExecutor(max(len(workers), 1)) as pool:
        answers = {name: pool.submit(ask, worker) for name, worker in workers.items()}
        try:
            done, _ = wait(answers.values(), return_when=FIRST_EXCEPTION)
            return {name: answer.result() for name, answer in answers.items() if answer in done}
        except BaseException:
            for name, answer in answers.items():
                if not answer.done():
                    workers[name].end()
            raise


class Rewards:
    """All rewards of a run. Each works in its own process, so all run at the same time, and one that hangs can be ended.

    A reward that raises, hangs, or returns something other than one finite number or None per completion raises
    `ConfigError` at once, and the others are ended. After that, `score` can be called again: it starts them anew.
    """

    def __init__(self, configs: Sequence[RewardConfig], context: RewardContext, *, timeout_s: float):
        """Args: timeout_s: how long each reward may take in a call of `score`."""
        self._weights = {name: config.weight for name, config in zip(reward_names(configs), configs, strict=True)}
        for config in configs:
            config.check()
        self._workers: dict[str, RewardWorker] = {}
        try:
            for name, config in zip(self._weights, configs, strict=True):
                self._workers[name] = RewardWorker(name, config, context, timeout_s)
            self._columns = _answers(self._workers, RewardWorker.open)
        except BaseException:
            self.close()
            raise

    @property
    def columns(self) -> frozenset[str]:
        """The columns that some reward reads."""
        return frozenset().union(*self._columns.values())

    def check_columns(self, existing: Collection[str]) -> None:
        """Raises `ConfigError` if a reward reads a column that the records do not have."""
        for name, columns in self._columns.items():
            if missing := [column for column in columns if column not in existing]:
                has = ", ".join(sorted(existing)) or "none besides the prompt"
                raise ConfigError(
                    f"reward '{name}' reads the column '{missing[0]}', which the records do not have. Their columns: {has}."
                    " Change the reward's keys, or add the column to the records"
                )

    def score(self, rows: ScoredRows) -> dict[str, np.ndarray]:
        """The rewards by name, float64 [rows], NaN where one does not apply; and `reward`, the weighted sum of the others."""
        assert len(rows), "there is a completion to score"
        self.check_columns(rows.columns)
        _answers({name: worker for name, worker in self._workers.items() if worker.restart()}, RewardWorker.open)
        pickled = pickle.dumps(rows)
        answers = _answers(self._workers, lambda worker: worker.score(rows, pickled))
        scores = {name: np.array(values, np.float64) for name, values in answers.items()}
        total = np.zeros(len(rows))
        for name, values in scores.items():
            total += self._weights[name] * np.nan_to_num(values)
        return {**scores, TOTAL: total}

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers.values():
            worker.close()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
