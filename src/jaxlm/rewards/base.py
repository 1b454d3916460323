"""The reward interface: a reward gives each completion a number."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import draccus
import numpy as np

from jaxlm.config.decode import choice_name
from jaxlm.core.errors import ConfigError

TOTAL = "reward"
"""Name of the weighted sum of all rewards."""


@dataclass(frozen=True)
class ScoredRows:
    """What rewards see: one entry per completion.

    Attributes:
        completions: the text of each completion, without special tokens.
        completion_ids: its tokens, with the end-of-sequence token if the policy wrote it.
        is_finished: whether it ends with an end-of-sequence token.
        columns: the other values of each prompt's record, by key.
        places: where each prompt's record is, for messages.
    """

    prompts: Sequence[str]
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    is_finished: Sequence[bool]
    columns: Mapping[str, Sequence[Any]]
    places: Sequence[str]


@dataclass(frozen=True)
class RewardContext:
    """What rewards may use besides the completions.

    Attributes:
        decode: token ids to text, without special tokens.
        max_new_tokens: the number of tokens after which a completion is cut off.
        eos_ids: the tokens that end a completion.
    """

    decode: Callable[[Sequence[int]], str]
    max_new_tokens: int
    eos_ids: tuple[int, ...]


class Reward(abc.ABC):
    """An open reward."""

    @abc.abstractmethod
    def score(self, rows: ScoredRows) -> list[float | None]:
        """One number per completion. None: this reward does not apply to it."""


@dataclass(frozen=True)
class RewardConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.rewards"):
    """A reward. A completion's total reward is the weighted sum of the rewards that apply to it.

    Attributes:
        name: its name in metrics and messages; null takes the type's name.
        weight: its factor in the total reward.
    """

    name: str | None = field(default=None, kw_only=True)
    weight: float = field(default=1.0, kw_only=True)

    def check(self) -> None:
        """Raises `ConfigError` if a key cannot work. Called before anything is compiled."""
        return

    @abc.abstractmethod
    def open(self, context: RewardContext) -> Reward:
        """Opens the reward."""


def reward_names(configs: Sequence[RewardConfig]) -> list[str]:
    """The name of each reward. Raises `ConfigError` if two are equal or one is reserved."""
    names = [config.name or choice_name(type(config)) for config in configs]
    if TOTAL in names or len(set(names)) < len(names):
        raise ConfigError(f"rewards: the names {', '.join(names)} given, different ones expected. Set `name`")
    return names


class Rewards:
    """All rewards of a run."""

    def __init__(self, configs: Sequence[RewardConfig], context: RewardContext, *, timeout_s: float):
        """Args: timeout_s: how long one call of `score` may take."""
        del timeout_s
        names = reward_names(configs)
        self._rewards = {
            name: (config.weight, config.open(context)) for name, config in zip(names, configs, strict=True)
        }

    def score(self, rows: ScoredRows) -> dict[str, np.ndarray]:
        """The rewards by name, float64 [rows], NaN where one does not apply; and `reward`, the weighted sum of the others."""
        scores = {name: np.array(reward.score(rows), np.float64) for name, (_, reward) in self._rewards.items()}
        total = sum(weight * np.nan_to_num(scores[name]) for name, (weight, _) in self._rewards.items())
        return {**scores, TOTAL: np.asarray(total, np.float64)}

    def close(self) -> None:
        """Releases what the rewards hold."""
